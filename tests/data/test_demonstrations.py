"""Rows of demonstrations as prompts and responses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.preferences.pairs import Pairs
from examples.supervised.rows import Rows
from tests.workflow.stage import CHATML, END, THINKING, TOOLED, make_beginning_chat, make_chat
from troupe.client.cli.specification import read_data, try_imports
from troupe.data.demonstrations import (
    Demonstration,
    demonstrations_of,
    joint_preferences_of,
    preferences_of,
)
from troupe.job import JobSpecError, TasksSpec, load_job
from troupe.replies.formats import parser_of
from troupe.workflow import Role, Sampling, WorkflowError

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
MORE = [*HELLO, {"role": "user", "content": "bye"}, {"role": "assistant", "content": "so long"}]


def roles(*names: str, template: str | None = None, system: str | None = None) -> dict[str, Role]:
    chat = make_chat(template) if template else make_chat()
    return {n: Role(n, f"{n}-policy", chat, Sampling(max_new_tokens=8), system) for n in names}


def texts(found: list[Demonstration], who: dict[str, Role]) -> list[tuple[str, str]]:
    chat = next(iter(who.values())).tokenizer
    return [(chat.transcript(d.prompt_ids), chat.transcript(d.response_ids)) for d in found]


def test_every_reply_of_a_conversation_is_a_sample_that_ends_its_turn() -> None:
    who = roles("solver")
    found = demonstrations_of({"messages": MORE}, who)
    (first, reply), (second, last) = texts(found, who)
    assert first == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (reply, last) == (f"hello{END}", f"so long{END}")
    assert second == f"{first}{reply}\n<|im_start|>user\nbye{END}\n<|im_start|>assistant\n"
    assert [one.turn for one in found] == [0, 1]
    # It is an engine's prompt, with the expected answer.
    chat = who["solver"].tokenizer
    assert found[0].prompt_ids == chat.first_ids((("user", "hi"),))
    assert texts(demonstrations_of({"messages": MORE}, who, turns="last"), who) == [(second, last)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "hello"},
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"prompt": HELLO[:1], "completion": "hello"},
        {"messages": HELLO, "agent": "solver"},
    ],
)
def test_all_forms_of_a_demonstration_give_the_same_rows(row: dict[str, Any]) -> None:
    who = roles("solver", "checker")
    found = demonstrations_of(row, who, agent="solver")
    assert found == demonstrations_of({"messages": HELLO}, roles("solver"))


def test_only_the_completion_is_learned() -> None:
    who = roles("solver", system="be kind")
    found = demonstrations_of({"prompt": MORE[:3], "completion": MORE[3:]}, who)
    ((prompt, reply),) = texts(found, who)
    assert reply == f"so long{END}"
    assert prompt.startswith("<|im_start|>system\nbe kind")
    assert "hello" in prompt


def test_texts_may_be_joined_as_they_are() -> None:
    who = roles("solver")
    row = {"prompt": "1+1=", "completion": "2"}
    assert texts(demonstrations_of(row, who, template=False), who) == [("1+1=", f"2{END}")]
    row = {"prompt": "", "completion": "abc"}
    assert texts(demonstrations_of(row, who, template=False), who) == [("a", f"bc{END}")]


def test_a_demonstrated_reply_is_the_text_that_the_template_renders() -> None:
    """Thoughts of earlier replies are cut; of the last one, too, by this template."""
    who = roles("solver", template=THINKING)
    spoken = [HELLO[0], {"role": "assistant", "content": "hm</think>hello"}]
    assert texts(demonstrations_of({"messages": spoken}, who), who)[0][1] == f"hello{END}"


def test_a_template_that_shows_replies_otherwise_does_not_change_what_is_said() -> None:
    """The rendered reply does not begin with the generation prompt: it is content and end."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nnow: {% endif %}"
    )
    who = roles("solver", template=template)
    ((prompt, reply),) = texts(demonstrations_of({"messages": HELLO}, who), who)
    assert prompt.endswith("assistant\nnow: ")
    assert reply == f"hello{END}"


