"""`TokenIds`: token ids of a prompt as one array, from the tokenizer to the sample.

A prompt of 20,000 tokens is read, hashed, checked, sent and stored at every turn of a conversation.
As an array each of these costs microseconds; as a tuple of Python's ints, up to a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index as as_int
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
import xxhash

IntArray = npt.NDArray[np.int32]


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids: `array` is int32 and not to be written to.

    It reads like a tuple of ints, and equals one with the same ids.
    """

    __slots__ = ("_digest", "array")

    array: IntArray
    _digest: int | None

    def __init__(self, array: IntArray) -> None:
        """`array`: one-dimensional, and never changed from now on."""
        array.flags.writeable = False
        self.array = array
        self._digest = None

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
        """The ids of all parts, one after another."""
        arrays = [cls.of(part).array for part in parts if len(part)]
        return cls(np.concatenate(arrays)) if arrays else EMPTY

    @property
    def digest(self) -> int:
        """64-bit hash of the ids (xxh3 of each as eight bytes, little-endian)."""
        if self._digest is None:
            self._digest = xxhash.xxh3_64_intdigest(self.array.astype("<i8").tobytes())
        return self._digest

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest id. There must be some."""
        return int(self.array.min()), int(self.array.max())

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
