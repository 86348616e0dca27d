"""Code blocks of the tutorials: files to write, and commands to run in their order.

A block with `title="NAME"` is the file NAME. A `bash` block is run. A comment on the line before,
`<!-- test: COMMAND -->`, names what a test runs in its place: the same with fewer steps, or the
form of it that needs no GPU and no cluster. Other blocks are refused, so that none is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?ms)^(?:<!-- test: (?P<instead>[^\n]*?) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$"
)
_TITLE = re.compile(r'title="([\w.-]+)"')


@dataclass(frozen=True)
class CodeBlock:
    """One block: a file (`name` and its text), or a script of the shell (`name` is None)."""

    name: str | None
    text: str


def code_blocks(page: Path) -> list[CodeBlock]:
    """All blocks of a page in their order. Raises ValueError for one that is neither."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = _TITLE.fullmatch(rest.strip())
        if title is not None:
            found.append(CodeBlock(title[1], match["text"]))
        elif language == "bash" and not rest:
            found.append(CodeBlock(None, match["instead"] or match["text"]))
        else:
            raise ValueError(f"{page.name}: a block is neither a file nor bash: {match['info']!r}")
    if len(found) * 2 != len(re.findall(r"(?m)^```", text)) or re.search(
        r"(?m)^    \S", _without(text)
    ):
        raise ValueError(f"{page.name}: a block that is not fenced, or not closed")
    return found


def _without(text: str) -> str:
    """The page's prose, without its fenced blocks."""
    return _BLOCK.sub("", text)
