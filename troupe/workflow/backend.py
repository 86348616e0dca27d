"""What a workflow stands on: something that generates tokens, something that calls tools.

The rollout service implements both protocols over its router and the reward service; tests and
`troupe workflow try` implement them with a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from troupe.workflow.errors import InvalidMessagesError

if TYPE_CHECKING:
    from troupe.workflow.agent import Agent


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one turn are drawn.

    `temperature` 0 is greedy; `top_k` -1 means all tokens; a response ends at the first of
    `stop_token_ids` (which it then contains), with the token that completes one of `stop_strings`
    (which its text then lacks) or after `max_new_tokens`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Not for engines: see `stopping`."""
    seed: int | None = None

    def override(self, values: Mapping[str, Any]) -> Sampling:
        """The same with `values`. Raises `InvalidMessagesError` for an unknown or bad one."""
        try:
            changed = replace(self, **values)
        except TypeError:
            unknown = sorted(set(values) - set(_FIELDS))
            raise InvalidMessagesError(
                f"unknown sampling parameter '{unknown[0]}'",
                field=unknown[0],
                value=values[unknown[0]],
                remedy=f"Known: {', '.join(_FIELDS)}.",
            ) from None
        for name, value in values.items():
            within, wanted = _BOUNDS.get(name, (None, ""))
            if within and not (isinstance(value, int | float) and within(value)):
                raise InvalidMessagesError(
                    f"{name} is out of range", field=name, value=value, remedy=f"Needs {wanted}."
                )
        return changed


_FIELDS = tuple(Sampling.__dataclass_fields__)
_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: v >= 0, "temperature >= 0"),
    "top_p": (lambda v: 0 < v <= 1, "0 < top_p <= 1"),
    "top_k": (lambda v: v == -1 or v >= 1, "top_k >= 1, or -1 for all"),
    "max_new_tokens": (lambda v: v >= 1, "max_new_tokens >= 1"),
}


class Span(Protocol):
    """Tokens [start, end) of a response were drawn by `version`."""

    @property
    def version(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


class Generation(Protocol):
    """What a backend answers; lists run over the response's tokens."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Response ids, the stop token included when there was one."""

    @property
    def logprobs(self) -> Sequence[float]:
        """Natural log-probability of each response token under the engine that drew it."""

    @property
    def versions(self) -> Sequence[Span]:
        """Which policy version drew which tokens."""

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `abort`."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values the engine already had."""

    @property
    def queue_seconds(self) -> float:
        """Time the turn waited before its first token was worked on."""

    @property
    def generate_seconds(self) -> float:
        """Time from then to its last token."""


class Backend(Protocol):
    """Generates turns for one trajectory."""

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> Generation:
        """One generation. Raises `TurnError`; bounded by the turn's deadline."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a client of OpenAI's API speaks as one agent of one trajectory, while that runs."""

    base_url: str
    """Ends in `/v1`. Whoever knows it may use it: it cannot be guessed."""
    api_key: str
    """Clients want one; it is not looked at."""
    model: str
    """Clients want one; any is taken."""


@runtime_checkable
class EndpointBackend(Protocol):
    """A backend that also serves OpenAI's API."""

    def endpoint(self, agent: Agent, *, lenient: bool) -> Endpoint:
        """Open one for `agent`, or give the one that is open."""
        ...


class ToolBackend(Protocol):
    """Calls tools for one trajectory."""

    async def invoke(self, name: str, arguments_json: str) -> str:
        """Run the tool with a JSON object of keyword arguments; returns its result as JSON.

        Raises `ToolError`; bounded by the tool's own timeout.
        """
        ...
