"""Every option of a request is followed, changes nothing, or is refused by name; the log-probs of
tokens are of their real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.endpoint.stage import ADD, TOOLED
from tests.endpoint.test_endpoint_requests import ASKED, events, served
from tests.workflow.byte_tokenizers import byte_fallback, byte_level
from tests.workflow.stage import make_beginning_chat, make_chat
from troupe.workflow.backend import EndpointOptions
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.trying.tokenizer import ByteTokenizer

CHAT, TEXT = "/chat/completions", "/completions"
RESPONSES, MESSAGES = "/responses", "/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [ASKED]},
    TEXT: {"prompt": "ab"},
    RESPONSES: {"input": "ab"},
    MESSAGES: {"messages": [ASKED], "max_tokens": 20},
}
# Options of OpenAI, Anthropic, vLLM, SGLang and others that would change tokens or their reports,
# each with a value that requests this.
REFUSED: dict[str, Any] = {
    "allowed_token_ids": [5],
    "add_generation_prompt": False,
    "bad_words": ["ok"],
    "best_of": 4,
    "chat_template": "{{ messages }}",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "continue_final_message": True,
    "custom_logit_processor": "x",
    "detokenize": False,
    "documents": [{"title": "a"}],
    "ebnf": "root ::= 'a'",
    "echo": True,
    "frequency_penalty": -0.5,
    "guided_choice": ["a"],
    "guided_decoding_backend": "xgrammar",
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "json_schema": "{}",
    "length_penalty": 2.0,
    "logit_bias": {"5": 10},
    "logits_processors": ["x"],
    "lora_path": "x",
    "min_p": 0.1,
    "min_tokens": 3,
    "mirostat": 2,
    "no_stop_trim": True,
    "presence_penalty": 0.5,
    "prompt_logprobs": 0,
    "regex": "a",
    "repetition_penalty": 1.2,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_regex": "a",
    "stop_token_ids": [5],
    "structured_outputs": {"choice": ["a"]},
    "suffix": "b",
    "temprature": 0.5,
    "thinking_token_budget": 5,
    "top_a": 0.5,
    "top_logprobs": 3,
    "truncate_prompt_tokens": 5,
    "truncation": "auto",
    "typical_p": 0.5,
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "web_search_options": {},
}
PART = {"role": "assistant", "content": "x"}
OLD_CALL = {**PART, "content": None, "function_call": {"name": "add", "arguments": "{}"}}
NO_SCHEMA = {"type": "json_schema"}
STATS = "stream_options.continuous_usage_stats"
# Options that clients send by default, and options that change no token.
TAKEN: dict[str, Sequence[Any]] = {
    "allowed_token_ids": [None],
    "anthropic_version": ["vertex-2023-10-16"],
    "bad_words": [[], None],
    "best_of": [1],
    "cache_salt": ["x"],
    # Options of Claude Code.
    "context_management": [
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": []},
        {},
        [],
    ],
    "custom_params": [{}],
    "detokenize": [True],
    "early_stopping": [False],
    "enable_search": [False],
    "frequency_penalty": [0, -0.0],
    "guided_decoding_backend": [None, ""],
    "guided_json": [None, ""],
    "ignore_eos": [False],
    "include_stop_str_in_output": [False],
    "json_schema": [""],
    "kv_transfer_params": [{}],
    "length_penalty": [1.0],
    "logit_bias": [{}, {"5": 0}],
    "logits_processors": [[]],
    "lora_path": [""],
    "metadata": [{"a": "b"}],
    "min_p": [0.0],
    "min_tokens": [0],
    "mirostat": [0],
    "mm_processor_kwargs": [{}],
    "modalities": [["text"], []],
    "presence_penalty": [0.0],
    "prompt_cache_key": ["x"],
    "prompt_cache_retention": ["24h"],
    "prompt_logprobs": [None],
    "priority": [1],
    "repetition_penalty": [1.0],
    "return_cached_tokens_details": [False],
    "return_routed_experts": [False],
    "safe_prompt": [False],
    "safety_identifier": ["x"],
    "service_tier": ["auto"],
    "session_params": [{}],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "stop_regex": [[]],
    "store": [True],
    "structured_outputs": [{}, {"json": None}],
    "top_a": [0],
    "truncation": ["disabled"],
    "typical_p": [1.0],
    "use_beam_search": [False],
    "user": ["me"],
    "vllm_xargs": [{}],
    "web_search_options": [None],
    "whatever": [None],
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_option_that_is_not_followed_is_refused_by_name(path: str) -> None:
    async with served() as one:
        for name, value in REFUSED.items():
            answer = await one.post(path, **BODIES[path], **{name: value})
            error = answer.json()["error"]
            assert answer.status_code == 400, name
            assert (error["param"], error["code"]) == (name, "unsupported_value")
            assert f"`{name}`" in error["message"]
        assert not one.agents.begun


@pytest.mark.parametrize("path", BODIES)
async def test_options_with_neutral_values_are_accepted(path: str) -> None:
    async with served() as one:
        for name, values in TAKEN.items():
            for value in values:
                answer = await one.post(path, **BODIES[path], **{name: value})
                assert answer.status_code == 200, (name, value, answer.text)


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        (CHAT, {"parallel_tool_calls": False}),
        (CHAT, {"parallel_tool_calls": False, "tools": []}),
        (CHAT, {"parallel_tool_calls": False, "tools": [ADD], "tool_choice": "none"}),
        (CHAT, {"reasoning": {}}),
        (RESPONSES, {"parallel_tool_calls": False}),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        (TEXT, {"response_format": {"type": "text"}}),
        (TEXT, {"add_special_tokens": True}),
        (CHAT, {"add_special_tokens": False}),
        (CHAT, {"stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}}),
        (CHAT, {"messages": [{**ASKED, "prefix": False, "function_call": None}]}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}),
    ],
)
async def test_neutral_options_of_one_api_are_accepted_there(
    path: str, asks: dict[str, Any]
) -> None:
    async with served(chat=make_chat(TOOLED)) as one:
        answer = await one.post(path, **{**BODIES[path], **asks})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_special_tokens_are_the_templates_in_a_chat(path: str) -> None:
    async with served() as one:
        answer = await one.post(path, **BODIES[path], add_special_tokens=True)
        assert answer.json()["error"]["param"] == "add_special_tokens"


@pytest.mark.parametrize(("asked", "begun"), [(None, True), (True, True), (False, False)])
async def test_a_completion_begins_as_the_tokenizer_does_unless_asked_otherwise(
    asked: bool | None, begun: bool
) -> None:
    chat, first = make_beginning_chat()
    async with served("ok", chat=chat) as one:
        body = {"prompt": "ab", "return_token_ids": True, "add_special_tokens": asked}
        answer = (await one.post(TEXT, **body)).json()
    assert answer["prompt_token_ids"] == [*([first] if begun else []), *chat.encode("ab")]


async def test_a_refused_promise_is_named_as_the_client_sent_it() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    async with served(chat=make_chat(TOOLED)) as one:
        answer = await one.post(MESSAGES, **BODIES[MESSAGES], tools=tools, tool_choice=choice)
    error = answer.json()["error"]
    assert error["param"] == "tool_choice.disable_parallel_tool_use"
    assert error["message"].startswith("`tool_choice.disable_parallel_tool_use` asks for")


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (TEXT, "messages", [ASKED]),
        (TEXT, "tools", []),
        (TEXT, "max_completion_tokens", 5),
        (CHAT, "prompt", "ab"),
        (CHAT, "max_output_tokens", 5),
        (CHAT, "stop_sequences", ["a"]),
        (RESPONSES, "messages", [ASKED]),
        (RESPONSES, "max_completion_tokens", 5),
        (RESPONSES, "response_format", {"type": "text"}),
        (RESPONSES, "logprobs", True),
        (MESSAGES, "input", "ab"),
        (MESSAGES, "response_format", {"type": "text"}),
        (MESSAGES, "mcp_servers", [{"name": "x"}]),
        (RESPONSES, "background", True),
    ],
)
async def test_a_field_of_another_api_is_refused_by_name(path: str, name: str, value: Any) -> None:
    async with served() as one:
        answer = await one.post(path, **{**BODIES[path], name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "asks", "param"),
    [
        (RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity"),
        (RESPONSES, {"text": {"format": {"type": "text"}, "tone": "x"}}, "text.tone"),
        (RESPONSES, {"reasoning": {"effort": "low", "budget": 3}}, "reasoning.budget"),
        (MESSAGES, {"output_config": {"task_budget": {"total": 5}}}, "output_config.task_budget"),
        (MESSAGES, {"thinking": {"type": "perhaps"}}, "thinking.type"),
        (MESSAGES, {"thinking": {}}, "thinking.type"),
        (CHAT, {"messages": [ASKED, OLD_CALL, ASKED]}, "messages[1].function_call"),
        (CHAT, {"messages": [ASKED, {**PART, "prefix": True}]}, "messages[1].prefix"),
        (CHAT, {"messages": [ASKED, {**PART, "partial": True}]}, "messages[1].partial"),
        (CHAT, {"messages": [ASKED, {**PART, "audio": {"id": "a"}}, ASKED]}, "messages[1].audio"),
        (CHAT, {"response_format": {"type": "text", "schema": {}}}, "response_format"),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (MESSAGES, {"output_config": {"format": NO_SCHEMA}}, "output_config.format.schema"),
        (CHAT, {"response_format": NO_SCHEMA}, "response_format.json_schema.schema"),
        (CHAT, {"stream_options": {"continuous_usage_stats": True}}, STATS),
        (TEXT, {"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        (RESPONSES, {"include": ["message.output_text.logprob"]}, "include"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
    ],
)
async def test_an_option_inside_of_another_is_refused_by_name(
    path: str, asks: dict[str, Any], param: str
) -> None:
    async with served() as one:
        answer = await one.post(path, **{**BODIES[path], **asks})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "asks", "param"),
    [
        *[(path, {"max_tokens": True}, "max_tokens") for path in (CHAT, TEXT)],
        *[(path, {"top_k": False}, "top_k") for path in (CHAT, TEXT, RESPONSES, MESSAGES)],
        (CHAT, {"stop": [None]}, "stop"),
        (CHAT, {"tool_choice": "any"}, "tool_choice"),
        (CHAT, {"messages": [ASKED, "hi"]}, "messages[1]"),
        (TEXT, {"prompt": {"text": "a"}}, "prompt"),
    ],
)
async def test_a_value_of_a_wrong_type_is_named_as_in_the_request(
    path: str, asks: dict[str, Any], param: str
) -> None:
    async with served() as one:
        answer = await one.post(path, **{**BODIES[path], **asks})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert f"`{param}` is wrong" in answer.json()["error"]["message"]


THINKING = {"type": "thinking", "thinking": "so"}
CALLED = {"type": "tool_use", "id": "1", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("path", "role", "part", "param"),
    [
        (MESSAGES, "assistant", {"type": "thinking", "thinking": 5}, ".content[0].thinking"),
        (MESSAGES, "user", THINKING, ".content[0]"),
        (MESSAGES, "user", CALLED, ".content[0]"),
        (MESSAGES, "system", CALLED, ".content[0]"),
        (MESSAGES, "assistant", {"type": "tool_result", "tool_use_id": "1"}, ".content[0]"),
        (RESPONSES, "", {"type": "reasoning", "content": 5}, ".content"),
        (RESPONSES, "", {"type": "reasoning", "content": [5]}, ".content[0]"),
        (RESPONSES, "", {"type": "reasoning", "summary": {"text": "so"}}, ".content"),
    ],
)
async def test_a_part_that_would_be_lost_is_refused_by_name(
    path: str, role: str, part: dict[str, Any], param: str
) -> None:
    name = "messages" if path == MESSAGES else "input"
    first = {"role": role, "content": [part]} if role else part
    async with served() as one:
        answer = await one.post(path, **{**BODIES[path], name: [first, ASKED]})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"{name}[0]{param}"


@pytest.mark.parametrize("content", [5, {"type": "text", "text": "be kind"}])
async def test_instructions_for_promises_do_not_replace_a_wrong_system_message(
    content: Any,
) -> None:
    asks = {"messages": [{"role": "system", "content": content}, ASKED]}
    async with served(options=EndpointOptions(lenient=True)) as one:
        answer = await one.post(CHAT, **asks, response_format={"type": "json_object"})
        assert answer.json()["error"]["param"] == "messages[0].content"


EFFORTS = make_chat(
    TOOLED + "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}"
)


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        (CHAT, lambda effort: {"reasoning_effort": effort}),
        (RESPONSES, lambda effort: {"reasoning": {"effort": effort, "summary": "auto"}}),
        (MESSAGES, lambda effort: {"output_config": {"effort": effort}}),
    ],
)
async def test_an_effort_is_given_to_the_chat_template(
    path: str, asks: Callable[[str], dict[str, Any]]
) -> None:
    async with served(chat=EFFORTS) as one:
        for effort, shown in (("high", "effort=high"), ("none", "thinking=False")):
            assert (await one.post(path, **BODIES[path], **asks(effort))).status_code == 200
            assert EFFORTS.transcript(one.script.asked[-1][1]).endswith(shown)


async def test_stop_strings_are_taken_by_messages_under_both_names() -> None:
    async with served("ab##c") as one:
        for name in ("stop", "stop_sequences"):
            answer = (await one.post(MESSAGES, **BODIES[MESSAGES], **{name: ["##"]})).json()
            assert answer["stop_sequence"] == "##"


# Log-probs.


BYTES = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "trying": ChatTokenizer(ByteTokenizer()),
}
SERVED = ("byte_level", "byte_fallback")


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@pytest.mark.parametrize("kind", BYTES)
def test_the_bytes_of_tokens_are_the_text(kind: str, text: str) -> None:
    chat = BYTES[kind]
    found = b"".join(chat.token_bytes(token) for token in chat.encode(text))
    prefix = b" " if kind == "byte_fallback" else b""  # which SentencePiece puts before a text
    assert found == prefix + text.encode()


@pytest.mark.parametrize("kind", SERVED)
async def test_log_probs_have_the_real_bytes_of_each_token(kind: str) -> None:
    chat = BYTES[kind]
    async with served("a\u00e9\U0001f600\ufffd", chat=chat) as one:
        whole = await one.post(logprobs=True)
        [first, *_] = events(await one.post(logprobs=True, stream=True))
        entry = whole.json()["choices"][0]["logprobs"]["content"]
        assert first["choices"][0]["logprobs"]["content"] == entry
        raw = [byte for part in entry for byte in part["bytes"]]
        assert bytes(raw).decode().strip() == "a\u00e9\U0001f600\ufffd<|im_end|>"
        assert [195] in [part["bytes"] for part in entry]
        assert [169] in [part["bytes"] for part in entry]
        assert all(part["top_logprobs"] == [] for part in entry)
        asked = {"input": "ab", "include": ["message.output_text.logprobs"]}
        answered = (await one.post(RESPONSES, **asked)).json()
        told = answered["output"][0]["content"][0]["logprobs"]
        assert [part["bytes"] for part in told] == [part["bytes"] for part in entry]


@pytest.mark.parametrize("kind", [*SERVED, "characters"])
@pytest.mark.parametrize("stop", [None, "\u00e9"])
async def test_the_offsets_of_a_completion_say_where_its_tokens_begin(
    kind: str, stop: str | None
) -> None:
    chat: ChatTokenizer = BYTES.get(kind) or make_chat(TOOLED)
    said = "ab c" if kind == "characters" else "a \u00e9\U0001f600 b"
    async with served(said, chat=chat) as one:
        body = {"prompt": "ab", "logprobs": 0, "stop": stop}
        choice = (await one.post(TEXT, **body)).json()["choices"][0]
        streamed = events(await one.post(TEXT, **body, stream=True))[0]["choices"][0]
    assert streamed["logprobs"] == choice["logprobs"]
    text, told = choice["text"], choice["logprobs"]
    offsets = told["text_offset"]
    assert len(offsets) == len(told["tokens"]) == len(told["token_logprobs"])
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] == len(text) or text[offsets[-1] :] == told["tokens"][-1]
    for token, offset in zip(told["tokens"], offsets, strict=True):
        shown = token.strip(" \ufffd")
        assert shown == "<|im_end|>" or text.startswith(shown, offset + token.startswith(" "))
