"""Interfaces between a workflow and what runs it: ids, sampling, generation, endpoints, tool calls.

The rollout service implements `Backend` over its router and `ToolBackend` over the reward service;
`troupe workflow try` (`troupe.workflow.trying`) implements both in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index as as_int
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from troupe.sampling import READERS
from troupe.workflow.errors import InvalidMessagesError, shown

if TYPE_CHECKING:
    from troupe.workflow.agent import Agent

IntArray = npt.NDArray[np.int32]


class TokenIds(Sequence[int]):
    """Token ids of a prompt as one array: `array` is int32 and not to be written to.

    It reads like a tuple of ints, and equals one with the same ids. A prompt of 20,000 tokens is
    hashed, checked, sent and stored at every turn of a conversation: as an array each of these
    costs microseconds, as a tuple of Python's ints up to a millisecond. Ids that extend others
    (`joined`) reuse what is known of those: their hash, range and JSON text are made of what is
    new.
    """

    __slots__ = ("_earlier", "_hasher", "_json", "_range", "array")

    array: IntArray
    # xxh3 of all ids; lowest and highest id; JSON text of the first ids, with their number.
    _hasher: Any
    _range: tuple[int, int] | None
    _json: tuple[bytes, int]
    _earlier: TokenIds | None

    def __init__(self, array: IntArray) -> None:
        """`array`: one-dimensional, and never changed from now on."""
        array.flags.writeable = False
        self.array = array
        self._hasher = self._range = self._earlier = None
        self._json = b"", 0

    @classmethod
    def of(cls, ids: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
        """The ids as an array; those that are one already are not copied.

        Raises `OverflowError` for an id that is no int32, `TypeError` for one that is no integer.
        """
        if isinstance(ids, TokenIds):
            return ids
        if isinstance(ids, np.ndarray):
            if ids.dtype.kind not in "iu" or ids.ndim != 1:
                raise TypeError(f"ids are a row of integers, not {ids.dtype} of {ids.shape}")
            if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
                raise OverflowError("an id is beyond int32")
            return cls(ids.astype(np.int32))
        try:
            return cls(np.fromiter(ids, np.int32, len(ids)))
        except TypeError:  # numpy's own integers, and whatever else has `__index__`
            return cls(np.fromiter(map(as_int, ids), np.int32, len(ids)))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int]]) -> TokenIds:
        """The ids of all parts, one after another. The JSON text of the first part goes over to
        the result: of a growing conversation there is one."""
        given = [cls.of(part) for part in parts if len(part)]
        if len(given) < 2:
            return given[0] if given else EMPTY
        first = given[0]
        whole = cls(np.concatenate([part.array for part in given]))
        new = whole.array[len(first) :]
        if first._hasher is not None:
            whole._hasher = first._hasher.copy()
            whole._hasher.update(new.astype("<i8"))
        if first._range is not None:
            low, high = first._range
            whole._range = min(low, int(new.min())), max(high, int(new.max()))
        whole._json, first._json = first._json, (b"", 0)
        return whole

    def share_with(self, earlier: TokenIds) -> None:
        """Have `earlier`, with which these ids begin, and what that shares with be views of this
        array, but for the first of all, which other conversations begin with, too. Else the prompts
        of a conversation would take memory by the square of its turns."""
        self._earlier = earlier
        while earlier._earlier is not None:
            earlier.array = self.array[: len(earlier)]
            earlier = earlier._earlier

    @property
    def digest(self) -> int:
        """64-bit hash of the ids (xxh3 of each as eight bytes, little-endian)."""
        if self._hasher is None:
            self._hasher = xxhash.xxh3_64(self.array.astype("<i8").data)
        found: int = self._hasher.intdigest()
        return found

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest id. There must be some."""
        if self._range is None:
            self._range = int(self.array.min()), int(self.array.max())
        return self._range

    @property
    def json(self) -> bytes:
        """The ids as a JSON array. It is kept: about five bytes for each id."""
        text, known = self._json
        if known < len(self):
            import orjson  # comes with what serves engines

            new = orjson.dumps(self.array[known:], option=orjson.OPT_SERIALIZE_NUMPY)
            text = b"".join((memoryview(text)[:-1], b",", memoryview(new)[1:])) if known else new
            self._json = text, len(self)
        return text or b"[]"

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> TokenIds: ...

    def __getitem__(self, at: int | slice) -> int | TokenIds:
        if isinstance(at, slice):
            return TokenIds(self.array[at])
        return int(self.array[at])

    def __contains__(self, one: object) -> bool:
        return isinstance(one, int | np.integer) and bool((self.array == one).any())

    def __add__(self, other: Sequence[int]) -> TokenIds:
        if not isinstance(other, Sequence):
            return NotImplemented
        return TokenIds.joined((self, other))

    def __radd__(self, other: Sequence[int]) -> TokenIds:
        if not isinstance(other, Sequence):
            return NotImplemented
        return TokenIds.joined((other, self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self.array, other.array)
        if isinstance(other, tuple | list):
            return len(self) == len(other) and self.array.tolist() == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))  # as of the tuple that it equals

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.array, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"TokenIds({self.array.tolist()})"


