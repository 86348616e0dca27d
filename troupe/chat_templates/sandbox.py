"""Jinja's sandbox as chat templates get it: what it offers, each part with its bound."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup

from troupe.chat_templates import TemplateLimitError
from troupe.chat_templates.metering import (
    CALL_WORK,
    LISTED,
    MADE,
    NODE_WORK,
    Meter,
)

_INTEGER_BITS: Final = 1024
_PRECISION: Final = 1000
# The longest text of a number: a float without an exponent.
_NUMBER_CHARS: Final = 400
# Parts of a dotted name such as `attribute="function.name"`.
_NAME_PARTS: Final = 32


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Methods of values that templates may call, by the type of the value.
_METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: _words(
        """
        capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii
        isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
        join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust
        rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
        """
    ),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    int: frozenset(["bit_length"]),
    float: frozenset(["is_integer"]),
}
# Filters that take no more time than their result is used for, or none that depends on sizes.
_SHALLOW: Final = _words(
    """
        count d default first items last length map reject rejectattr safe select selectattr
        """
)
_FILTERS: Final = _SHALLOW | _words(
    """
        abs attr batch capitalize center dictsort e escape float format indent int join list
        lower max min replace reverse round slice sort string sum title trim truncate unique
        upper
        """
)
_SHALLOW_TESTS: Final = _words(
    """
        boolean callable defined divisibleby escaped even false filter float integer iterable
        mapping none number odd sameas sequence string test true undefined
        """
)


# The parameters of these functions have the names of the filters' own.


def _replaced(s: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    text, old, new = str(s), str(old), str(new)
    return len(text) + len(new) * (len(text) // max(1, len(old)) + 1)


def _joined(value: Any, d: Any = "", attribute: Any = None) -> int:
    return len(d) * len(value) if isinstance(value, Sized) and isinstance(d, str) else 0


def _padded(value: Any, width: Any = 80, fillchar: Any = " ") -> int:
    return max(len(str(value)), _number(width))


def _indented(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    lines = len(str(s).splitlines()) + 2
    return len(str(s)) + lines * (len(width) if isinstance(width, str) else _number(width))


def _rounded(value: Any, precision: Any = 0, method: Any = "") -> int:
    if _number(precision) > _PRECISION:
        raise TemplateLimitError(f"a number is rounded to {precision} digits")
    return 0


def _comparisons(text: Any, *arguments: Any) -> int:
    """Return the work of comparing each character of `text` with each of the arguments'."""
    sizes = (len(one) for one in arguments if isinstance(one, str))
    return len(str(text)) * sum(sizes) // _COMPARISONS_PER_UNIT


def _check_integer(what: str, bits: int) -> None:
    if bits > _INTEGER_BITS:
        raise TemplateLimitError(f"{what} would make an integer of {bits} bits")


def _number(value: Any) -> int:
    return abs(int(value)) if isinstance(value, int | float) else 0


# What a filter or method makes at most, in characters or items, by its arguments.
_GROWTH: Final[Mapping[str, Callable[..., int]]] = {
    "batch": lambda value, linecount=1, fill_with=None: _number(linecount),
    "center": _padded,
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * _number(tabsize),
    "indent": _indented,
    "join": _joined,
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "round": _rounded,
    "slice": lambda value, slices=1, fill_with=None: _number(slices),
    "zfill": _padded,
}
# Methods and filters that may compare every character of a text with every one of their argument:
# sets of characters, and searches from the end, for which Python has no linear algorithm.
_MULTIPLYING: Final = _words("lstrip rfind rindex rpartition rsplit rstrip strip trim")
_COMPARISONS_PER_UNIT: Final = 8
# Filters that compare an item with about 20 others.
_SORTING: Final = frozenset({"dictsort", "sort", "unique", "min", "max"})
# Filters that look up dotted names in every item.
_NAMING: Final = _words("join map max min rejectattr selectattr sort sum unique")
_ESCAPING: Final = frozenset({"e", "escape"})
# Characters that one may become when it is escaped for HTML.
_ESCAPED: Final = 6
# Keyword arguments that Jinja adds to calls.
_PASSED: Final = frozenset({"_block_vars", "_loop_vars"})
_CONVERSION: Final = re.compile(r"%(?:\([^)]*\))?([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?")
_WIDTH: Final = re.compile(r"\d+")