def test_long_samples_are_cut_and_long_prompts_left_out() -> None:
    who = roles("solver")
    whole = demonstrations_of({"messages": MORE}, who)
    sizes = [len(one.prompt_ids) + len(one.response_ids) for one in whole]
    first, *rest = demonstrations_of({"messages": MORE}, who, max_tokens=sizes[0] - 2)
    assert not rest
    assert first.truncated
    assert first.response_ids == whole[0].response_ids[:-2]
    cut = demonstrations_of({"messages": MORE}, who, max_tokens=sizes[1])
    assert [one.truncated for one in cut] == [False, False]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "abc"}, "has the fields text"),
        ({"messages": HELLO, "prompt": "a", "completion": "b"}, "has the fields messages"),
        ({"messages": HELLO[:1]}, "nothing is learned"),
        ({"messages": HELLO[1:]}, "nothing is learned"),
        ({"messages": HELLO, "agent": "nobody"}, "'nobody' does not learn; there are checker"),
        ({"messages": HELLO}, "does not name an `agent`"),
        ({"messages": [{"role": "user"}]}, "needs `role` and `content`"),
        ({"messages": "hi"}, "`messages` are a text"),
        ({"prompt": 5, "completion": "a"}, "`prompt` is 5, not a text or a list"),
        ({"prompt": "a", "completion": {"role": "assistant"}}, "`completion` is {'role'"),
        ({"messages": HELLO, "agent": ["solver"]}, r"agent \['solver'\] does not learn"),
        ({"messages": HELLO, "tools": 5}, "`tools` are 5, not a list"),
        ({"messages": HELLO, "tools": "[{"}, r"`tools` are '\[{', not a list"),
    ],
)
def test_a_row_that_cannot_be_learned_says_why(row: dict[str, Any], why: str) -> None:
    agent = None if why.startswith("does not name") else "solver"
    with pytest.raises(WorkflowError, match=why):
        demonstrations_of(row, roles("solver", "checker"), agent=agent)


@pytest.mark.parametrize("given", [None, [], "", "null", "[]"])
def test_tools_may_be_json_text(given: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]
    who = roles("solver", template=TOOLED)
    shown = demonstrations_of({"messages": HELLO, "tools": json.dumps(tools)}, who)
    assert shown == demonstrations_of({"messages": HELLO, "tools": tools}, who)
    without = demonstrations_of({"messages": HELLO, "tools": given}, who)
    assert without == demonstrations_of({"messages": HELLO}, who) != shown


@pytest.mark.parametrize(
    "row", [{"prompt": "a\ud83d", "completion": "b"}, {"prompt": "a", "completion": "b\udc00"}]
)
def test_half_a_surrogate_pair_is_accepted(row: dict[str, Any]) -> None:
    """JSON may hold one, and tokenizers refuse it."""
    (one,) = demonstrations_of(row, roles("solver"), template=False)
    assert len(one.prompt_ids + one.response_ids) >= 3


def test_a_bad_first_row_is_found_when_the_job_is_validated(tmp_path: Path) -> None:
    job = load_job(Path(__file__).parents[2] / "examples/supervised/job.yaml")
    path = tmp_path / "rows.jsonl"
    for row, why in (
        ({"messages": HELLO, "agent": "solver"}, None),
        ({"messages": HELLO}, "does not name an `agent`"),
        ({"messages": HELLO[:1], "agent": "solver"}, "nothing is learned"),
    ):
        path.write_text(json.dumps(row) + "\n")
        assert job.supervised is not None
        tasks = TasksSpec(dataset=str(path))
        own = job.model_copy(
            update={"supervised": job.supervised.model_copy(update={"tasks": tasks})}
        )
        if why is None:
            read_data(own)
            continue
        with pytest.raises(JobSpecError, match=why) as refused:
            read_data(own)
        assert refused.value.problems[0].field == "supervised.tasks"


