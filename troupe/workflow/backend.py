"""Interfaces between a workflow and its runtime: sampling, generation, endpoints, tool calls.

The rollout service implements `Backend` over its router and `ToolBackend` over the reward service;
`troupe workflow try` (`troupe.workflow.trying`) implements both in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol

from troupe.sampling import READERS
from troupe.workflow.errors import InvalidMessagesError, shown


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one turn are drawn.

    `temperature` 0 is greedy; `top_k` -1 means all tokens. A response ends at the first of
    `stop_token_ids` (which it then contains), with the token that completes one of `stop_strings`
    (which its text then lacks) or after `max_new_tokens`. With a `seed` the response is a function
    of (weights, prompt, seed), whatever else is in the batch: up to floating-point noise, or
    bitwise in a deterministic job. `troupe.sampling` defines the valid
    values.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Found in the decoded text (`cut_at`), not by engines."""
    seed: int | None = None
    logprobs: Literal["full", "processed"] = "full"
    """Which log-probs are recorded where top-k or top-p truncate (`SamplingSpec.logprobs`)."""
    drawn: int = 0
    """Tokens at the prompt's end that already belong to the response, because a lost engine drew
    them: sampling continues at that position. The router sets it."""

    def override(self, values: Mapping[str, Any]) -> Sampling:
        """Return a copy with `values`. Raises `InvalidMessagesError` for an unknown name or a bad
        value."""
        read = {}
        for name, value in values.items():
            reader, wanted = READERS.get(name, (None, ""))
            if reader is None:
                raise InvalidMessagesError(
                    f"unknown sampling parameter '{name}'",
                    field=name,
                    value=value,
                    remedy=f"Known: {', '.join(READERS)}.",
                )
            try:
                read[name] = reader(value)
            except (TypeError, ValueError, OverflowError):
                raise InvalidMessagesError(
                    f"{name} cannot be {shown(value)}",
                    field=name,
                    value=value,
                    remedy=f"Use {wanted}.",
                ) from None
        return replace(self, **read)


FinishReason = Literal["stop", "length", "abort"]
"""Why a response ended: at a stop token or stop string, at `max_new_tokens`, or because the engine
aborted it."""


@dataclass(frozen=True)
class VersionSpan:
    """The tokens [start, end) of a response, which weight version `version` of its policy drew."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class GeneratedTurn:
    """One response, from the engine that drew it to the sample made from it.

    `token_ids` and `logprobs` have equal length; a stop token that ended the response is its last
    element. `logprobs` are natural logs under softmax(logits / temperature), before top-k and
    top-p; greedy responses (temperature 0) count as temperature 1. That is what SGLang reports by
    default, and what a trainer must recompute: logits divided by the temperature.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[VersionSpan]
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the engine already had."""
    queue_seconds: float = 0.0
    """Waiting time before the engine began with the prompt."""
    generate_seconds: float = 0.0
    """Time from then to the last token."""
    concurrency: float = 0.0
    """Turns that the engine ran meanwhile, itself included; 0: unknown."""
    routed_experts: Any = field(default=None, compare=False, repr=False)
    """Array [tokens, layers, k] of the experts that the engine sent each token of prompt and
    response to, but the last token drawn (`troupe.mixtures`); None: not asked for, or unknown."""


def cut_at(
    generation: GeneratedTurn, strings: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> tuple[GeneratedTurn, str] | None:
    """Return the response cut at the first of `strings`, and its text before that string; None: it
    contains no stop string. `text_of` decodes ids."""

    def has(tokens: int) -> bool:
        text = text_of(ids[:tokens])
        return any(string in text for string in strings)

    ids = generation.token_ids
    last = len(ids) - (generation.finish_reason == "stop")
    if not strings or not has(last):
        return None
    first = 1
    while first < last:
        middle = (first + last) // 2
        if has(middle):
            last = middle
        else:
            first = middle + 1
    text = text_of(ids[:last])
    kept = replace(
        generation,
        token_ids=ids[:last],
        logprobs=generation.logprobs[:last],
        versions=[
            VersionSpan(span.version, span.start, min(span.end, last))
            for span in generation.versions
            if span.start < last
        ],
        finish_reason="stop",
    )
    return kept, text[: first_of(strings, text)]


def first_of(strings: Sequence[str], text: str) -> int | None:
    """Return the offset of the first of `strings` in `text`; None: none of them occurs."""
    return min((at for at in map(text.find, strings) if at >= 0), default=None)


class Backend(Protocol):
    """The generator of turns for one trajectory."""

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        """Draw one response, within the turn's deadline. Raises `TurnError`."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Options of an agent's OpenAI endpoint, which decide what its clients may set."""

    lenient: bool = False
    """Accept requirements that only constrained decoding could guarantee, without a guarantee."""
    sampling: Literal["job", "client"] = "job"
    """Whether temperature, top_p and top_k come from the agent's `sampling` in the job, or from
    each request."""


ENDPOINT_OPTIONS: Final = EndpointOptions()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of OpenAI's and Anthropic's APIs that speaks as one agent of one running
    trajectory."""

    base_url: str
    """Address that ends in `/v1`. It contains an unguessable id, which is the only access
    control."""
    api_key: str
    """A placeholder for clients that need one; it is not checked."""
    model: str
    """A name for clients that need one; any is accepted."""

    @property
    def anthropic_url(self) -> str:
        """`base_url` in the form for Anthropic's clients, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


class ToolBackend(Protocol):
    """The caller of tools for one trajectory."""

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        """Run the tool with a JSON object of keyword arguments, and return its result as JSON.
        `expected_seconds`: estimated time with the fewest cores; 0: no estimate.

        Raises `ToolError`. The tool's own timeout bounds the call.
        """
        ...