class _Formatter(SandboxedFormatter):
    """`str.format` whose widths and texts are bounded."""

    def __init__(self, environment: ChatEnvironment) -> None:
        super().__init__(environment)
        self._meter = environment.meter

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._meter.make("`format`", self._meter.read(value, as_text=True))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = sum(map(_digits, _WIDTH.findall(format_spec)))
        self._meter.make("`format`", self._meter.read(value, as_text=True) + widths)
        return super().format_field(value, format_spec)


def _digits(text: str) -> int:
    """The number that a format has as a width; one too long to be read is larger than any bound."""
    return int(text) if len(text) < 20 else 10**20


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant wrote; it changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _marked(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace without private attributes, as transformers offers it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        found = dict(*rest, **kwargs)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the private attribute {name!r}")


class _Dict:
    """The function `dict` of a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Transformers' sandbox of Jinja with a meter. It offers what chat templates use."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "-", "/", "//"})

    def __init__(self, meter: Meter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=meter.shown,
            optimized=False,  # nothing is computed before its work is counted
        )
        self.meter = meter
        known = {name: self._filter(name, self.filters[name]) for name in _FILTERS}
        known["tojson"] = self._tojson
        known["format"] = self._format_filter
        self.filters = known | meter.template_filters()
        self.tests = {name: self._test(name, test) for name, test in self.tests.items()}
        self.globals["raise_exception"] = self._raise_exception
        self.globals["strftime_now"] = self._strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def call(  # type: ignore[override]
        __self,  # noqa: N805 (as in Jinja: a template may call with the keyword `self`)
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        meter = __self.meter
        meter.charge(CALL_WORK + MADE * (len(args) + len(kwargs)))
        # Jinja passes the variables of loops and blocks along.
        given = {name: kwargs[name] for name in kwargs.keys() - _PASSED} if kwargs else kwargs
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType | MethodType) and not isinstance(owner, _OBJECTS):
            args = tuple(map(meter.listed, args))
            __self._check_method(owner, __obj.__name__, args, given)
        elif isinstance(__obj, _Dict) or isinstance(owner, _OBJECTS) or __obj is _Namespace:
            args = tuple(map(meter.listed, args))
            for one in (*args, *given.values()):
                meter.charge(MADE * meter.read(one))
        result = super().call(__context, __obj, *args, **kwargs)
        if type(result) is list:
            meter.charge(LISTED * len(result))
        return result

    def _check_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Count a call of a method of a text, list, mapping or number."""
        kind = next((one for one in _METHODS if isinstance(owner, one)), None)
        if kind is None or name not in _METHODS[kind]:
            raise TemplateLimitError(f"the method {type(owner).__name__}.{name} is not offered")
        if kind is dict and name != "copy":
            for one in args[:1]:
                self.meter.key(one)
            return
        sizes = self.meter.read(owner) + sum(
            self.meter.read(one) for one in (*args, *kwargs.values())
        )
        if isinstance(owner, Markup):
            sizes *= _ESCAPED
        growth = _GROWTH.get(name)
        if name in _MULTIPLYING:
            self.meter.charge(_comparisons(owner, *args, *kwargs.values()))
        if growth is None:
            self.meter.charge(MADE * sizes)
        elif name == "join":
            items, *_ = args
            self.meter.make(f"`{name}`", sizes + _joined(items, owner))
        else:
            self.meter.make(f"`{name}`", sizes + growth(owner, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return self._format(left, right)
        if isinstance(left, int) and isinstance(right, int):
            bits = max(left.bit_length(), right.bit_length())
            if operator == "*":
                bits = left.bit_length() + right.bit_length()
            elif operator == "**" and right > 0:
                bits = left.bit_length() * right
            _check_integer(f"`{operator}`", bits)
        elif operator == "+" and isinstance(left, str | list | tuple):
            if isinstance(right, str | list | tuple):
                escaped = _ESCAPED if isinstance(left, Markup) or isinstance(right, Markup) else 1
                self.meter.make("`+`", escaped * (len(left) + len(right)))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int):
                    self.meter.make("`*`", len(one) * max(0, times))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None
        text, by_mapping = value.__self__, value.__name__ == "format_map"
        if type(text) is not str:
            raise TemplateLimitError("`format` of a text that is marked as safe is not offered")

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.meter.make("`format`", len(text))
            fields = args[0] if by_mapping else kwargs
            return _Formatter(self).vformat(text, () if by_mapping else args, fields)

        return bounded

    def _format(self, text: str, values: Any) -> str:
        """`text % values`, bounded by the widths of its conversions and the texts of its values."""
        found = _CONVERSION.findall(text)
        if any("*" in part for conversion in found for part in conversion):
            raise TemplateLimitError("a format takes a width from a value")
        widths = sum(_digits(one) for _, width, digits in found for one in (width, digits) if one)
        size = self.meter.read(values, as_text=True)
        size *= _ESCAPED if isinstance(text, Markup) else 1
        self.meter.make("`%`", len(text) + widths + len(found) * (size + _NUMBER_CHARS))
        made: str = text % values
        return made

    def _format_filter(self, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TemplateError("`format` takes positional or keyword arguments, not both")
        return self._format(str(value), kwargs or args)

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with bounds on what it reads and makes."""
        meter, growth = self.meter, _GROWTH.get(name)
        skip = int(hasattr(function, "jinja_pass_arg"))
        short = not skip and growth is None and name not in _ESCAPING
        named = name in _NAMING

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            meter.charge(NODE_WORK + MADE * len(args))
            if short and len(args) == 1 and type(args[0]) is str and not kwargs:
                meter.charge(MADE * len(args[0]))  # the common case, in a tenth of the time
            elif name not in _SHALLOW:
                args = (*args[:skip], *map(meter.listed, args[skip:]))
                values = (*args[skip:], *kwargs.values())
                size = sum(meter.read(one, as_text=name in _AS_TEXT) for one in values)
                most = size + (0 if growth is None else growth(*args[skip:], **kwargs))
                meter.make(f"the filter `{name}`", most * (_ESCAPED if name in _ESCAPING else 1))
                if name == "sum":
                    times = 1 + (len(values[0]) if isinstance(values[0], Sized) else 0)
                    meter.charge(times * size)
                if name in _SORTING:
                    meter.charge(20 * size)
                if name in _MULTIPLYING:
                    meter.charge(_comparisons(*values))
            if named:
                for one in (*args[skip + 1 :], *kwargs.values()):
                    if isinstance(one, str) and one.count(".") >= _NAME_PARTS:
                        raise TemplateLimitError(f"a name has more than {_NAME_PARTS} parts")
            result = function(*args, **kwargs)
            if type(result) is list:
                meter.charge(LISTED * len(result))
            elif type(result) is int:
                _check_integer(f"the filter `{name}`", result.bit_length())
            return meter.each(result) if isinstance(result, Iterator) else result

        return bounded

    def _test(self, name: str, function: Any) -> Any:
        if name in _SHALLOW_TESTS:
            return function
        meter, skip = self.meter, int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def bounded(*args: Any) -> Any:
            args = (*args[:skip], *map(meter.listed, args[skip:]))
            for one in args[skip:]:
                meter.read(one)
            return function(*args)

        return bounded

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """transformers' filter of this name."""
        # Every item may stand on a line of its own, as deep as items are nested.
        size, depth = self.meter.read(value, as_text=True), _depth(value) if indent else 0
        step = len(indent) if isinstance(indent, str) else _number(indent or 0)
        between = sum(len(one) for one in separators or () if isinstance(one, str))
        self.meter.make("`tojson`", size * (1 + between) + size // 2 * depth * step)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _raise_exception(self, message: Any) -> None:
        self.meter.make("`raise_exception`", self.meter.read(message, as_text=True))
        raise TemplateError(str(message))

    def _strftime_now(self, format: str) -> str:
        # A format may have widths; the C library's buffer has at most 256 times its length.
        self.meter.make("`strftime_now`", 256 * len(format))
        return datetime.now().strftime(format)


_AS_TEXT: Final = _words(
    """
        capitalize center e escape format indent join lower replace string title trim truncate
        upper
        """
)
# Objects of Jinja and of this module whose methods templates may call.
_OBJECTS: Final = (Cycler, Extension, LoopContext, _Dict, ChatEnvironment)


def _depth(value: Any) -> int:
    """How deep lists and mappings are nested in `value`."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | tuple | dict)]:
        depth += 1
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth
