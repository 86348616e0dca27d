"""Token ids of prompts and responses, from the tokenizer to the sample, as one array."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import index as as_int
from typing import Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import xxhash

from troupe.contracts.payloads import Marks, Payloads, PlacedPayload

IntArray = npt.NDArray[np.int32]


class TokenIds(Sequence[int]):
    """Token ids of a prompt as one array: `array` is int32 and must not be written to.

    It reads like a tuple of ints, and equals a tuple with the same ids. A prompt of 20,000 tokens
    is hashed, checked, sent and stored at every turn of a conversation: each of these costs
    microseconds for an array, but up to a millisecond for a tuple of Python ints. Ids that extend
    others (`joined`) reuse their results: only the new ids are added to hash, range and JSON text.
    """

    __slots__ = ("_earlier", "_hasher", "_json", "_range", "array", "payloads")

    array: IntArray
    payloads: Payloads
    """Payloads that some of the tokens stand for, by position."""
    # xxh3 of all ids; lowest and highest id; JSON text of the first ids, with their number.
    _hasher: Any
    _range: tuple[int, int] | None
    _json: tuple[bytes, int]
    _earlier: TokenIds | None

    def __init__(self, array: IntArray, payloads: Payloads = ()) -> None:
        """Wrap `array`, which is one-dimensional and must never change."""
        array.flags.writeable = False
        self.array = array
        self.payloads = payloads
        self._hasher = self._range = self._earlier = None
        self._json = b"", 0

    @classmethod
    def of(cls, ids: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
        """Return the ids as an array, without copying an existing array.

        Raises `OverflowError` for an id outside int32, and `TypeError` for an id that is not an
        integer.
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
        except TypeError:  # numpy integers, and other objects with `__index__`
            return cls(np.fromiter(map(as_int, ids), np.int32, len(ids)))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int]]) -> TokenIds:
        """Return the concatenated ids of all parts. The JSON text of the first part moves to the
        result, so that a growing conversation has only one."""
        given = [cls.of(part) for part in parts if len(part)]
        if len(given) < 2:
            return given[0] if given else EMPTY
        first = given[0]
        whole = cls(np.concatenate([part.array for part in given]))
        if any(part.payloads for part in given):
            starts = accumulate((len(part) for part in given), initial=0)
            whole.payloads = tuple(
                placed.moved(start)
                for start, part in zip(starts, given, strict=False)
                for placed in part.payloads
            )
        new = whole.array[len(first) :]
        if first._hasher is not None:
            whole._hasher = first._hasher.copy()
            whole._hasher.update(new.astype("<i8"))
        if first._range is not None:
            low, high = first._range
            whole._range = min(low, int(new.min())), max(high, int(new.max()))
        whole._json, first._json = first._json, (b"", 0)
        return whole

    @classmethod
    def of_text(
        cls, text: str, marks: Marks | None, encode: Callable[[str], Sequence[int]]
    ) -> TokenIds:
        """Return the ids of `text`, with payloads' ids in place of their marks."""
        if not marks:
            return cls.of(encode(text))
        parts = []
        for piece in re.split(f"({'|'.join(map(re.escape, marks))})", text):
            if piece in marks:
                payload, ids = marks[piece]
                stand_in = (PlacedPayload(payload, 0, len(ids)),)
                parts.append(cls(np.array(ids, np.int32), stand_in))
            elif piece:
                parts.append(cls.of(encode(piece)))
        return cls.joined(parts)

    def share_with(self, earlier: TokenIds) -> None:
        """Turn `earlier`, with which these ids begin, and the ids that it shares with into views of
        this array, so that the memory of a conversation's prompts does not grow with the square of
        its turns. The ids of the first prompt are an exception, since other conversations begin
        with them, too."""
        self._earlier = earlier
        while earlier._earlier is not None:
            earlier.array = self.array[: len(earlier)]
            earlier = earlier._earlier

    @property
    def digest(self) -> int:
        """64-bit hash of the ids (xxh3 of each as eight bytes, little-endian), and of payloads."""
        if self._hasher is None:
            self._hasher = xxhash.xxh3_64(self.array.astype("<i8").data)
        hasher = self._hasher
        if self.payloads:
            hasher = hasher.copy()
            hasher.update(repr(self.payloads).encode())
        found: int = hasher.intdigest()
        return found

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest id. The ids must not be empty."""
        if self._range is None:
            self._range = int(self.array.min()), int(self.array.max())
        return self._range

    @property
    def json(self) -> bytes:
        """The ids as a JSON array, which is kept: about five bytes per id."""
        text, known = self._json
        if known < len(self):
            import orjson  # installed with the engines

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
            same = np.array_equal(self.array, other.array)
            return same and self.payloads == other.payloads
        if isinstance(other, tuple | list):
            return len(self) == len(other) and self.array.tolist() == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))  # like the tuple that it equals

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.array, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"TokenIds({self.array.tolist()})"


EMPTY: Final = TokenIds(np.empty(0, np.int32))


class PromptIds(NamedTuple):
    """Ids of a prompt.

    `broken`: an assistant message differs from what this agent said at that point; from there on
    the history was tokenised again.
    """

    ids: TokenIds
    broken: bool