def test_the_rows_of_the_example_can_be_learned() -> None:
    spec = load_job(Path(__file__).parents[2] / "examples/supervised/job.yaml")
    assert spec.supervised is not None
    assert "supervised.tasks.source" in try_imports(spec)
    rows = Rows("train")
    who = roles("solver", "checker")
    for index in (0, 1, 7):
        (one,) = demonstrations_of(rows[index], who)
        assert one.agent == ("solver", "checker")[index % 2]
        assert one.response_ids[-1] == who["solver"].tokenizer.end_id


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ASKS = "<|im_start|>assistant\n"
# The generation prompt opens a thought. Of the message itself they show: what it says, thoughts
# included, as Qwen3-Thinking; its answer alone, as QwQ and DeepSeek-R1; the whole content.
_THINKS = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}SHOWN{% else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
_ANSWER = "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
_THOUGHTS = (
    "{{ '<think>\n' + (m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1]"
    " if m.reasoning_content or '</think>' in m.content else '').strip() + '\n</think>\n\n' }}"
)
OPEN_TEMPLATES = {
    "thoughts": _THINKS.replace("SHOWN", _THOUGHTS + _ANSWER),
    "answer": _THINKS.replace("SHOWN", _ANSWER),
    "content": _THINKS.replace("SHOWN", "{{ m.content }}"),
    "no newline": _THINKS.replace("SHOWN", _ANSWER).replace(
        "<think>\n' }}{% endif", "<think>' }}{% endif"
    ),
}


@pytest.mark.parametrize("template", OPEN_TEMPLATES)
@pytest.mark.parametrize(
    ("reply", "thoughts"),
    [
        (assistant("hello", reasoning_content="hm"), "hm"),
        (assistant("hello", reasoning="hm"), "hm"),
        (assistant("<think>\nhm\n</think>\n\nhello"), "hm"),
        (assistant("hm\n</think>\n\nhello"), "hm"),
        (assistant("hello"), ""),
    ],
)
def test_a_reply_closes_the_thought_that_the_prompt_opens(
    template: str, reply: dict[str, Any], thoughts: str
) -> None:
    who = roles("solver", template=OPEN_TEMPLATES[template])
    ((prompt, learned),) = texts(demonstrations_of({"messages": [HELLO[0], reply]}, who), who)
    assert prompt.rstrip().endswith(f"{ASKS}<think>")
    # Together they are the output of a model of this family.
    said = (prompt + learned).partition(ASKS)[2]
    assert said == f"<think>\n{thoughts}\n</think>\n\nhello{END}"


def test_thoughts_are_learned_where_the_template_leaves_them_out() -> None:
    who = roles("solver")
    row = {"messages": [HELLO[0], assistant("hello", reasoning_content="hm")]}
    ((_, learned),) = texts(demonstrations_of(row, who), who)
    assert learned == f"<think>\nhm\n</think>\n\nhello{END}"
    inline = {"messages": [HELLO[0], assistant("<think>\nhm\n</think>\n\nhello")]}
    for template in (CHATML, THINKING):
        cut = roles("solver", template=template)
        assert texts(demonstrations_of(inline, cut), cut)[0][1] == learned
    silent = {n: replace(r, parser=parser_of("hermes", "none")) for n, r in who.items()}
    with pytest.raises(WorkflowError, match="does not show `reasoning_content`"):
        demonstrations_of(row, silent)


@pytest.mark.parametrize("shows", ["", "<think>\n\n</think>\n\n"])
def test_a_thought_that_is_part_of_the_answer_is_learned(shows: str) -> None:
    template = CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}" + shows + "{% endif %}{{ m.content }}"
    )
    who = roles("solver", template=template)
    row = {"messages": [HELLO[0], assistant("hello", reasoning_content="hell")]}
    ((_, learned),) = texts(demonstrations_of(row, who), who)
    assert learned == f"<think>\nhell\n</think>\n\nhello{END}"


