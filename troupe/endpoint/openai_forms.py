"""Chat completions and completions of OpenAI's API: checks request bodies, translates them for
`Agent.chat` and `Agent.generate`, and writes replies as completions or stream chunks.

Requests of the other APIs are translated to chat completion requests first.
"""

from __future__ import annotations

import codecs
import json
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from troupe.endpoint.errors import ApiError, FieldNames, refused
from troupe.endpoint.promises import Promises, promises_of
from troupe.rpc.ids import new_id
from troupe.workflow.agent import Agent
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.messages import Reply


@dataclass(frozen=True)
class ApiAnswer(ABC):
    """A writer of the replies to one request in the form of its API, whole or as a stream."""

    model: str
    tokenizer: ChatTokenizer
    names: FieldNames
    """The API's names for the fields of a chat completion request."""

    @abstractmethod
    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a response without streaming."""

    @abstractmethod
    def chunks(self, replies: Sequence[Reply]) -> Iterator[str]:
        """Return the events of a stream, including its last one."""

    def failure(self, error: ApiError) -> str:
        """Return the last event of a stream whose turn failed."""
        return event(error.body)

    def unmet(self, promises: Promises, reply: Reply) -> list[dict[str, str]] | None:
        """Return the promises that the reply breaks, and record them on it; None: the request had
        none."""
        if not promises:
            return None
        unmet = [{**one, "param": self.names.of(one["param"])} for one in promises.unmet(reply)]
        reply.unmet = tuple(one["param"] for one in unmet)
        return unmet

    def with_own_fields(
        self, body: dict[str, Any], reply: Reply, *, token_ids: bool | None, promises: Promises
    ) -> dict[str, Any]:
        """Return `body` of one reply with the fields that only Troupe has: its token ids, if asked
        for, and the promises that it breaks."""
        if token_ids:
            body["prompt_token_ids"] = list(reply.prompt_ids)
            body["token_ids"] = list(reply.response)
        if (unmet := self.unmet(promises, reply)) is not None:
            body["unmet"] = unmet
        return body

    def token_logprobs(self, reply: Reply) -> list[dict[str, Any]]:
        """Return an entry per sampled token, including the stop token and the tokens of tool
        calls."""
        entries = []
        for token_id, logprob in zip(reply.response, reply.response_logprobs, strict=True):
            raw = self.tokenizer.token_bytes(token_id)
            token = raw.decode(errors="replace")
            entries.append(
                {"token": token, "logprob": logprob, "bytes": list(raw), "top_logprobs": []}
            )
        return entries


@dataclass(frozen=True)
class ChatAnswer(ApiAnswer):
    """A writer of the replies to one chat completion request."""

    promises: Promises
    logprobs: bool
    token_ids: bool
    with_usage: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a response without streaming."""
        answer = self._frame("chat.completion")
        answer["choices"] = [
            {**self._choice(index, reply), "message": {**_message(reply), "refusal": None}}
            for index, reply in enumerate(replies)
        ]
        answer["usage"] = usage(replies)
        if self.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def chunks(self, replies: Sequence[Reply]) -> Iterator[str]:
        """Yield the events of a stream, including its last one."""
        for index, reply in enumerate(replies):
            choice = self._choice(index, reply)
            reason, unmet = choice.pop("finish_reason"), choice.pop("unmet", None)
            for number, delta in enumerate(_deltas(reply)):
                # The first part carries the fields of the whole reply.
                own = choice if number == 0 else {"index": index, "logprobs": None}
                part = {**own, "delta": delta, "finish_reason": None}
                yield self._chunk([part], replies if number == 0 else ())
            end: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": reason}
            yield self._chunk([end if unmet is None else {**end, "unmet": unmet}])
        if self.with_usage:
            frame = self._frame("chat.completion.chunk")
            yield event({**frame, "choices": [], "usage": usage(replies)})
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], replies: Sequence[Reply] = ()) -> str:
        chunk = {**self._frame("chat.completion.chunk"), "choices": choices}
        if self.token_ids and replies:
            chunk["prompt_token_ids"] = list(replies[0].prompt_ids)
        return event({**chunk, "usage": None} if self.with_usage else chunk)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        reason = reply.finish_reason
        if reply.tool_calls and reason == "stop":
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.logprobs:
            choice["logprobs"] = {"content": self.token_logprobs(reply), "refusal": None}
        if self.token_ids:
            choice["token_ids"] = list(reply.response)
        if (unmet := self.unmet(self.promises, reply)) is not None:
            choice["unmet"] = unmet
        return choice


