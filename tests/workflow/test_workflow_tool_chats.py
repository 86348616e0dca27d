"""Conversations with tools, stop strings and edited histories: which ids are reused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.workflow.stage import CHATML, TOOLED, Script, make_agents, make_chat
from troupe.workflow import ChatTemplateError, InvalidMessagesError, Reply, WorkflowError
from troupe.workflow.messages import parse_messages, plain

ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}
ASKED = {"role": "user", "content": "3+4?"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
END = 2


class Talk:
    """An agent whose engine says one thing after another, spelled letter by letter."""

    def __init__(self, *said: str, template: str = TOOLED) -> None:
        self.chat = make_chat(template, merges=[("a", "d")])
        left = list(said)
        self.script = Script(lambda agent, prompt, sampling: self.spell(left.pop(0)))
        self.agents = make_agents(self.script, self.chat)

    def spell(self, text: str) -> list[int]:
        return [i for c in text for i in self.chat.encode(c)] + [END]

    async def ask(self, messages: list[Any], **options: Any) -> Reply:
        reply: Reply = await self.agents["solver"].chat(messages, tools=[ADD], **options)
        return reply

    @property
    def broken(self) -> list[bool]:
        return [turn.prefix_broken for turn in self.agents.begun]

    def continues(self, reply: Reply) -> bool:
        """Whether the newest prompt begins with what `reply` was."""
        sampled = reply.prompt_ids + reply.token_ids
        return self.script.asked[-1][1][: len(sampled)] == sampled


def answer(reply: Reply, content: str = "7") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": content}


async def test_a_reply_tells_its_calls_from_its_text() -> None:
    talk = Talk("Let me add." + CALL)
    reply = await talk.ask([ASKED])
    assert reply.text == "Let me add." + CALL, "what was said stays whole"
    assert reply.content == "Let me add."
    [call] = reply.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3, "b": 4})
    assert reply.message["tool_calls"][0]["function"]["name"] == "add"


def _message(reply: Reply, **changes: Any) -> dict[str, Any]:
    return {**reply.message, **changes}


def _rewritten(reply: Reply, arguments: str, id: str | None = None) -> dict[str, Any]:
    call = reply.tool_calls[0]
    changed = call._replace(arguments=arguments, id=id or call.id)
    return _message(reply, tool_calls=[changed.message])


@pytest.mark.parametrize(
    "sent_back",
    [
        lambda reply: reply,
        lambda reply: _message(reply, content=None),
        lambda reply: _message(reply, content=[{"type": "text", "text": "Let me add. "}]),
        lambda reply: _rewritten(reply, '{"b":4,"a":3}'),
        lambda reply: _rewritten(reply, '{"b":4,"a":3}', id="another"),
        lambda reply: {"role": "assistant", "content": reply.text},
    ],
)
async def test_a_call_that_comes_back_rewritten_keeps_its_sampled_ids(sent_back: Any) -> None:
    talk = Talk("Let me add. " + CALL, "7")
    first = await talk.ask([ASKED])
    await talk.ask([ASKED, sent_back(first), answer(first)])
    assert talk.continues(first)
    assert talk.broken == [False, False]


@pytest.mark.parametrize(
    "edited",
    [
        lambda reply: _rewritten(reply, '{"a":3,"b":5}'),
        lambda reply: _message(reply, content="I said something else."),
        lambda reply: {"role": "assistant", "content": "no call"},
        lambda reply: {"role": "assistant", "content": reply.content},
    ],
)
async def test_a_call_that_was_altered_is_another_conversation(edited: Any) -> None:
    talk = Talk("Let me add. " + CALL, "7")
    first = await talk.ask([ASKED])
    await talk.ask([ASKED, edited(first), answer(first)])
    assert not talk.continues(first)
    assert talk.broken == [False, True]


async def test_given_turns_do_not_break_the_conversation() -> None:
    talk = Talk("7", "8")
    shots = [ASKED, {"role": "assistant", "content": "seven"}]
    await talk.ask([*shots, {"role": "user", "content": "1+6?"}])
    await talk.ask([*shots, {"role": "user", "content": "1+7?"}])
    assert talk.broken == [False, False]


async def test_a_reply_under_another_system_prompt_is_a_break() -> None:
    talk = Talk("seven", "7")
    first = await talk.ask([{"role": "system", "content": "it is nine"}, ASKED])
    await talk.ask([{"role": "system", "content": "it is ten"}, ASKED, first, ASKED])
    assert talk.broken == [False, True]


async def test_thoughts_that_a_client_drops_are_kept_in_the_ids() -> None:
    talk = Talk("<think>3, 4</think>7", "yes")
    first = await talk.ask([ASKED])
    await talk.ask([ASKED, {"role": "assistant", "content": "7"}, ASKED])
    assert talk.continues(first)


async def test_equal_calls_of_two_branches_are_told_apart_by_their_ids() -> None:
    talk = Talk(CALL, "I add. " + CALL, "7")
    one = await talk.ask([ASKED])
    two = await talk.ask([ASKED])
    assert one.tool_calls[0].id != two.tool_calls[0].id
    await talk.ask([ASKED, _message(two, content=None), answer(two)])
    assert talk.continues(two)


async def test_other_tools_begin_another_conversation() -> None:
    talk = Talk("seven", "7")
    first = await talk.ask([ASKED])
    await talk.agents["solver"].chat([ASKED, first, ASKED])
    assert not talk.continues(first)
    assert talk.broken == [False, True]


async def test_a_response_is_cut_behind_the_token_that_completes_a_stop_string() -> None:
    talk = Talk("one##two", "x")
    reply = await talk.ask([ASKED], stop_strings=("##", "two"))
    assert reply.text == "one"
    assert list(reply.token_ids) == talk.spell("one##")[:-1]
    assert len(reply.logprobs) == len(reply.token_ids)
    assert reply.finish_reason == "stop"
    assert talk.agents.turns[0].generation.token_ids == list(reply.token_ids)
    await talk.ask([ASKED, reply, ASKED])
    assert talk.continues(reply)
    begun = talk.chat.transcript(talk.script.asked[-1][1])
    assert "one##<|im_end|>\n<|im_start|>user" in begun, "the end of turn that it lacks"


async def test_one_stop_string_needs_no_list() -> None:
    talk = Talk("DEN.END.")
    reply = await talk.ask([ASKED], stop_strings="END")
    assert (reply.text, reply.finish_reason) == ("DEN.", "stop")
    assert talk.script.asked[0][2].stop_token_ids == ()


async def test_a_stop_string_of_one_token_is_the_engines_to_stop_at() -> None:
    talk = Talk("one")
    await talk.ask([ASKED], stop_strings=("ad", "##"))
    assert talk.script.asked[0][2].stop_token_ids == (talk.chat.encode("ad")[0],)


async def test_a_template_without_tools_is_refused() -> None:
    talk = Talk("7", template=CHATML)
    with pytest.raises(ChatTemplateError, match="does not show tools") as caught:
        await talk.ask([ASKED])
    assert caught.value.field == "policies.solver-policy.model"


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "add"}],
        ["add"],
        [{"type": "function", "function": {}}],
        [{**ADD, "function": {"name": "add", "parameters": float("nan")}}],
        [{**ADD, "function": {"name": "add", "parameters": {"properties": ["a"]}}}],
    ],
)
def test_bad_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidMessagesError) as caught:
        Talk().agents["solver"].chat([ASKED], tools=tools)
    assert caught.value.field
    assert caught.value.field.startswith("tools")


async def test_an_endpoint_without_a_rollout_service_is_refused() -> None:
    with pytest.raises(WorkflowError, match="no endpoint here") as caught:
        Talk().agents["solver"].endpoint()
    assert caught.value.kind == "no_endpoint"
    assert caught.value.remedy


def test_people_see_calls_as_json() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = parse_messages(
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], None
    )
    assert [plain(message) for message in messages] == [
        ("user", "3+4?"),
        ("assistant", '{"name": "add", "arguments": {"a": 3}}'),
    ]


# As Qwen3-Coder's: it goes through the arguments, and fails on anything but an object.
PARAMETERS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }};{% endfor %}{% endfor %}",
)


def called(**function: Any) -> list[dict[str, Any]]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", **function}}]
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}]


@pytest.mark.parametrize("arguments", ["null", " null\n", "", "{}", None, {}])
def test_a_call_without_arguments_has_empty_ones(arguments: Any) -> None:
    for messages in (called(arguments=arguments), called()):
        _, said = parse_messages(messages, None)
        make_chat(PARAMETERS).first_ids((("user", "3+4?"), said, ("tool", "7")))
        assert plain(said) == ("assistant", '{"name": "add", "arguments": {}}')


@pytest.mark.parametrize("arguments", ["[1]", "3", '"a"', "true", "[null]"])
def test_arguments_that_are_not_an_object_are_refused(arguments: str) -> None:
    with pytest.raises(InvalidMessagesError, match=r"arguments of a call are .* not a JSON") as no:
        parse_messages(called(arguments=arguments), None)
    assert no.value.field == "messages[1].tool_calls[0].function.arguments"
    assert '"{}"' in (no.value.remedy or "")


def test_arguments_that_are_not_json_stay_as_the_model_wrote_them() -> None:
    _, said = parse_messages(called(arguments="{a: 1"), None)
    assert plain(said) == ("assistant", '{"name": "add", "arguments": {a: 1}')
    with pytest.raises(ChatTemplateError) as refused:
        make_chat(PARAMETERS).first_ids((("user", "3+4?"), said))
    assert "JSON objects as arguments" in (refused.value.remedy or "")
