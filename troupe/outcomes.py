"""Safe conversion of user code's values and exceptions to text, numbers and JSON.

Workflows, environments, tools, rewards and metric sinks are user code. A value that they return may
raise when it is inspected, and protobuf or UTF-8 may not be able to carry its text. Services
inspect such values only through this module, which raises only its own `ValueError`s.
`troupe.user_code` calls the code itself. Standard library only.
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
"""Maximum characters of the text of an exception or a value."""
TRACEBACK_LINES: Final = 30
TRACEBACK_CHARS: Final = 16 * 2**10
JSON_DEPTH: Final = 200
"""Maximum nesting of lists and dicts. Serializers give up at different depths (pydantic at 255,
`json` near 1000, less the caller's stack); all of them work up to this depth."""
JSON_BYTES: Final = 256 * 1024
"""Longest JSON in a column of a sample; arrays may be larger."""

# Accessors that no subclass or metaclass can override.
_NAME: Final = type.__dict__["__name__"].__get__
_GROUP: Final[Any] = getattr(builtins, "BaseExceptionGroup", None)
# Members of an exception group that are described.
_SHOWN_MEMBERS: Final = 5
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
# A JSON string, also an unterminated one: every quote starts a match, so the time is linear.
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_OPENS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS: Final = bytes(set(range(256)) - _OPENS.keys())


class NotFiniteError(ValueError):
    """The value is not a finite number."""


class NotJsonError(ValueError):
    """The value or text is not JSON."""


class Interruption(BaseException):
    """An interruption that Troupe raises inside user code that blocks, or that a person interrupts;
    it passes through all containment of exceptions."""


# Texts.


def utf8_text(text: str) -> str:
    """Return `text` so that UTF-8 can encode it: join surrogate pairs, make lone ones U+FFFD."""
    text = str.__str__(text)  # of a subclass, its characters
    if text.isascii():  # known without reading it
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def safe_text(value: object, limit: int = TEXT_CHARS) -> str:
    """Return `str(value)` as text that protobuf, JSON, Redis and logs accept: UTF-8 without NUL, at
    most `limit` characters; the type's name if `str` raises."""
    kind = type(value)
    try:
        if issubclass(kind, str):
            text = str.__str__(value)  # type: ignore[arg-type]
        elif kind in (dict, list, tuple, set, frozenset):
            text = _bounded_repr(limit).repr(value)
        else:
            text = str.__str__(str(value))
    except BaseException:
        text = _fallback_text(value)
    return _clipped(text, limit)


def shown(value: object, limit: int = 60) -> str:
    """Return `repr(value)` for messages, as safe and bounded as `safe_text`."""
    try:
        text = str.__str__(_bounded_repr(limit).repr(value))
    except BaseException:
        text = _fallback_text(value)
    return _clipped(text, limit)


def described(error: BaseException, limit: int = TEXT_CHARS) -> str:
    """Return type and message of an exception; for a group, also of its first members."""
    kind = type_name(error)
    if not _is_group(error):
        message = safe_text(error, limit)
        return _clipped(f"{kind}: {message}" if message else kind, limit)
    first = "; ".join(described(one, limit) for one in _leaves(error, _SHOWN_MEMBERS))
    message = safe_text(_GROUP.message.__get__(error), limit)
    return _clipped(f"{kind}: {message} ({first})", limit)


def type_name(value: object) -> str:
    """Return the name of the type of `value`."""
    return _clipped(_NAME(type(value)), TEXT_CHARS)


def traceback_text(error: BaseException, hidden: str = "") -> str:
    """Return the last lines of a traceback, without leading frames of the file `hidden`."""
    frames = error.__traceback__
    while hidden and frames is not None and frames.tb_frame.f_code.co_filename == hidden:
        frames = frames.tb_next
    try:
        lines = "".join(traceback.format_exception(type(error), error, frames)).splitlines()
    except BaseException:  # raised by the exception's own attributes
        return described(error)
    shown_lines = [_clipped(line, TEXT_CHARS) for line in lines[-TRACEBACK_LINES:]]
    return "\n".join(shown_lines)[-TRACEBACK_CHARS:]


def _leaves(error: BaseException, most: int) -> Iterator[BaseException]:
    """Yield the first `most` members of a group that are not groups themselves, at any depth."""
    pending = [error]
    while pending and most:
        one = pending.pop()
        if _is_group(one):
            pending.extend(reversed(_GROUP.exceptions.__get__(one)))
        else:
            most -= 1
            yield one


def _is_group(error: BaseException) -> bool:
    return _GROUP is not None and issubclass(type(error), _GROUP)


def _bounded_repr(limit: int) -> reprlib.Repr:
    bounded = reprlib.Repr()
    bounded.maxlevel = 8
    # Larger than `limit`, so that the clipping cuts the end and not `Repr` the middle.
    bounded.maxstring = bounded.maxother = bounded.maxlong = 4 * limit
    bounded.maxlist = bounded.maxtuple = bounded.maxdict = max(8, limit // 4)
    bounded.maxset = bounded.maxfrozenset = bounded.maxdeque = bounded.maxarray = bounded.maxlist
    return bounded


def _fallback_text(value: object) -> str:
    if type(value) is int:
        return f"an integer of {value.bit_length():,} bits"
    return f"a {type_name(value)} that cannot be shown"


def _clipped(text: str, limit: int) -> str:
    """Return `text` as UTF-8 without NUL, cut to `limit` with an ellipsis."""
    # Cut first: the text may have any length.
    text = utf8_text(text[: limit + 1]).replace("\0", "\N{SYMBOL FOR NULL}")
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."


# Values.


def finite_number(value: object) -> float:
    """Return a Python, numpy or torch number as a finite float. Raises `NotFiniteError`."""
    kind, why = type(value), ""
    if not issubclass(kind, (str, bytes, bytearray)):
        try:
            number = float(value)  # type: ignore[arg-type]
            if math.isfinite(number):
                return number
        except BaseException as error:
            if not issubclass(kind, (int, float)):
                why = f" ({described(error, 200)})"
    raise NotFiniteError(f"{shown(value)} is not a finite number{why}")


def json_text(
    value: object,
    *,
    allow_nan: bool = False,
    depth: int = JSON_DEPTH,
) -> str:
    """Return `value` as JSON, numpy and torch scalars and arrays as numbers. The text is ASCII
    unless the value has surrogates, which are handled as by `utf8_text`.

    Raises `NotJsonError`, also for NaN and infinities (unless `allow_nan`) and for nesting deeper
    than `depth`.
    """
    try:
        text = json.dumps(value, allow_nan=allow_nan, default=_as_plain)
    except RecursionError:
        raise NotJsonError(_too_deep(depth)) from None
    except MemoryError:
        raise
    except BaseException as error:
        plain = issubclass(type(error), (TypeError, ValueError))
        message = safe_text(error, 500) if plain else ""
        raise NotJsonError(message or described(error, 500)) from None
    if _depth(text) > depth:
        raise NotJsonError(_too_deep(depth))
    if _SURROGATE.search(text):
        return utf8_text(json.dumps(json.loads(text), allow_nan=allow_nan, ensure_ascii=False))
    return text


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text from an untrusted writer.

    Raises `NotJsonError` for values that `json_text` would not write: NaN and infinities, numbers
    beyond a float, nesting deeper than `JSON_DEPTH`.
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
    """Return the nesting of lists and dicts in a JSON text; 0 if small. Linear in its length."""
    if text.count("[") + text.count("{") <= JSON_DEPTH:
        return 0
    brackets = _STRING.sub("", text).encode(errors="replace").translate(None, _OTHERS)
    return max(accumulate(map(_OPENS.__getitem__, brackets)), default=0)


def _too_deep(most: int = JSON_DEPTH) -> str:
    return f"lists and dicts are nested deeper than {most} levels"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused_constant(name: str) -> float:
    raise NotJsonError(f"{name} is not a JSON number")


def _parsed_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotJsonError(f"{safe_text(text, 60)} exceeds the range of a float")
    return number
