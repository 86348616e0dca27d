"""Rows of demonstrations as prompts and responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.preferences.pairs import Pairs
from examples.supervised.rows import Rows
from tests.workflow.stage import END, THINKING, make_chat
from troupe.client.cli.specification import try_imports
from troupe.data.demonstrations import Demonstration, demonstrations_of, preferences_of
from troupe.job import load_job
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
    # It is what an engine is asked, and what it should answer.
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
def test_all_forms_say_the_same(row: dict[str, Any]) -> None:
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


def test_a_reply_is_what_the_template_shows_of_it() -> None:
    """Thoughts of earlier replies are cut; of the last one, too, by this template."""
    who = roles("solver", template=THINKING)
    spoken = [HELLO[0], {"role": "assistant", "content": "hm</think>hello"}]
    assert texts(demonstrations_of({"messages": spoken}, who), who)[0][1] == f"hello{END}"


def test_a_template_that_shows_replies_otherwise_does_not_change_what_is_said() -> None:
    """The generation prompt is no beginning of the rendered reply: content and end it is."""
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
        ({"messages": HELLO, "agent": "nobody"}, "'nobody' learns nothing; there are checker"),
        ({"messages": HELLO}, "names no `agent`"),
        ({"messages": [{"role": "user"}]}, "needs `role` and `content`"),
    ],
)
def test_a_row_that_cannot_be_learned_says_why(row: dict[str, Any], why: str) -> None:
    agent = None if why.startswith("names") else "solver"
    with pytest.raises(WorkflowError, match=why):
        demonstrations_of(row, roles("solver", "checker"), agent=agent)


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
def test_all_forms_of_a_pair_say_the_same(row: dict[str, Any]) -> None:
    who = roles("solver")
    found = preferences_of(row, who)
    (prompt, good), (same, bad) = texts(found, who)
    assert prompt == same
    assert (good, bad) == (f"hello{END}", f"go away{END}")
    assert [(one.chosen, one.turn) for one in found] == [(True, 0), (False, 1)]


def test_of_a_pair_all_replies_of_a_completion_count_and_of_a_conversation_the_last() -> None:
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
    # A side of which nothing is left takes the other with it.
    longer = {"chosen": MORE, "rejected": HELLO}
    assert preferences_of(longer, who, max_tokens=prompt + longest) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "hi", "chosen": "a"}, "has the fields prompt, chosen"),
        ({"chosen": "a", "rejected": "b"}, "without a `prompt`, `chosen` must be a list"),
        ({"prompt": HELLO[:1], "chosen": HELLO[1:], "rejected": HELLO[:1]}, "of `rejected`, "),
        ({"prompt": "hi", "chosen": "a", "rejected": "b", "agent": "nobody"}, "'nobody' learns"),
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
