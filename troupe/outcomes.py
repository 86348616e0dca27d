"""Outcomes of user code: whatever it returns or raises, as text, numbers and JSON.

Workflows, tasks, environments, tools, rewards and metric sinks are code of others. What they return
may raise when it is looked at, and what they say may be no text that protobuf or UTF-8 can carry.
Services touch such values through this module only: nothing here raises anything but its own
`ValueError`s. `troupe.user_code` calls the code itself.

Standard library only, and light: the worker process of the reward service loads this file by its
path, without the package around it, in a container with whatever Python 3 its image has.
"""

from __future__ import annotations

import builtins
import json
import math
import re
import reprlib
import traceback
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

TEXT_CHARS: Final = 2000
"""Of what an exception or a value says of itself."""
TRACEBACK_LINES: Final = 30
TRACEBACK_CHARS: Final = 16 * 2**10
JSON_DEPTH: Final = 200
"""Containers in containers. Serializers give up at different depths (pydantic at 255, `json` near
1000, less the caller's stack); below this one all of them work."""

# What the fields say of themselves, whatever a subclass or a metaclass makes of them.
_NAME: Final = type.__dict__["__name__"].__get__
_GROUP: Final[Any] = getattr(builtins, "BaseExceptionGroup", None)
# Errors of a group that are described; a group of any depth has a first one.
_SHOWN_MEMBERS: Final = 5
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
# A string, also one without an end: at every quote there is a match, so the time is linear.
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_OPENS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS: Final = bytes(set(range(256)) - _OPENS.keys())


class NotFiniteError(ValueError):
    """A value that is no finite number."""


class NotJsonError(ValueError):
    """A value, or a text, that is not JSON."""


class Interruption(BaseException):
    """Raised by Troupe itself inside of user code that blocks or that a person has interrupted.
    Whatever contains what user code raises lets it through."""


# Texts.


def utf8_text(text: str) -> str:
    """`text` as UTF-8 can encode it: two halves of a surrogate pair are joined, a half alone
    becomes U+FFFD. Text without halves is returned as it is."""
    text = str.__str__(text)  # of a subclass, its characters
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def safe_text(value: object, limit: int = TEXT_CHARS) -> str:
    """What a value says of itself, as text that protobuf, JSON, Redis and logs take: UTF-8 without
    NUL, of at most `limit` characters. Of a value that cannot say anything, its type."""
    kind = type(value)
    try:
        if issubclass(kind, str):
            text = str.__str__(value)  # type: ignore[arg-type]
        elif kind in (dict, list, tuple, set, frozenset):
            text = _bounded_repr(limit).repr(value)
        else:
            text = str.__str__(str(value))
    except BaseException:
        text = _unsayable(value)
    return _clipped(text, limit)


def shown(value: object, limit: int = 60) -> str:
    """A value as Python writes it, for messages; as safe and as bounded as `safe_text`."""
    try:
        text = str.__str__(_bounded_repr(limit).repr(value))
    except BaseException:
        text = _unsayable(value)
    return _clipped(text, limit)


def described(error: BaseException, limit: int = TEXT_CHARS) -> str:
    """An exception's type and what it says; of a group, those of its first members, too."""
    kind = type_name(error)
    if not _is_group(error):
        said = safe_text(error, limit)
        return _clipped(f"{kind}: {said}" if said else kind, limit)
    first = "; ".join(described(one, limit) for one in _leaves(error, _SHOWN_MEMBERS))
    message = safe_text(_GROUP.message.__get__(error), limit)
    return _clipped(f"{kind}: {message} ({first})", limit)


def type_name(value: object) -> str:
    """The name of the value's type."""
    return _clipped(_NAME(type(value)), TEXT_CHARS)


def traceback_text(error: BaseException, hidden: str = "") -> str:
    """The last lines of a traceback, for the author of the code that raised; without the first
    frames that are of the file `hidden`."""
    frames = error.__traceback__
    while hidden and frames is not None and frames.tb_frame.f_code.co_filename == hidden:
        frames = frames.tb_next
    try:
        lines = "".join(traceback.format_exception(type(error), error, frames)).splitlines()
    except BaseException:  # of the exception's own attributes
        return described(error)
    shown_lines = [_clipped(line, TEXT_CHARS) for line in lines[-TRACEBACK_LINES:]]
    return "\n".join(shown_lines)[-TRACEBACK_CHARS:]


def _leaves(error: BaseException, most: int) -> Iterator[BaseException]:
    """The first members of a group that are no groups, however deep they lie."""
    pending = [error]
    while pending and most:
        one = pending.pop()
        if _is_group(one):
            pending.extend(reversed(_GROUP.exceptions.__get__(one)))
        else:
            most -= 1
            yield one