@dataclass(frozen=True)
class TextAnswer(ApiAnswer):
    """A writer of the replies to one plain completion request."""

    logprobs: bool
    token_ids: bool
    with_usage: bool
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of a response without streaming."""
        answer = self._frame([self._choice(i, reply) for i, reply in enumerate(replies)])
        if self.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return {**answer, "usage": usage(replies)}

    def chunks(self, replies: Sequence[Reply]) -> Iterator[str]:
        """Yield the events of a stream, including its last one."""
        for index, reply in enumerate(replies):
            yield event(self._frame([self._choice(index, reply)]))
        if self.with_usage:
            yield event({**self._frame([]), "usage": usage(replies)})
        yield "data: [DONE]\n\n"

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "logprobs": None,
        }
        if self.logprobs:
            entries = self.token_logprobs(reply)
            choice["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": None,
                "text_offset": self._offsets(reply),
            }
        if self.token_ids:
            choice["token_ids"] = list(reply.response)
        return choice

    def _offsets(self, reply: Reply) -> list[int]:
        """Return the offset of each token in the reply's text, in characters. All tokens of one
        character have its offset, and tokens that the text lacks have the offset of the next
        one."""
        tokenizer, text = self.tokenizer, reply.text
        special = tokenizer.special_ids
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown, offsets = "", []
        for token in reply.response:
            offsets.append(len(shown))
            if token not in special:
                shown += decoder.decode(tokenizer.token_bytes(token))
        # Some tokenizers leave out the space that a text begins with.
        left_out = max(0, shown.find(text))
        return [min(max(0, offset - left_out), len(text)) for offset in offsets]


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Token counts: each distinct prompt once, and all responses."""
    prompts = {id(reply.prompt): len(reply.prompt) for reply in replies}
    prompt = sum(prompts.values())
    response = sum(len(reply.response) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
    }


