"""Fenced code blocks of replies: where they begin and end, and which one is the answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from troupe.functions.library.answers import code_in, json_schema
from troupe.functions.library.judge import read_score
from troupe.replies.reading import read_blocks, read_fenced_json

CODE = "def f(n):\n    return n * n\n"
DOCUMENTED = 'def f(n):\n    """\n    ```\n    f(2)\n    ```\n    """\n    return n * n\n'


def indented(text: str, by: str) -> str:
    return "".join(by + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    "opening",
    [
        "```python",
        "```",
        "``` python",
        "```  Python  ",
        "```PY",
        "```py3",
        "```python3.11",
        "```ipython",
        "```{python}",
        "```language-python",
        "```lang=python",
        "``` {.python .numberLines}",
        "```{python, echo=FALSE}",
        '```python title="solution.py"',
        "```python:solution.py",
        "```solution.py",
        "```python\t",
        "~~~python",
        "~~~ python `quoted`",
        "`````python",
        "   ```python",
        "Here it is: ```python",
        "Here it is: ``` python",
        'Here it is: ```python title="x"',
        "\N{ZERO WIDTH NO-BREAK SPACE}```python",
        "`f` is this: ```",
        "<answer>```python",
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_code_is_found_behind_any_opening_fence(opening: str, newline: str) -> None:
    closing = re.findall("`{3,}|~{3,}", opening)[0]
    for code in (CODE, DOCUMENTED):
        reply = f"The square:\n\n{opening}\n{code}{closing}\n\nThat is all.\n"
        assert code_in(reply.replace("\n", newline)) == code


@pytest.mark.parametrize(
    "reply",
    [
        f"```python\n{CODE}",
        f"```python\n{CODE.rstrip()}",
        f"```python\n{CODE.rstrip()}```",
        f"```python\n{CODE}```   ",
        f"```python\n{CODE}   ```",
        f"```python\n{CODE}``````",
        f"<answer>\n```python\n{CODE}```\n</answer>",
        f"<answer>```python\n{CODE}```</answer>",
        f"```python\n{CODE}```<|im_end|>",
        f"```python\n{CODE}``` <br>\nThat is all.",
        f"1. Square it:\n   ```python\n{indented(CODE, '   ')}   ```\n2. Done.",
        f"10. Square it:\n\n    ```python\n{indented(CODE, '    ')}    ```\n",
        f"1. Square it:\n   ```python\n{CODE}   ```\n2. Done.",
        f"- ```python\n{indented(CODE, '  ')}  ```\n",
        f"> ```python\n{indented(CODE, '> ')}> ```\n",
        f"    ```python\n{indented(CODE, '    ')}    ```\n",
        f"````markdown\nThe answer:\n```python\n{CODE}```\n````\n",
        f"```markdown\nThe answer:\n```python\n{CODE}```\n```\n",
        f"```python\nprint(f(2)\n```\nNo, rather:\n```python\n{CODE}```",
        f"```python\n{CODE}```\nIt prints:\n```\n4\n```",
        f"```python\n{CODE}```\nRun it:\n```bash\npython solution.py\n```",
        f"```python\n{CODE}```\n```python\n```",
        f"```\nfirst draft\n```\n```\n{CODE}```",
        CODE,
        f"Put it into ``` and then\n```python\n{CODE}```",
        f"Put it into ``` fences\n```python\n{CODE}```",
        f"Not ```this``` one:\n```python\n{CODE}```",
        f"```python\n{CODE}``` and that is all of it.",
        f"```python\n{CODE}```.",
        f"```python\n{CODE}```: it squares.",
        f"<think>?</think><answer>\n{CODE}</answer>",
        f"It squares.\n<answer>`{CODE.rstrip()}`</answer>",
        f"`{CODE.rstrip()}`",
        f"`python {CODE.rstrip()}`",
    ],
)
def test_code_is_found_wherever_its_block_lies_and_ends(reply: str) -> None:
    assert code_in(reply).strip() == CODE.strip()


def test_only_the_language_in_front_is_taken_off_a_code_span() -> None:
    assert code_in("`py copy = [1]; copy (copy )`") == "copy = [1]; copy (copy )"


lines = st.sampled_from(
    ["```", "```python", "~~~", "````", "  ```", "   ~~~~", "~~~ a `b`", "", "x = 1", "  y", "text"]
)


@given(st.lists(lines, max_size=8))
def test_property_blocks_are_those_of_a_commonmark_parser(given_lines: list[str]) -> None:
    """In documents that CommonMark allows. Its blocks may be blank, and keep common indentation."""
    text = "\n".join(given_lines)
    fences = [one for one in MarkdownIt("commonmark").parse(text) if one.type == "fence"]
    expected = [(one.info.strip(), one.content.split()) for one in fences if one.content.strip()]
    found = [(one.info, one.text.split()) for one in read_blocks(text) if one.info is not None]
    assert found == expected


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 0.5}',
        '```json\n{"score": 0.5}\n```',
        '```JSON\n{"score": 0.5}\n```',
        '``` json\n{"score": 0.5}\n```\n',
        '```json title="x"\n{"score": 0.5}\n```',
        '```jsonc\r\n{"score": 0.5}\r\n```\r\n',
        '~~~~json\n{"score": 0.5}\n~~~~',
        '```json\n{"score": 0.5}```',
        '```json\n{"score": 0.5}',
        '```json {"score": 0.5}```',
        '```{"score": 0.5}```',
        '```{"score":\n0.5}\n```',
        '```json {"score":\n0.5}```',
        '```JSON{"score": 0.5}\n```',
        '`{"score": 0.5}`',
        '<think>```json\n{"score": 1}\n```</think>\n```Json\n{"score": 0.5}\n```',
    ],
)
def test_json_is_read_whatever_its_fence_looks_like(reply: str) -> None:
    assert read_score(reply, 0.0, 1.0) == 0.5
    query: dict[str, Any] = {"data": {}}
    turns = [{"agent": "a", "response": reply, "tokens": 1}]
    assert json_schema(query, turns, {}, json_schema={"required": ["score"]}) == 1.0


@pytest.mark.parametrize(
    "text",
    ["```", "````", "``", "```json\n```", "a ```json\n{}\n```", "```json\n{}\n```\n[]", "json"],
)
def test_a_text_with_more_or_less_than_one_fence_is_refused(text: str) -> None:
    assert read_fenced_json(text) is None