def test_a_prompt_that_closes_the_thought_is_answered_without_one() -> None:
    """Qwen3's template has such prompts with `enable_thinking: false`, an option of the policy."""
    template = OPEN_TEMPLATES["thoughts"].replace(
        "<think>\n' }}{% endif",
        "' + ('<think>\n' if enable_thinking else '<think>\n\n</think>\n\n') }}{% endif",
    )
    row = {"messages": [HELLO[0], assistant("hello", reasoning_content="hm")]}
    who = roles("solver", template=template)
    for thinks, learned in ((True, "hm\n</think>\n\nhello"), (False, "hello")):
        own = {
            name: replace(role, template_options={"enable_thinking": thinks})
            for name, role in who.items()
        }
        assert texts(demonstrations_of(row, own), own)[0][1] == f"{learned}{END}"


@pytest.mark.parametrize("template", [*OPEN_TEMPLATES.values(), CHATML, THINKING])
def test_a_thought_that_a_row_has_twice_is_learned_once(template: str) -> None:
    who = roles("solver", template=template)
    twice = assistant("<think>\nhm\n</think>\n\nhello", reasoning_content="hm")
    once = assistant("hello", reasoning_content="hm")
    assert demonstrations_of({"messages": [HELLO[0], twice]}, who) == demonstrations_of(
        {"messages": [HELLO[0], once]}, who
    )


@pytest.mark.parametrize("template", OPEN_TEMPLATES)
def test_a_thought_that_was_cut_off_is_learned_as_a_thought(template: str) -> None:
    who = roles("solver", template=OPEN_TEMPLATES[template])
    row = {"messages": [HELLO[0], assistant("<think>\nhm")]}
    ((prompt, learned),) = texts(demonstrations_of(row, who), who)
    assert (prompt + learned).partition(ASKS)[2] == f"<think>\nhm{END}"


def test_a_prompt_that_closes_the_thought_is_answered_without_an_inline_one() -> None:
    template = _THINKS.replace("SHOWN", "{{ m.content }}").replace(
        "<think>\n' }}{% endif", "<think>\n\n</think>\n\n' }}{% endif"
    )
    who = roles("solver", template=template)
    row = {"messages": [HELLO[0], assistant("<think>\nhm\n</think>\n\nhello")]}
    assert texts(demonstrations_of(row, who), who)[0][1] == f"hello{END}"


def test_calls_next_to_a_thought_are_learned() -> None:
    shown = _ANSWER + "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    who = roles("solver", template=_THINKS.replace("SHOWN", shown))
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    row = {"messages": [HELLO[0], assistant("", tool_calls=[call], reasoning_content="hm")]}
    ((_, learned),) = texts(demonstrations_of(row, who), who)
    assert learned == f'hm\n</think>\n\n{{"x": 1}}{END}'


ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    HELLO[0],
    assistant("", tool_calls=[ADD], reasoning_content="hm"),
    {"role": "tool", "content": "2"},
    assistant("it is 2", reasoning_content="so"),
]


def test_a_call_that_the_template_leaves_out_is_refused() -> None:
    """As with LFM2's and Granite 3.0's templates: an empty reply would be learned."""
    with pytest.raises(WorkflowError, match="does not show tool calls") as refused:
        demonstrations_of({"messages": CALLED[:2]}, roles("solver"))
    assert refused.value.kind == "chat_template"
    legacy = assistant(None, function_call={"name": "add", "arguments": "{}"})
    with pytest.raises(WorkflowError, match="message 1 has a `function_call`"):
        demonstrations_of({"messages": [HELLO[0], legacy]}, roles("solver", template=TOOLED))


