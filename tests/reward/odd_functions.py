"""Functions that end in unexpected ways. Standard library only."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


class _Mute(Exception):
    """Raise an error without a printable message."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __getattr__(self, name: str) -> NoReturn:
        raise SystemExit(3)


def beyond_floats(by_agent: bool = False) -> Any:
    return {"solver": 10**400} if by_agent else 10**400


def raises_mutely() -> None:
    raise _Mute


def names_a_file_of_old() -> None:
    """Raise the error of `open` for a name that is not UTF-8."""
    raise FileNotFoundError("no such file: caf\udce9.txt")


def says_too_much(chars: int) -> None:
    raise ValueError("x" * chars)


def forgets_where_modules_are() -> None:
    sys.path.clear()


def is_refused_for(after: str) -> None:
    error = ConnectionError("refused")
    error.response = _Response(after)  # type: ignore[attr-defined]
    raise error


class _Response:
    status_code = 429

    def __init__(self, after: str) -> None:
        self.headers = {"retry-after": after}