def event(data: dict[str, Any], *, named: bool = False) -> str:
    """Return one server-sent event; `named`: with its `type` as its name."""
    # ASCII, because some clients treat U+2028 and U+0085 as ends of lines.
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def _message(reply: Reply) -> dict[str, Any]:
    message = reply.message
    if reply.tool_calls:
        message["content"] = reply.content or None
    return message


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    """Yield the parts of a streamed reply: reasoning, text, and each tool call separately, since
    some clients read only the first entry of a part."""
    yield {"role": "assistant", "content": ""}
    if reply.reasoning_content:
        yield {"reasoning_content": reply.reasoning_content}
    if reply.content:
        yield {"content": reply.content}
    for number, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": number, **call.message}]}


ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of chat templates by role of a request."""
_CONTINUES: Final = "Troupe begins each reply itself: end the conversation before it."
_NOT_IN_MESSAGES: Final = {
    "audio": "Send its transcript as the message's `content`.",
    "function_call": "Send the call in `tool_calls`.",
    "partial": _CONTINUES,
    "prefix": _CONTINUES,
}
"""Fields of a message that would change the prompt and are not supported, with remedies."""
_MAX_STOPS: Final = 32
_MAX_TOKENS: Final = 2**31 - 1
_MAX_CHOICES: Final = 128


Neutral = Mapping[str, Callable[[Any], bool]]
"""Fields that are not supported, with a test for values that request nothing: clients send the
defaults of OpenAI, vLLM and SGLang."""


def _is_empty(value: Any) -> bool:
    return not any(value.values()) if isinstance(value, Mapping) else not value


def _keeps_context(value: Any) -> bool:
    """Return whether edits of the context change nothing: Claude Code requests that all thoughts be
    kept."""
    edits = value.get("edits") if isinstance(value, Mapping) else value
    if not isinstance(edits, list):
        return not edits
    return all(
        isinstance(edit, Mapping)
        and str(edit.get("type")).startswith("clear_thinking_")
        and edit.get("keep") == "all"
        for edit in edits
    )


_NEUTRAL: Final[Neutral] = {
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "audio",
            "bad_words",
            "chat_template",
            "continue_final_message",
            "custom_logit_processor",
            "custom_params",
            "documents",
            "early_stopping",
            "ebnf",
            "echo",
            "enable_search",
            "frequency_penalty",
            "functions",
            "guided_choice",
            "guided_decoding_backend",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "guided_whitespace_pattern",
            "ignore_eos",
            "include_stop_str_in_output",
            "json_schema",
            "kv_transfer_params",
            "logits_processors",
            "lora_path",
            "media_io_kwargs",
            "min_p",
            "min_tokens",
            "mirostat",
            "mirostat_mode",
            "mm_processor_kwargs",
            "no_stop_trim",
            "presence_penalty",
            "reasoning",
            "regex",
            "return_cached_tokens_details",
            "return_hidden_states",
            "return_routed_experts",
            "return_tokens_as_token_ids",
            "safe_prompt",
            "session_params",
            "stop_regex",
            "stop_token_ids",
            "structural_tag",
            "suffix",
            "top_a",
            "top_logprobs",
            "use_beam_search",
            "vllm_xargs",
        ),
        operator.not_,
    ),
    **dict.fromkeys(
        ("best_of", "length_penalty", "repetition_penalty", "tfs", "typical_p"),
        lambda value: value == 1,
    ),
    # Their contents may be neutral, too: {"5": 0}, {"json": null}.
    **dict.fromkeys(("logit_bias", "structured_outputs"), _is_empty),
    **dict.fromkeys(
        (
            "add_generation_prompt",
            "detokenize",
            "include_reasoning",
            "separate_reasoning",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ),
        lambda value: value is True,
    ),
    "add_special_tokens": lambda value: value is False,
    "context_management": _keeps_context,
    "function_call": lambda value: value == "none",
    "modalities": lambda value: value in ([], ["text"]),
    "truncation": lambda value: value == "disabled",
    "verbosity": lambda value: value == "medium",
}
_IGNORED: Final = frozenset(
    {
        "access_programs",
        "anthropic_version",
        "betas",
        "billing_policy",
        "cache_control",
        "cache_salt",
        "diagnostics",
        "inference_geo",
        "max_tool_calls",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "speed",
        "store",
        "stream_reasoning",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields of all APIs that do not affect the drawn tokens: accounting, caches, scheduling, and
limits on tools that run at OpenAI."""


class _FailFast(FailFast):
    """`FailFast` with a hash, which members of a union need."""

    __hash__ = object.__hash__


FIRST_ERROR: Final = _FailFast()
"""Stops at the first invalid item, since a list of a million errors would fill the memory."""