def test_a_template_that_takes_arguments_as_text_gets_them_so() -> None:
    """As DeepSeek's, which join the arguments of a call with other texts."""
    shown = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '@' + c.function.arguments }}"
    who = roles("solver", template=CHATML.replace("{{ m.content }}", shown + "{% endfor %}"))
    found = texts(demonstrations_of({"messages": CALLED[:2]}, who), who)
    assert [learned for _, learned in found] == [f'<think>\nhm\n</think>\n\n@{{"a": 1}}{END}']


def test_a_reply_is_shown_as_the_template_does_even_if_it_hides_earlier_thoughts_then() -> None:
    """gpt-oss shows the thoughts next to a call until the final reply."""
    shown = (
        "{% if m.thinking and (m.tool_calls and messages[-1].role != 'assistant' or loop.last) %}"
        "[{{ m.thinking }}]{% endif %}{% if m.role == 'assistant' %}final:{% endif %}"
        "{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    )
    who = roles("solver", template=CHATML.replace("{{ m.content }}", shown))
    for message, learned in ((CALLED[-1], "[so]final:it is 2"), (HELLO[1], "final:hello")):
        found = texts(demonstrations_of({"messages": [*CALLED[:3], message]}, who), who)
        assert [reply for _, reply in found] == [f"[hm]final:add{END}", f"{learned}{END}"]
        assert "[hm]" in found[-1][0]


def test_messages_that_the_template_leaves_out_are_refused() -> None:
    """Most templates skip roles that they do not know, such as OpenAI's `developer`."""
    known = "{% if m.role in ('system', 'user', 'assistant') %}"
    who = roles(
        "solver",
        template=CHATML.replace("<|im_start|>{{", known + "<|im_start|>{{").replace(
            "{% endfor %}", "{% endif %}{% endfor %}"
        ),
    )
    for role in ("developer", "function"):
        row = {"messages": [{"role": role, "content": "be kind"}, *HELLO]}
        with pytest.raises(WorkflowError, match=f"not show messages of the role '{role}'"):
            demonstrations_of(row, who)
        assert "be kind" in texts(demonstrations_of(row, roles("solver")), roles("solver"))[0][0]
    assert demonstrations_of({"messages": [SYSTEM, *HELLO]}, who)


@pytest.mark.parametrize("text", ["1+1=", ""])
def test_texts_begin_with_the_token_that_the_tokenizer_puts_first(text: str) -> None:
    chat, first = make_beginning_chat()
    who = {"solver": Role("solver", "p", chat, Sampling(max_new_tokens=8))}
    (one,) = demonstrations_of({"prompt": text, "completion": "2"}, who, template=False)
    assert one.prompt_ids == (first, *chat.encode(text))
    assert one.response_ids == (*chat.encode("2"), chat.end_id)
    assert chat.encode_first("<|im_start|>a") == (first, *chat.encode("a"))


@pytest.mark.parametrize("weight", [0, 0.0, None, 1, 1.0])
def test_messages_without_weight_are_shown_and_not_learned(weight: float | None) -> None:
    who = roles("solver", system="be kind")
    first = {**MORE[1], "weight": weight}
    found = texts(demonstrations_of({"messages": [MORE[0], first, *MORE[2:]]}, who), who)
    learned = [f"so long{END}"] if weight == 0 else [f"hello{END}", f"so long{END}"]
    assert [reply for _, reply in found] == learned
    assert "hello" in found[-1][0]


@pytest.mark.parametrize("weight", [0.5, -1, 2, "0", [1]])
def test_a_weight_other_than_zero_or_one_is_refused(weight: Any) -> None:
    row = {"messages": [*MORE[:3], {**MORE[3], "weight": weight}]}
    with pytest.raises(WorkflowError, match="message 3 has the `weight`") as refused:
        demonstrations_of(row, roles("solver"))
    assert refused.value.kind == "bad_demonstration"


@pytest.mark.parametrize("name", ["loss", "train", "training"])
@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_another_field_that_takes_a_message_out_of_the_loss_is_refused(
    name: str, value: Any
) -> None:
    row = {"messages": [*MORE[:3], {**MORE[3], name: value}]}
    with pytest.raises(WorkflowError, match=f"message 3 has `{name}: .* write `weight: 0`"):
        demonstrations_of(row, roles("solver"))
    row = {"messages": [*MORE[:3], {**MORE[3], name: True}, {**MORE[1], name: None}]}
    assert demonstrations_of(row, roles("solver"))


SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize("prompt", ["hi", HELLO[:1], [{"role": "user", "content": "hi\n"}]])
@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_sides_that_repeat_the_prompt_are_learned_from_their_last_message(
    prompt: Any, before: list[Any]
) -> None:
    """As in UltraFeedback and similar data sets: `chosen` and `rejected` are whole
    conversations."""
    who = roles("solver")
    rejected = [HELLO[0], assistant("go away")]
    plain = {"prompt": [*before, HELLO[0]], "chosen": "hello", "rejected": "go away"}
    row = {"prompt": prompt, "chosen": [*before, *HELLO], "rejected": [*before, *rejected]}
    assert preferences_of(row, who) == preferences_of(plain, who)
    completed = {"prompt": prompt, "completion": [*before, *HELLO]}
    assert demonstrations_of(completed, who) == demonstrations_of(
        {"messages": [*before, *HELLO]}, who
    )


def test_sides_may_lack_the_system_message_of_the_prompt() -> None:
    who, rejected = roles("solver"), [HELLO[0], assistant("go away")]
    row = {"prompt": [SYSTEM, HELLO[0]], "chosen": HELLO, "rejected": rejected}
    plain = {"prompt": [SYSTEM, HELLO[0]], "chosen": "hello", "rejected": "go away"}
    assert preferences_of(row, who) == preferences_of(plain, who)


def test_a_side_that_begins_with_another_question_is_refused() -> None:
    row = {"prompt": "hi", "chosen": [{"role": "user", "content": "ho"}, HELLO[1]], "rejected": "x"}
    with pytest.raises(WorkflowError, match=r"of `chosen`, .* role user, but not with") as refused:
        preferences_of(row, roles("solver"))
    assert refused.value.kind == "bad_preference"


PAIRS: list[dict[str, Any]] = [
    {"prompt": "hi", "chosen": "hello", "rejected": "go away"},
    {
        "prompt": HELLO[:1],
        "chosen": HELLO[1:],
        "rejected": [{"role": "assistant", "content": "go away"}],
    },
    {
        "chosen": HELLO,
        "rejected": [HELLO[0], {"role": "assistant", "content": "go away"}],
        "agent": "solver",
    },
]


@pytest.mark.parametrize("row", PAIRS)
def test_all_forms_of_a_pair_give_the_same_rows(row: dict[str, Any]) -> None:
    who = roles("solver")
    found = preferences_of(row, who)
    (prompt, good), (same, bad) = texts(found, who)
    assert prompt == same
    assert (good, bad) == (f"hello{END}", f"go away{END}")
    assert [(one.chosen, one.turn) for one in found] == [(True, 0), (False, 1)]


def test_a_pair_learns_all_replies_of_a_completion_and_the_last_of_a_conversation() -> None:
    who = roles("solver")
    row = {"prompt": MORE[:1], "chosen": MORE[1:], "rejected": "no"}
    assert [one.chosen for one in preferences_of(row, who)] == [True, True, False]
    whole = preferences_of({"chosen": MORE, "rejected": HELLO}, who)
    assert [reply for _, reply in texts(whole, who)] == [f"so long{END}", f"hello{END}"]


def test_a_pair_is_cut_off_or_left_out_as_a_whole() -> None:
    who = roles("solver")
    row = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
    whole = preferences_of(row, who)
    prompt, longest = len(whole[0].prompt_ids), len(whole[0].response_ids)
    cut = preferences_of(row, who, max_tokens=prompt + longest - 1)
    assert [one.truncated for one in cut] == [True, False]
    assert preferences_of(row, who, max_tokens=prompt) == []
    # A side that becomes empty removes the other one too.
    longer = {"chosen": MORE, "rejected": HELLO}
    assert preferences_of(longer, who, max_tokens=prompt + longest) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "hi", "chosen": "a"}, "has the fields prompt, chosen"),
        ({"chosen": "a", "rejected": "b"}, "without a `prompt`, `chosen` must be a list"),
        ({"prompt": HELLO[:1], "chosen": HELLO[1:], "rejected": HELLO[:1]}, "of `rejected`, "),
        (
            {"prompt": "hi", "chosen": "a", "rejected": "b", "agent": "nobody"},
            "'nobody' does not learn",
        ),
        ({"prompt": "hi", "chosen": 1, "rejected": 2}, "of `chosen`, .*`completion` is 1"),
        ({"chosen": HELLO, "rejected": [MORE[2], HELLO[1]]}, "sides differ before the first"),
    ],
)
def test_a_pair_that_cannot_be_learned_says_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(WorkflowError, match=why) as refused:
        preferences_of(row, roles("solver"))
    assert (refused.value.kind, refused.value.field) == ("bad_preference", "preferences.tasks")


