"""Requests as clients send them, checked, in the words of `Agent.chat` and `Agent.generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from troupe.endpoint.errors import ApiError, refused

_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_SEEDS: Final = 0x7FFF_FFFF


def _unset(value: Any) -> bool:
    return not value


# What would change which tokens are drawn, or what the model reads, and is not done here: with the
# values that ask for nothing.
_NEVER: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (
            "logit_bias",
            "frequency_penalty",
            "presence_penalty",
            "min_p",
            "min_tokens",
            "ignore_eos",
            "top_logprobs",
            "functions",
            "audio",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "echo",
            "suffix",
            "regex",
            "ebnf",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
        ),
        _unset,
    ),
    "repetition_penalty": lambda value: value in (None, 1),
    "best_of": lambda value: value in (None, 1),
    "function_call": lambda value: value in (None, "none"),
    "modalities": lambda value: value in (None, ["text"]),
}
# Promises about the text that only constrained decoding could keep.
_PROMISES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "response_format": lambda value: not value or value == {"type": "text"},
    "tool_choice": lambda value: value in (None, "auto", "none"),
    "parallel_tool_calls": lambda value: value is not False,
}


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool | None = None


class _Request(BaseModel):
    """What both calls take. Fields that are not here are ignored, unless they mean something."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str = ""
    n: int | None = Field(default=None, ge=1, le=128)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """An extension that vLLM has too: the ids of prompt and response."""

    @classmethod
    def of(cls, body: Mapping[str, Any], *, lenient: bool) -> Self:
        """The request in `body`. Raises `ApiError` naming the field at fault."""
        tables = (_NEVER,) if lenient else (_NEVER, _PROMISES)
        for table in tables:
            for name, asks_nothing in table.items():
                if name in body and not asks_nothing(body[name]):
                    raise refused(
                        f"`{name}` = {_shown(body[name])} cannot be done here",
                        name,
                        "Open the endpoint with `lenient=True` to leave it to the model."
                        if table is _PROMISES
                        else "Leave it out.",
                    )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise refused(
                f"`{field}` is wrong: {first['msg']}",
                field,
                "See docs/openai.md for what is taken.",
                code="invalid_value",
            ) from error

    @property
    def most_tokens(self) -> int | None:
        """Longest response, where the request says."""
        return self.max_tokens

    @property
    def sampling(self) -> dict[str, Any]:
        """What the request overrides of the agent's sampling."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.most_tokens,
            "stop_strings": tuple(filter(None, stop)) or None,
            "seed": None if self.seed is None else self.seed & _SEEDS,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """The newer of the two names counts."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages with the roles that templates know. Raises `ApiError`."""
        conversation = []
        for index, message in enumerate(self.messages):
            role = message.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise refused(
                    f"the role {_shown(role)} is none that is known here",
                    f"messages[{index}].role",
                    f"Known: {', '.join(_ROLES)}.",
                )
            conversation.append({**message, "role": _ROLES[role]})
        return conversation


class CompletionRequest(_Request):
    """`POST /v1/completions`: a continuation of plain text, or of token ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=0)


def check_object(body: Any) -> Mapping[str, Any]:
    """The body as the JSON object that it must be. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.", code="invalid_json")
    return body


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
