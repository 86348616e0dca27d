"""`@troupe.reward` and `@troupe.tool`: a function that says what its calls cost.

The function stays what it was; a `Declaration` is attached to it. Jobs and deployments read it.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, overload


class NotJson(Exception):
    """`where` in a signature stands `what`, which cannot be passed as JSON by keyword."""

    def __init__(self, where: str, what: object, message: str, remedy: str) -> None:
        super().__init__(message)
        self.where, self.what, self.message, self.remedy = where, what, message, remedy


def check_parameters(function: Callable[..., Any]) -> None:
    """Every parameter can be given by keyword, as what JSON has. Raises `NotJson`."""
    hints = _hints(function)
    for parameter in inspect.signature(function).parameters.values():
        optional = parameter.default is not parameter.empty
        if parameter.kind is parameter.POSITIONAL_ONLY and not optional:
            raise NotJson(
                parameter.name,
                str(parameter),
                "can only be given by position",
                "Arguments come by name: remove the `/`.",
            )
        hint = hints.get(parameter.name, Any)
        if not _json(hint):
            raise NotJson(
                parameter.name,
                _shown(hint),
                "is nothing that JSON has",
                "Use str, int, float, bool, None, list, dict, Literal or TypedDict.",
            )


def check_reward(function: Callable[..., Any]) -> None:
    """What it returns, where it says so, is a number or a dict of numbers. Raises `NotJson`."""
    returned = _hints(function).get("return", Any)
    if not _scores(returned):
        raise NotJson(
            "return",
            _shown(returned),
            "is no reward",
            "Return a finite float, or a dict of them by agent: `-> dict[str, float]`.",
        )


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of an object of the function's arguments, of which `check_parameters` thinks
    well."""
    # Takes a tenth of a second to import, which no sandbox needs.
    from pydantic import ConfigDict, Field, create_model

    hints = _hints(function)
    fields: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias: models have no fields that begin with an underscore or shadow a method.
        fields[f"argument_{len(fields)}"] = (hints.get(name, Any), Field(default, alias=name))
    model = create_model(
        "Arguments", __config__=ConfigDict(extra="allow" if more else "forbid"), **fields
    )
    return _plain(model.model_json_schema())


def _json(hint: Any) -> bool:
    """Whether values of this type arrive as they are: nothing converts arguments."""
    if hint in (Any, object, None, type(None), str, int, float, bool, list, dict):
        return True
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return all(value is None or isinstance(value, str | int | bool) for value in of)
    if origin is typing.Annotated:
        return _json(of[0])
    if origin in (typing.Union, types.UnionType):
        return all(map(_json, of))
    if typing.is_typeddict(hint):
        return all(map(_json, typing.get_type_hints(hint).values()))
    if origin in (dict, Mapping, MutableMapping):
        return of[0] is str and _json(of[1])
    if origin in (list, Sequence, Iterable):
        return all(map(_json, of))
    if origin in (typing.Required, typing.NotRequired):
        return _json(of[0])
    return isinstance(hint, typing.TypeVar)


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Without the titles, which say what the names say."""
    found.pop("title", None)
    for entry in found.get("properties", {}).values():
        entry.pop("title", None)
    found.setdefault("properties", {})
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Its type hints, resolved; none where one names what is not there (a `TYPE_CHECKING`
    import), for that tells nothing about JSON."""
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _scores(hint: Any) -> bool:
    if hint is Any or hint in (None, type(None)):
        return hint is Any
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _scores(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        # None among them: nothing to add for this one.
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return bool(parts) and all(map(_scores, parts))
    if isinstance(origin or hint, type):
        kind = origin or hint
        if issubclass(kind, Mapping):
            of = typing.get_args(hint)
            return not of or (of[0] is str and _scores(of[1]))
        return hasattr(kind, "__float__") and not issubclass(kind, bool)
    return True  # a type variable and the like: it shows at the call


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["reward", "tool"]

ATTRIBUTE: Final = "__troupe__"
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
ARGUMENT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
SANDBOXES: Final = ("process", "bubblewrap", "container")
# The least that a number may be.
_LEAST: Final = {
    "cores": 0,
    "max_cores": 0,
    "memory_mib": 0,
    "gpus": 0,
    "retries": 0,
    "max_concurrency": 0,
    "processes": 1,
    "disk_mib": 1,
}


class DeclarationError(TypeError):
    """A declaration that cannot work: `field` of it is `value`."""

    def __init__(self, function: str, field: str, value: object, message: str, remedy: str) -> None:
        super().__init__(f"{function}: {field} = {value!r} {message}. {remedy}")
        self.function, self.field, self.value = function, field, value
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class Declaration:
    """What a function says of itself. `costs` holds what was said and nothing else, by the names
    that a job's `rewards` and `tools` have for it."""

    kind: Kind
    name: str
    version: str
    description: str
    costs: Mapping[str, Any]
    function: Callable[..., Any] = field(repr=False)

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments, derived from the type hints."""
        return schema(self.function)

    def check(self) -> None:
        """Raises `DeclarationError` for a signature that cannot work."""
        try:
            check_parameters(self.function)
            if self.kind == "reward":
                check_reward(self.function)
        except NotJson as error:
            raise DeclarationError(
                self.name, error.where, error.what, error.message, error.remedy
            ) from error


def declaration_of(function: Any) -> Declaration | None:
    """What a decorated function declared; None for any other object."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None


class Costs(TypedDict, total=False):
    """What a call takes, by the names and with the meaning of a job's `rewards` and `tools`
    (docs/job-reference.md). A job that names another value overrides it."""

    timeout_seconds: float
    memory_mib: int
    max_concurrency: int
    retries: int
    cores: int
    max_cores: int
    parallel_fraction: float
    expected_seconds: float
    seconds_per: dict[str, float]
    gpus: int
    quota: str
    sandbox: str
    processes: int
    disk_mib: int


class ToolCosts(Costs, total=False):
    """Those of tools, which may keep files and processes between the calls of a trajectory."""

    stateful: bool


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(
    *, name: str | None = None, version: str = "1", **costs: Unpack[Costs]
) -> Callable[[F], F]: ...
def reward(
    function: Any = None, /, *, name: str | None = None, version: str = "1", **costs: Any
) -> Any:
    """Declares a reward: a function that returns a finite number, or a dict of them by agent.

    Used bare, or with what its calls take (`Costs`). In a job it is called with the keywords
    `query`, `turns` and `rewards`. `name` (default: the function's) and `version` are those under
    which it is deployed. Raises `DeclarationError`.
    """
    return _decorator("reward", Costs, function, name, version, costs)


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *, name: str | None = None, version: str = "1", **costs: Unpack[ToolCosts]
) -> Callable[[F], F]: ...
def tool(
    function: Any = None, /, *, name: str | None = None, version: str = "1", **costs: Any
) -> Any:
    """Declares a tool: a function of JSON arguments that agents may call.

    Used bare, or with what its calls take (`ToolCosts`). The parameters' type hints and the
    docstring are what a model is told of it (`Tools.definitions`). Raises `DeclarationError`.
    """
    return _decorator("tool", ToolCosts, function, name, version, costs)


