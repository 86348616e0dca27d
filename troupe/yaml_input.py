"""The reading of users' YAML and JSON text into plain values, with bounds on size.

A few bytes of YAML can expand beyond all memory: an alias repeats its anchor, a merge key (`<<`)
copies it, one long literal makes an integer that takes minutes to parse. So depth, values,
characters (aliases expanded) and digits are counted while nodes are composed, before values are
built.

`on`, `off`, `yes` and `no`, booleans in YAML 1.1 and text in YAML 1.2, are read as `Word`; the
field decides. Keys are always text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor

try:  # libyaml scans ten times as fast; PyYAML's wheels have it
    from yaml import CSafeLoader as _Scanner
except ImportError:
    from yaml import SafeLoader as _Scanner  # type: ignore[assignment]

T = TypeVar("T")

MAX_BYTES: Final = 1 << 20
MAX_VALUES: Final = 200_000
# Of YAML, aliases expanded and keys counted: Python composes each (20 microseconds), and no other
# thread runs meanwhile for long. JSON is parsed in C.
MAX_NODES: Final = 30_000
MAX_DEPTH: Final = 100
# Characters of a number; 64 bits have 20 decimal or 64 binary digits.
MAX_DIGITS: Final = 80

# PyYAML's composer, whose methods replace the ones of libyaml's loader, which cannot count.
_COMPOSER: Final[Any] = Composer
_TAG: Final = "tag:yaml.org,2002:"
_TEXT: Final = f"{_TAG}str"
_MERGE: Final = f"{_TAG}merge"
_WORD: Final = "!word"
# Scalars that are read as text where they are keys.
_KEYS: Final = frozenset(f"{_TAG}{kind}" for kind in ("bool", "int", "float", "null", "timestamp"))
_IN_FILES: Final = "Keep data out of it: let `tasks.source` read them from files."
_QUOTE: Final = "Quote the value to make it a string."


class UnreadableText(ValueError):
    """Text that is not YAML or JSON, or is too large: place, problem and remedy."""

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(f"{where}: {problem}. {remedy}")
        self.where, self.problem, self.remedy = where, problem, remedy


class Word(str):
    """An unquoted `on`, `off`, `yes` or `no`: text, or a boolean of YAML 1.1."""

    __slots__ = ()

    @property
    def boolean(self) -> bool:
        """The value in YAML 1.1."""
        return self.lower() in ("on", "yes")


def read_file(path: Path) -> str:
    """Return the text of a file of at most `MAX_BYTES`. Raises `UnreadableText` with the path."""
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise UnreadableText(where, f"cannot be read: {reason}", "Check the path.") from error
    if len(data) > MAX_BYTES:
        raise _too_long(where)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableText(
            where, f"is not UTF-8 text: {error.reason}", "Save it as UTF-8."
        ) from error


def read_text(text: str, source: str) -> Any:
    """Return the plain values of YAML or JSON text; `source` names the text in errors.

    Boolean words of YAML 1.1 are read as `Word`. Raises `UnreadableText`, also for duplicate keys.
    """
    if len(text) > MAX_BYTES:
        raise _too_long(source)
    if text.lstrip().startswith("{"):
        try:  # services exchange JSON; this is a hundred times as fast
            return _measured(json.loads(text, object_pairs_hook=each_once, parse_int=_int), source)
        except UnreadableText:
            raise
        except RecursionError as error:
            raise _too_deep(source) from error
        except ValueError:
            pass  # reading it as YAML reports the line
    return _measured(_reading(lambda: yaml.load(text, Loader=_Loader), source), source)


def read_value(text: str, source: str) -> Any:
    """Do the same as `read_text`, with booleans of YAML 1.1, for arguments of any shape."""
    return as_yaml_1_1(read_text(text, source))


def read_json_object(text: str, source: str) -> dict[str, Any]:
    """Return the object in strict JSON text. Raises `UnreadableText`."""
    if len(text) > MAX_BYTES:
        raise _too_long(source)
    try:
        found = json.loads(text, parse_int=_int, parse_constant=_no_constant)
    except RecursionError as error:
        raise _too_deep(source) from error
    except ValueError as error:
        raise UnreadableText(source, f"is not JSON: {error}", "Correct its syntax.") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise UnreadableText(source, f"is a {kind}, not an object", 'Write `{"name": value}`.')
    measure(found, source)
    return found


def as_yaml_1_1(value: Any) -> Any:
    """Return the value with each `Word` converted to a boolean."""
    if isinstance(value, Word):
        return value.boolean
    if isinstance(value, dict):
        return {key: as_yaml_1_1(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_yaml_1_1(one) for one in value]
    return value


def measure(value: Any, source: str) -> None:
    """Raise `UnreadableText` for a value that is too deep or too large, contains itself, or has
    text that cannot be encoded."""
    left, count = [(value, 1)], 0
    while left:
        here, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise _too_deep(source)
        if count > MAX_VALUES:
            raise _too_many(source)
        if isinstance(here, dict):
            left.extend((one, depth + 1) for one in here.values())
            left.extend((key, depth) for key in here if isinstance(key, str))
        elif isinstance(here, list | tuple):
            left.extend((one, depth + 1) for one in here)
        elif isinstance(here, str) and not here.isascii():
            try:
                here.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UnreadableText(
                    source,
                    f"has half of a surrogate pair (U+{ord(here[error.start]):04X}), which no "
                    "encoding can write",
                    "Remove it.",
                ) from error


def _measured(value: Any, source: str) -> Any:
    measure(value, source)
    return value


def _reading(read: Callable[[], T], source: str) -> T:
    try:
        return read()
    except _Limit as limit:
        raise limit.error(source) from limit
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = getattr(error, "problem", None) or "not valid YAML"
        remedy = _QUOTE if isinstance(error, _TooLong) else "Correct the YAML syntax there."
        raise UnreadableText(where, str(problem), remedy) from error
    except UnicodeEncodeError as error:
        raise UnreadableText(source, "has half of a surrogate pair", "Remove it.") from error
    except (ValueError, OverflowError) as error:  # conversions: 2026-13-45 is no date
        raise UnreadableText(source, str(error), _QUOTE) from error
    except (LookupError, AttributeError, TypeError) as error:
        # Raised by PyYAML's constructors for values with a wrong tag.
        raise UnreadableText(source, "has a value that does not fit its tag", _QUOTE) from error
    except RecursionError as error:
        raise _too_deep(source) from error


class _Limit(Exception):
    """A bound was exceeded while nodes were composed; `error` makes the error of a source."""

    def __init__(self, error: Callable[[str], UnreadableText]) -> None:
        super().__init__()
        self.error = error


class _TooLong(ConstructorError):
    """A number has more than `MAX_DIGITS` characters."""


class _Loader(_Scanner):
    """A YAML loader that counts nodes while they are composed."""

    check_node = Composer.check_node
    get_node = Composer.get_node
    get_single_node = Composer.get_single_node
    compose_document = Composer.compose_document
    compose_scalar_node = Composer.compose_scalar_node
    compose_sequence_node = Composer.compose_sequence_node

    def __init__(self, text: str) -> None:
        super().__init__(text)
        _COMPOSER.__init__(self)
        self._depth = self._nodes = self._characters = 0
        # By anchor: nodes and characters that an alias adds.
        self._sizes: dict[str, tuple[int, int]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node and count it."""
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = _COMPOSER.compose_node(self, parent, index)
            if (size := self._sizes.get(str(event.anchor))) is None:
                raise _Limit(_contains_itself)
            self._add(*size)
            return node
        nodes, characters = self._nodes, self._characters
        self._add(1, len(event.value) if isinstance(event, yaml.ScalarEvent) else 0)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Limit(_too_deep)
        node = _COMPOSER.compose_node(self, parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._nodes - nodes, self._characters - characters
        return node

    def _add(self, nodes: int, characters: int) -> None:
        self._nodes += nodes
        self._characters += characters
        if self._nodes > MAX_NODES:
            raise _Limit(_too_many_nodes)
        if self._characters > MAX_BYTES:
            raise _Limit(_too_long)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; refuses duplicate keys, of which PyYAML keeps the last value.

        Checked before construction, when `<<` adds keys that may be duplicates.
        """
        node: yaml.MappingNode = _COMPOSER.compose_mapping_node(self, anchor)
        seen: set[tuple[bool, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag in _KEYS or key.tag == _WORD:
                key.tag = _TEXT
            name = (key.tag == _MERGE, key.value)
            if name in seen:
                problem = f"`{key.value}` appears twice; keys must be unique"
                raise ComposerError(None, None, problem, key.start_mark)
            seen.add(name)
        return node


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> str:
    text: str = loader.construct_scalar(node)
    if len(text) > MAX_DIGITS:
        raise _TooLong(
            None,
            None,
            f"a number of {len(text):,} characters; none may have more than {MAX_DIGITS}",
            node.start_mark,
        )
    if ":" in text:
        raise ValueError(f"{text!r} is not a number")
    return text


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    _scalar(loader, node)
    return SafeConstructor.construct_yaml_int(loader, node)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    _scalar(loader, node)
    return SafeConstructor.construct_yaml_float(loader, node)


def _construct_word(loader: _Loader, node: yaml.ScalarNode) -> Word:
    return Word(loader.construct_scalar(node))


_Loader.add_constructor(f"{_TAG}int", _construct_int)
_Loader.add_constructor(f"{_TAG}float", _construct_float)
_Loader.add_constructor(_WORD, _construct_word)
# Types of plain scalars: as in YAML 1.1, except `Word`, no base-60 numbers (12:30 is not 750),
# and `1e-5` is a number.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    (f"{_TAG}bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_WORD, r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "yYnNoO"),
    (f"{_TAG}null", r"~|null|Null|NULL|", "~nN\0"),
    (_MERGE, r"<<", "<"),
    (
        f"{_TAG}int",
        r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)",
        "-+0123456789",
    ),
    (
        f"{_TAG}float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    (
        f"{_TAG}timestamp",
        r"\d{4}-\d\d-\d\d"
        r"|\d{4}-\d\d?-\d\d?(?:[Tt]|[ \t]+)\d\d?:\d\d:\d\d(?:\.\d*)?"
        r"(?:[ \t]*(?:Z|[-+]\d\d?(?::\d\d)?))?",
        "0123456789",
    ),
):
    _Loader.add_implicit_resolver(
        _tag,
        re.compile(rf"^(?:{_pattern})\Z"),
        ["" if first == "\0" else first for first in _first],
    )


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object (`object_pairs_hook`). Raises ValueError for a duplicate name."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name[:80]!r} appears twice")
        made[name] = value
    return made


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} characters")
    return int(text)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _too_long(source: str) -> UnreadableText:
    return UnreadableText(source, f"is longer than {MAX_BYTES:,} bytes", _IN_FILES)


def _too_many(source: str) -> UnreadableText:
    return UnreadableText(source, f"stands for more than {MAX_VALUES:,} values", _IN_FILES)


def _too_many_nodes(source: str) -> UnreadableText:
    return UnreadableText(source, f"has more than {MAX_NODES:,} keys and values", _IN_FILES)


def _too_deep(source: str) -> UnreadableText:
    return UnreadableText(
        source,
        f"is nested too deeply (more than {MAX_DEPTH} levels)",
        "Start from an example; `troupe job schema` lists the fields.",
    )


def _contains_itself(source: str) -> UnreadableText:
    return UnreadableText(source, "contains itself through an alias", "Remove the alias.")
