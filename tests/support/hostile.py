"""Extreme values and exceptions of user code, for tests of the services' handling."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

HALF = "\ud800"
"""Half of a surrogate pair: no text that UTF-8 can encode."""

_METHODS = (
    "__float__",
    "__index__",
    "__int__",
    "__len__",
    "__iter__",
    "__getitem__",
    "__str__",
    "__repr__",
    "__reduce__",
    "__reduce_ex__",
    "__hash__",
    "__eq__",
    "__bool__",
    "__contains__",
    "__getattr__",
    "keys",
    "items",
    "tolist",
)


class OwnBase(BaseException):
    """A user's exception that is no `Exception`."""


class UnsayableError(Exception):
    """An error that raises when it is converted to text."""

    def __str__(self) -> str:
        raise SystemExit("of __str__")

    __repr__ = __str__


class BothError(SystemExit, ValueError):
    """Is caught by either name."""


def raising(error: BaseException, base: type = object) -> Any:
    """An object on which every access raises `error`, its class included."""

    def refuse(*_: object, **__: object) -> Any:
        raise error

    body: dict[str, Any] = dict.fromkeys(_METHODS, refuse)
    body["__class__"] = property(refuse)
    kind = type("Hostile", (base,), body)
    return kind.__new__(kind)


def leaf_errors() -> list[BaseException]:
    """One of every kind."""
    return [
        ValueError("plain"),
        ValueError(HALF),
        ValueError("\0 and \x1b[31m"),
        ValueError("long " * 10_000),
        ValueError(10**5000),
        KeyError(HALF),
        UnsayableError(),
        BothError(3),
        SystemExit(2),
        SystemExit(HALF),
        KeyboardInterrupt(),
        GeneratorExit(),
        OwnBase("own"),
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
        StopIteration(1),
        StopAsyncIteration(),
        TimeoutError("its own"),
        RecursionError(),
        MemoryError(),
        AssertionError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
    ]


def nested_group(error: BaseException, depth: int) -> BaseException:
    """Return `error` inside of this number of groups."""
    for _ in range(depth):
        error = BaseExceptionGroup("group", [error])
    return error


def errors() -> st.SearchStrategy[BaseException]:
    """Exceptions of all kinds, alone and in groups of groups."""
    leaves = st.sampled_from(range(len(leaf_errors()))).map(lambda i: leaf_errors()[i])
    grouped: Callable[[Any], Any] = lambda inner: st.builds(  # noqa: E731
        BaseExceptionGroup, st.text(max_size=5), st.lists(inner, min_size=1, max_size=3)
    )
    return st.recursive(leaves, grouped, max_leaves=6)


def nested_list(depth: int) -> Any:
    """`[[[...]]]`."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def values() -> st.SearchStrategy[Any]:
    """Values that user code may return: JSON, halves of pairs, huge numbers, objects that raise."""
    texts = st.text(st.characters(exclude_categories=[])) | st.just(HALF)
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | texts
        | st.sampled_from([1e308, b"bytes", object(), object, 1j, {1, 2}])
        | st.sampled_from([400, 5000]).map(lambda digits: -(10**digits))
        | st.builds(nested_list, st.sampled_from([150, 250, 5000]))
        | st.builds(raising, errors())
        | st.builds(raising, errors(), st.sampled_from([dict, list, str, int, float]))
        | errors()
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(texts | st.integers() | st.none(), inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=5,
    )


def lazily(error: BaseException) -> Iterator[int]:
    """A generator that raises."""
    yield 1
    raise error