def _is_group(error: BaseException) -> bool:
    # A container's image may have a Python that knows no groups.
    return _GROUP is not None and issubclass(type(error), _GROUP)


def _bounded_repr(limit: int) -> reprlib.Repr:
    bounded = reprlib.Repr()
    bounded.maxlevel = 8
    # Far enough for the end, not the middle, to be left out.
    bounded.maxstring = bounded.maxother = bounded.maxlong = 4 * limit
    bounded.maxlist = bounded.maxtuple = bounded.maxdict = max(8, limit // 4)
    bounded.maxset = bounded.maxfrozenset = bounded.maxdeque = bounded.maxarray = bounded.maxlist
    return bounded


def _unsayable(value: object) -> str:
    if type(value) is int:
        return f"a whole number of {value.bit_length():,} bits"
    return f"a {type_name(value)} that cannot be shown"


def _clipped(text: str, limit: int) -> str:
    """`text`, safe, and with an ellipsis where it was cut."""
    # Cut before it is looked at: it may have any length.
    text = utf8_text(text[: limit + 1]).replace("\0", "\N{SYMBOL FOR NULL}")
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."


# Values.


def finite_number(value: object) -> float:
    """`value` as a finite float: numbers, also of numpy and torch; no text.

    Raises `NotFiniteError`, whatever the value raises.
    """
    kind, why = type(value), ""
    if not issubclass(kind, (str, bytes, bytearray)):
        try:
            number = float(value)  # type: ignore[arg-type]
            if math.isfinite(number):
                return number
        except BaseException as error:
            if not issubclass(kind, (int, float)):
                why = f" ({described(error, 200)})"
    raise NotFiniteError(f"{shown(value)} is no finite number{why}")


def json_text(
    value: object,
    *,
    allow_nan: bool = False,
    most_bytes: int | None = None,
    depth: int = JSON_DEPTH,
) -> str:
    """`value` as JSON, in ASCII unless it has halves of surrogate pairs, which are replaced as by
    `utf8_text`. numpy and torch scalars and arrays are the numbers that they are.

    Raises `NotJsonError`, whatever the value raises, also for NaN and infinities (unless
    `allow_nan`), for more than `depth` containers in each other, and for more than `most_bytes`.
    """
    try:
        text = json.dumps(value, allow_nan=allow_nan, default=_as_plain)
    except RecursionError:
        raise NotJsonError(_too_deep(depth)) from None
    except MemoryError:
        raise
    except BaseException as error:
        said = safe_text(error, 500) if issubclass(type(error), (TypeError, ValueError)) else ""
        raise NotJsonError(said or described(error, 500)) from None
    if most_bytes is not None and len(text) > most_bytes:
        raise NotJsonError(f"{len(text):,} bytes of JSON; {most_bytes:,} at most")
    if _depth(text) > depth:
        raise NotJsonError(_too_deep(depth))
    if _SURROGATE.search(text):
        return utf8_text(json.dumps(json.loads(text), allow_nan=allow_nan, ensure_ascii=False))
    return text


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text that user code, or somebody outside, has written.

    Raises `NotJsonError` for everything that `json_text` would not have written: NaN and
    infinities, numbers beyond a float, more than `JSON_DEPTH` containers in each other.
    """
    try:
        written = text.decode() if isinstance(text, bytes) else text
        if _depth(written) > JSON_DEPTH:
            raise NotJsonError(_too_deep())
        value = json.loads(written, parse_constant=_refused_constant, parse_float=_parsed_float)
        if _SURROGATE.search(written) or not _is_utf8(written):
            value = json.loads(utf8_text(json.dumps(value, ensure_ascii=False)))
    except NotJsonError:
        raise
    except RecursionError:
        raise NotJsonError(_too_deep()) from None
    except (ValueError, TypeError) as error:
        raise NotJsonError(safe_text(error, 500)) from None
    return value


def _as_plain(value: Any) -> Any:
    for name in ("tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    raise TypeError(f"a {type_name(value)} is not JSON")


def _depth(text: str) -> int:
    """How deep containers lie in each other in a JSON text; in time linear in its length."""
    if text.count("[") + text.count("{") <= JSON_DEPTH:
        return 0
    brackets = _STRING.sub("", text).encode(errors="replace").translate(None, _OTHERS)
    return max(accumulate(map(_OPENS.__getitem__, brackets)), default=0)


def _too_deep(most: int = JSON_DEPTH) -> str:
    return f"more than {most} lists and dicts in each other"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused_constant(name: str) -> float:
    raise NotJsonError(f"{name} is no number that JSON has")


def _parsed_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotJsonError(f"{safe_text(text, 60)} is beyond the numbers that a float can be")
    return number