def test_the_pairs_of_the_example_can_be_learned() -> None:
    spec = load_job(Path(__file__).parents[2] / "examples/preferences/job.yaml")
    assert spec.preferences is not None
    assert "preferences.tasks.source" in try_imports(spec)
    who, pairs = roles("solver", "checker"), Pairs("train")
    for index in (0, 1, 7):
        good, bad = preferences_of(pairs[index], who)
        assert good.agent == bad.agent == ("solver", "checker")[index % 2]
        assert good.prompt_ids == bad.prompt_ids
        assert good.response_ids != bad.response_ids


PAIR = {"prompt": "3+4", "chosen": "7", "rejected": "8"}


def test_a_joint_pair_has_the_replies_of_all_agents_as_turns_of_one_row() -> None:
    who = {name: replace(role, policy="shared") for name, role in roles("a", "b").items()}
    other = {"prompt": "check it", "chosen": "right", "rejected": "wrong"}
    found = joint_preferences_of({"agents": {"a": PAIR, "b": other}}, who)
    assert [(one.agent, one.turn, one.chosen) for one in found] == [
        ("a", 0, True),
        ("a", 1, False),
        ("b", 2, True),
        ("b", 3, False),
    ]
    assert [one.response_ids for one in found[2:]] == [
        one.response_ids for one in preferences_of({**other, "agent": "b"}, who)
    ]
    # Without one agent's replies there is no joint reply.
    longest = max(len(one.prompt_ids) for one in found[:2]) + 1
    assert joint_preferences_of({"agents": {"a": PAIR, "b": other}}, who, max_tokens=longest) == []


@pytest.mark.parametrize("empty", [None, dict.fromkeys(PAIR)])
def test_an_agent_without_a_pair_is_left_out_of_a_joint_pair(empty: Any) -> None:
    """Parquet gives every row the agents of all rows."""
    who = roles("a", "b")
    assert joint_preferences_of({"agents": {"a": PAIR, "b": empty}}, who) == joint_preferences_of(
        {"agents": {"a": PAIR}}, who
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PAIR, "it has no `agents`"),
        ({"agents": {"a": None}}, "its `agents` have no pairs"),
        ({"agents": {"a": "7"}}, "`agents.a` is '7', not a pair"),
        ({"agents": {"a": {"prompt": "x", "chosen": "y"}}}, "it has the fields"),
        ({"agents": {"a": PAIR, "c": PAIR}}, "its agent 'c' does not learn"),
    ],
)
def test_rows_that_are_no_joint_pair_say_why(row: dict[str, Any], message: str) -> None:
    who = {name: replace(role, policy=f"policy-{name}") for name, role in roles("a", "b").items()}
    with pytest.raises(WorkflowError, match=message) as caught:
        joint_preferences_of(row, who)
    assert caught.value.kind == "bad_preference"