EMPTY: Final = TokenIds(np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one turn are drawn.

    `temperature` 0 is greedy; `top_k` -1 means all tokens. A response ends at the first of
    `stop_token_ids` (which it then contains), with the token that completes one of `stop_strings`
    (which its text then lacks) or after `max_new_tokens`. What may be written is in
    `troupe.sampling`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Searched for in the decoded text, not by engines (`cut_at`)."""
    seed: int | None = None

    def override(self, values: Mapping[str, Any]) -> Sampling:
        """A copy with `values`. Raises `InvalidMessagesError` for an unknown name or a bad
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
                    remedy=f"Needs {wanted}.",
                ) from None
        return replace(self, **read)


FinishReason = Literal["stop", "length", "abort"]
"""Why a response ended: a stop token or stop string, `max_new_tokens`, or the engine aborted it."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a response were drawn by weight version `version` of its policy."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class GeneratedTurn:
    """One response, from the engine that drew it to the sample that is made of it.

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
    beside: float = 0.0
    """Turns that the engine ran meanwhile, itself included; 0: unknown."""
    routed_experts: Any = field(default=None, compare=False, repr=False)
    """Array [tokens, layers, k] of the experts that the engine sent each token of prompt and
    response to, but the last token drawn (`troupe.mixtures`); None: not asked for, or unknown."""


def cut_at(
    generation: GeneratedTurn, strings: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> tuple[GeneratedTurn, str] | None:
    """The response cut at the first of `strings`, and its text before that; None: no stop
    string. `text_of` decodes ids."""

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
    """Offset of the first of `strings` in `text`; None: none of them occurs."""
    return min((at for at in map(text.find, strings) if at >= 0), default=None)


class Backend(Protocol):
    """Generates turns for one trajectory."""

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        """Draw one response, within the turn's deadline. Raises `TurnError`."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Options that clients of an agent's OpenAI endpoint may set."""

    lenient: bool = False
    """Accept what only constrained decoding could guarantee, without a guarantee."""
    sampling: Literal["job", "client"] = "job"
    """Whether temperature, top_p and top_k come from the agent's `sampling` in the job, or from
    each request."""


ENDPOINT_OPTIONS: Final = EndpointOptions()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of OpenAI's and Anthropic's APIs that speaks as one agent of one running
    trajectory."""

    base_url: str
    """Ends in `/v1`. Contains an unguessable id, which is the only access control."""
    api_key: str
    """A placeholder for clients that need one; it is not checked."""
    model: str
    """A name for clients that need one; any is accepted."""

    @property
    def anthropic_url(self) -> str:
        """`base_url` as Anthropic's clients take it: they add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


@runtime_checkable
class EndpointBackend(Protocol):
    """A backend that also serves OpenAI's API for its agents."""

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """Open the endpoint of `agent`, or return the open one."""
        ...


class ToolBackend(Protocol):
    """Calls tools for one trajectory."""

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        """Run the tool with a JSON object of keyword arguments; returns its result as JSON.
        `expected_seconds`: estimated time with the fewest cores; 0: no estimate.

        Raises `ToolError`; bounded by the tool's own timeout.
        """
        ...
