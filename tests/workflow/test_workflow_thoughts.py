"""An agent's thoughts are separate from its reply, and return as the sampled ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workflow.stage import CHATML, THINKING, Script, make_agents, make_chat
from troupe.replies.formats import PARSERS, parser_of
from troupe.workflow import InvalidMessagesError
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.messages import parse_messages

TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}" + THINKING
# As the templates of Qwen3-Thinking and R1: the prompt opens the thought.
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# As Qwen3's: thinking can be switched off.
SWITCHED = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
ADD = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def saying(chat: ChatTokenizer, *texts: str) -> Script:
    left = [[*chat.encode(text), 2] for text in texts]
    return Script(lambda agent, prompt, sampling: left.pop(0) if len(left) > 1 else left[0])


async def test_thoughts_are_separate_and_their_calls_are_ignored() -> None:
    chat = make_chat(TOOLED)
    script = saying(chat, f"<think>perhaps {CALL}</think>\n\nNo.", f"<think>so</think>{CALL}")
    solver = make_agents(script, chat)["solver"]

    reply = await solver.chat("Add?", tools=ADD)
    assert (reply.content, reply.reasoning_content) == ("No.", f"perhaps {CALL}")
    assert reply.tool_calls == ()
    assert reply.text == f"<think>perhaps {CALL}</think>\n\nNo."
    assert reply.message == {
        "role": "assistant",
        "content": "No.",
        "reasoning_content": f"perhaps {CALL}",
    }
    messages: list[Any] = [{"role": "user", "content": "Add?"}, reply]
    called = await solver.chat([*messages, {"role": "user", "content": "Do."}], tools=ADD)
    assert (called.content, called.reasoning_content) == ("", "so")
    assert [call.name for call in called.tool_calls] == ["add"]
    _, prompt, _ = script.asked[-1]
    known = (*reply.prompt_ids, *reply.token_ids)
    assert prompt[: len(known)] == known


@pytest.mark.parametrize(
    "held",
    [
        {"content": "No."},
        {"content": "No.", "reasoning_content": "hm"},
        {"content": "No.", "reasoning": "other"},
        {"content": "<think>hm</think>No."},
        {"content": [{"type": "text", "text": "No."}]},
    ],
)
async def test_a_client_may_drop_thoughts_or_send_them_back(held: dict[str, Any]) -> None:
    chat = make_chat(THINKING)
    script = saying(chat, "<think>hm</think>No.")
    agents = make_agents(script, chat)
    reply = await agents["solver"].chat("Well?")
    asked = {"role": "user", "content": "Well?"}
    await agents["solver"].chat([asked, {"role": "assistant", **held}, asked])
    _, prompt, _ = script.asked[-1]
    known = (*reply.prompt_ids, *reply.token_ids)
    assert prompt[: len(known)] == known
    assert not any(turn.prefix_broken for turn in agents.begun)


async def test_a_job_sets_arguments_of_the_template_and_the_tags_of_thoughts() -> None:
    chat = make_chat(SWITCHED)
    script = saying(chat, "<think>hm</think>No.")
    agents = make_agents(script, chat)
    solver = agents["solver"]
    solver.role = replace(
        solver.role,
        parser=parser_of("hermes", "none"),
        template_options={"enable_thinking": False},
    )
    reply = await solver.chat("Well?")
    assert (reply.content, reply.reasoning_content) == ("<think>hm</think>No.", "")
    switched = chat.encode("<think>\n\n</think>\n\n")
    assert script.asked[-1][1][-len(switched) :] == tuple(switched)
    # A call may differ.
    await solver.chat("Well?", chat_template_kwargs={"enable_thinking": True})
    assert script.asked[-1][1][-len(switched) :] != tuple(switched)


@pytest.mark.parametrize("tool_parser", sorted(PARSERS))
def test_without_tags_all_is_content(tool_parser: str) -> None:
    text = "<think>hm</think>[THINK]so[/THINK]No."
    parse = parser_of(tool_parser, "none")
    assert parse(text).content == text
    assert parse(text, ADD).content == text
    assert not parse.opens_thought("<think>\n")


async def test_a_thought_that_the_prompt_opens_needs_no_tag_and_may_never_end() -> None:
    chat = make_chat(OPENED)
    script = saying(chat, "hm</think>No.", "hm and", "<|im_start|>hm</think>No.")
    solver = make_agents(script, chat)["solver"]
    first, cut, special = [await solver.chat(f"Well {n}?") for n in range(3)]
    assert (first.content, first.reasoning_content) == ("No.", "hm")
    assert (cut.content, cut.reasoning_content) == ("", "hm and")
    assert (special.content, special.reasoning_content) == ("No.", "hm"), "no special tokens"
    # A reply that is all thought comes back without content, as text or as none.
    for content in ("", None):
        asked = {"role": "user", "content": "Well 1?"}
        back = {"role": "assistant", "content": content}
        await solver.chat([asked, back, asked])
        known = (*cut.prompt_ids, *cut.token_ids)
        assert script.asked[-1][1][: len(known)] == known


async def test_thoughts_in_raw_tokens_stay_in_the_content() -> None:
    chat = make_chat()
    solver = make_agents(saying(chat, "<think>hm</think>No."), chat)["solver"]
    reply = await solver.generate(chat.encode("Well?"))
    assert (reply.content, reply.reasoning_content) == ("<think>hm</think>No.", "")


async def test_calls_stay_text_where_none_may_be_made() -> None:
    chat = make_chat(TOOLED)
    solver = make_agents(saying(chat, f"<think>hm</think>{CALL}"), chat)["solver"]
    reply = await solver.chat("Add?", tools=ADD, tool_choice="none")
    assert (reply.content, reply.tool_calls) == (CALL, ())
    with pytest.raises(InvalidMessagesError, match="tool_choice"):
        solver.chat("Add?", tools=ADD, tool_choice="any")  # type: ignore[arg-type]


async def test_a_stop_string_also_ends_content_with_calls() -> None:
    chat = make_chat(TOOLED)
    script = saying(chat, f"{CALL}so##and")
    reply = await make_agents(script, chat)["solver"].chat("Add?", tools=ADD, stop_strings=["##"])
    assert (reply.content, len(reply.tool_calls)) == ("so", 1)


async def test_the_template_gets_further_arguments() -> None:
    chat = make_chat(SWITCHED)
    script = saying(chat, "No.")
    solver = make_agents(script, chat)["solver"]
    await solver.chat("Well?", chat_template_kwargs={"enable_thinking": False})
    assert chat.transcript(script.asked[-1][1]).endswith("<think>\n\n</think>\n\n")
    await solver.chat("Well?")
    assert chat.transcript(script.asked[-1][1]).endswith("assistant\n")
    for bad, field in [
        ({"tools": []}, "chat_template_kwargs.tools"),
        ({"x": float("nan")}, "chat_template_kwargs"),
        ({"x": object()}, "chat_template_kwargs"),
        ([1], "chat_template_kwargs"),
    ]:
        with pytest.raises(InvalidMessagesError) as caught:
            solver.chat("Well?", chat_template_kwargs=bad)  # type: ignore[arg-type]
        assert caught.value.field == field


async def test_long_replies_are_read_outside_the_event_loop() -> None:
    chat = make_chat()
    long = "<think>" + "hm " * 5000 + "</think>No."
    solver = make_agents(saying(chat, long), chat)["solver"]
    reply = await solver.chat("Well?", max_new_tokens=20_000)
    assert reply.content == "No."


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "a"}, "b"]}, "a\nb"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "a"),
        ({"role": "tool", "tool_call_id": "c", "content": None}, ""),
    ],
)
def test_messages_as_clients_send_them(message: dict[str, Any], text: str) -> None:
    [parsed] = parse_messages([message], None)
    assert parsed[1] == text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "system", "content": 3}, "messages[0].content"),
        ({"role": "assistant", "content": {"text": "a"}}, "messages[0].content"),
        (
            {"role": "assistant", "content": "a", "reasoning_content": 3},
            "messages[0].reasoning_content",
        ),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "messages[0].content[0]"),
    ],
)
def test_invalid_messages_are_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMessagesError) as caught:
        parse_messages([message], None)
    assert caught.value.field == field