def _decorator(
    kind: Kind, known: Any, function: Any, name: str | None, version: str, costs: dict[str, Any]
) -> Any:
    def declare(target: F) -> F:
        if not callable(target):
            raise DeclarationError(
                kind, "function", target, "cannot be called", f"Decorate a function: @{kind}."
            )
        called = getattr(target, "__name__", type(target).__name__)
        names = known.__required_keys__ | known.__optional_keys__
        for unknown in costs.keys() - names:
            raise DeclarationError(
                called,
                unknown,
                costs[unknown],
                f"is nothing that a {kind} declares",
                f"Known: {', '.join(sorted(names))}.",
            )
        chosen = called if name is None else name
        _check(called, chosen, version, costs)
        text = inspect.cleandoc(target.__doc__ or "")
        made = Declaration(kind, chosen, version, text, dict(costs), target)
        made.check()
        setattr(target, ATTRIBUTE, made)
        return target

    return declare if function is None else declare(function)


def _check(function: str, name: object, version: object, costs: Mapping[str, Any]) -> None:
    def refuse(field: str, value: object, message: str, remedy: str) -> None:
        raise DeclarationError(function, field, value, message, remedy)

    if not isinstance(name, str) or not NAME.fullmatch(name):
        refuse("name", name, "is no name", "Use letters, digits, '_', '-' and '.'.")
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        refuse("version", version, "is no version", 'Write a short text, for example "1".')
    for key, value in costs.items():
        if key in _LEAST and (
            not isinstance(value, int) or isinstance(value, bool) or value < _LEAST[key]
        ):
            refuse(key, value, f"is not a whole number from {_LEAST[key]} on", "Mend it.")
    seconds = costs.get("timeout_seconds", 1.0)
    if not isinstance(seconds, int | float) or not (math.isfinite(seconds) and seconds > 0):
        refuse("timeout_seconds", seconds, "is not a positive number", "Every call must end.")
    fraction = costs.get("parallel_fraction", 0.5)
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        refuse("parallel_fraction", fraction, "is not within 0 .. 1", "See `parallel_fraction`.")
    expected = costs.get("expected_seconds", 0.0)
    if not _is_seconds(expected):
        refuse("expected_seconds", expected, "is not a number of 0 or more", "Leave it out.")
    per = costs.get("seconds_per", {})
    if not isinstance(per, Mapping):
        refuse("seconds_per", per, "is no dict of seconds by argument", 'Write {"tests": 2.5}.')
    for argument, seconds in per.items():
        if not isinstance(argument, str) or not ARGUMENT.fullmatch(argument):
            refuse(
                "seconds_per", argument, "is no argument", 'Write "tests" or "query.data.tests".'
            )
        if not _is_seconds(seconds):
            refuse(f"seconds_per.{argument}", seconds, "is not a number of 0 or more", "Mend it.")
    if costs.get("sandbox", SANDBOXES[0]) not in SANDBOXES:
        refuse("sandbox", costs["sandbox"], "is no sandbox", f"Known: {', '.join(SANDBOXES)}.")
    most, least = costs.get("max_cores", 0), max(1, costs.get("cores", 1))
    if most and most < least:
        refuse("max_cores", most, f"is less than cores ({least})", "Leave it out, or raise it.")


def _is_seconds(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < math.inf  # type: ignore[operator]