class ApiBody(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    neutral: ClassVar[Neutral] = {}
    """Fields that are not supported, with a test for values that request nothing."""
    complete: ClassVar[bool] = False
    """Whether to refuse a field that is neither declared nor `neutral` nor ignored, unless it is
    null: a client that misspells an option, or sends an option of another server, must not silently
    get different tokens than it requested."""

    @classmethod
    def validated(cls, body: Mapping[str, Any]) -> Self:
        """Check the types of a body and return it. Raises `ApiError` naming the field at fault."""
        for name, value in body.items():
            if value is None or name in cls.model_fields:
                continue
            if name in cls.neutral:
                if not cls.neutral[name](value):
                    raise refused_field(name, value, "Leave it out.")
            elif cls.complete and name not in _IGNORED:
                raise refused(
                    f"`{name[:60]}` is not a known option",
                    name[:60],
                    "Leave it out. docs/openai.md lists the options that are followed or ignored.",
                )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            field = _path_of(first["loc"], body, missing=first["type"] == "missing")
            raise refused(
                f"`{field}` is wrong: {first['msg']}",
                field,
                "docs/openai.md lists the accepted values.",
                code="invalid_value",
            ) from error

    @classmethod
    def translated(cls, body: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a chat completion request: `chat`, made from the fields that this
        class declares, plus all other fields of `body`. Raises `ApiError` for a field that `chat`
        also sets."""
        others = {name: value for name, value in body.items() if name not in cls.model_fields}
        for name in others.keys() & chat.keys():
            if others[name] is not None:
                remedy = "It is a field of chat completions; use this API's own field."
                raise refused_field(name, others[name], remedy)
        return {**others, **chat}


class StreamOptions(BaseModel, extra="forbid"):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """No part of a stream is padded."""
    continuous_usage_stats: Literal[False] | None = None
    """An option of vLLM: the usage in each part."""


class _Request(ApiBody):
    """Fields that both kinds of requests have."""

    neutral = _NEUTRAL
    complete = True

    model: str = ""
    n: int | None = Field(default=None, ge=1, le=_MAX_CHOICES)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | Annotated[list[str], FIRST_ERROR] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """An extension that vLLM also has: return the ids of prompt and response."""

    @field_validator("n", "temperature", "top_p", "top_k", "max_tokens", "seed", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("it must be a number")
        return value

    @classmethod
    def of(cls, body: Mapping[str, Any], *, lenient: bool) -> Self:
        """Return the checked request in `body`. Raises `ApiError` naming the field at fault."""
        asked = cls.validated(body)
        asked.check(lenient=lenient)
        return asked

    def check(self, *, lenient: bool) -> None:
        """Check more than types. Raises `ApiError`."""
        if isinstance(self.stop, list) and len(self.stop) > _MAX_STOPS:
            raise refused(
                f"`stop` has {len(self.stop)} strings",
                "stop",
                f"Send {_MAX_STOPS} at most.",
                code="invalid_value",
            )

    @property
    def token_limit(self) -> int | None:
        """Maximum response tokens, if the request sets them."""
        return self.max_tokens

    def sampling(self, agent: Agent, *, by_client: bool) -> dict[str, Any]:
        """Return overrides of the agent's sampling: temperature, top_p and top_k only `by_client`;
        a seed is mixed with the trajectory's."""
        drawing = {name: value for name, value in self._drawing.items() if value is not None}
        agent.role.sampling.override(drawing)  # checked even if it is not followed
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        most = self.token_limit
        given = {
            **(drawing if by_client else {}),
            "max_new_tokens": None if most is None else min(most, _MAX_TOKENS),
            "stop_strings": tuple(filter(None, stop)) or None,
            "seed": None if self.seed is None else agent.mix_seed(self.seed),
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def _drawing(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def other_drawing(self, agent: Agent) -> dict[str, Any]:
        """Return the request's temperature, top_p and top_k where they differ from the agent's
        sampling."""
        own = agent.role.sampling
        asked = {name: value for name, value in self._drawing.items() if value is not None}
        read = own.override(asked)
        return {
            name: getattr(read, name) for name in asked if getattr(read, name) != getattr(own, name)
        }

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], FIRST_ERROR] = Field(min_length=1)
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    """An extension of some servers: a shorthand for the chat template's argument of this name."""
    reasoning_effort: str | None = Field(default=None, max_length=64)
    """Passed to the chat template (gpt-oss's accepts it); `none` becomes `enable_thinking:
    false`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, which replaces `max_tokens` in OpenAI's API."""
        return self.max_completion_tokens or self.max_tokens

    def check(self, *, lenient: bool) -> None:
        """Also refuse promises (`promises.py`), unless the endpoint is `lenient`."""
        super().check(lenient=lenient)
        name = self.promises.needs_lenient
        if name and not lenient:
            raise refused(
                f"`{name}` asks for constrained decoding, which is not supported",
                name,
                "Open the endpoint with `lenient=True` to instruct the model without enforcing it.",
            )

    @cached_property
    def promises(self) -> Promises:
        """Requirements that replies must satisfy. Raises `ApiError`."""
        return promises_of(
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.response_format,
        )

    @property
    def template_options(self) -> dict[str, Any] | None:
        """Further arguments of the chat template."""
        options = dict(self.chat_template_kwargs or {})
        if self.enable_thinking is not None:
            options.setdefault("enable_thinking", self.enable_thinking)
        if self.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
        elif self.reasoning_effort:
            options.setdefault("reasoning_effort", self.reasoning_effort)
        return options or None

    def conversation(self, system_prompt: str | None) -> list[dict[str, Any]]:
        """Return the messages with the roles that chat templates know. Promises are added to the
        system message, or to a new one with the agent's own `system_prompt`. Raises `ApiError`."""
        conversation: list[dict[str, Any]] = []
        for index, message in enumerate(self.messages):
            role = message.get("role")
            if not isinstance(role, str) or role not in ROLES:
                raise refused(
                    f"unknown role {_shown(role)}",
                    f"messages[{index}].role",
                    f"Known: {', '.join(ROLES)}.",
                )
            for name in _NOT_IN_MESSAGES:
                if message.get(name):
                    at, remedy = f"messages[{index}].{name}", _NOT_IN_MESSAGES[name]
                    raise refused_field(at, message[name], remedy)
            conversation.append({**message, "role": ROLES[role]})
        if instruction := self.promises.instruction:
            if conversation[0]["role"] != "system":
                conversation.insert(0, {"role": "system", "content": system_prompt or ""})
            first = conversation[0]
            first["content"] = _extended(first.get("content"), instruction)
        return conversation


class CompletionRequest(_Request):
    """`POST /v1/completions`: continues plain text or token ids."""

    neutral = {
        **_NEUTRAL,
        "response_format": lambda value: value in ({}, {"type": "text"}),
    }

    prompt: (
        str
        | Annotated[list[int], FIRST_ERROR]
        | Annotated[list[str], FIRST_ERROR]
        | Annotated[list[list[int]], FIRST_ERROR]
    )
    logprobs: int | None = Field(default=None, ge=0, le=0)
    add_special_tokens: bool | None = None
    """An extension that vLLM also has: whether texts begin with the tokenizer's beginning of a
    sequence."""

    def check(self, *, lenient: bool) -> None:
        """Also check that there are prompts, and not too many completions of them."""
        super().check(lenient=lenient)
        count = len(self.prompts) * (self.n or 1)
        if count > _MAX_CHOICES:
            raise refused(
                f"`prompt` and `n` ask for {count} completions",
                "prompt",
                f"Ask for {_MAX_CHOICES} at most.",
                code="invalid_value",
            )
        if not all(self.prompts):
            raise refused(
                "`prompt` is empty", "prompt", "Send a text, or token ids.", code="invalid_value"
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or lists of token ids, each continued separately."""
        given = self.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return [cast("str | list[int]", given)]
        return list(cast("list[str | list[int]]", given))


def check_object(body: Any) -> Mapping[str, Any]:
    """Return the body if it is a JSON object. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.", code="invalid_json")
    return body


def refused_field(name: str, value: Any, remedy: str) -> ApiError:
    """Return the error for an unsupported field that would change the generated tokens."""
    return refused(f"`{name}` = {_shown(value)} is not supported", name, remedy)


def _extended(content: Any, text: str) -> Any:
    """Return the content of a message with `text` appended; content of other types, which is
    refused later, unchanged."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": f"\n{text}"}]
    if isinstance(content, str):
        return f"{content}\n\n{text}" if content else text
    return content


def _path_of(loc: Sequence[int | str], body: Any, *, missing: bool) -> str:
    """Return the path of a field in `body`, without pydantic's names for the members of unions;
    `missing`: the body lacks the last part."""
    path, inside = "", body
    for number, part in enumerate(loc, 1):
        if isinstance(part, int) and isinstance(inside, list):
            path, inside = f"{path}[{part}]", inside[part]
        elif isinstance(inside, Mapping) and (part in inside or (missing and number == len(loc))):
            path, inside = f"{path}.{part}" if path else str(part), inside.get(part)
    return path


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
