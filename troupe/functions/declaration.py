"""The decorators `@troupe.reward` and `@troupe.tool`: they attach a `Declaration`, with the costs
of calls and the arguments, to a function. The function itself is unchanged.

Jobs and deployments read the declaration; `definition` presents it to models as a tool.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, overload

from troupe.functions.validation import NAME, VERSION, check_costs

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["reward", "tool"]

# The attribute of a function that holds its declaration.
_ATTRIBUTE: Final = "__troupe__"


class DeclarationError(TypeError):
    """A declaration is invalid: its `field` is `value`."""

    def __init__(self, function: str, field: str, value: object, message: str, remedy: str) -> None:
        super().__init__(f"{function}: {field} = {value!r} {message}. {remedy}")
        self.function, self.field, self.value = function, field, value
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class Declaration:
    """A function's declaration. `costs` contains only the arguments of the decorator, by the names
    of a job's `rewards` and `tools`."""

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
        """Raise `DeclarationError` for a signature that cannot be called with JSON."""
        try:
            check_parameters(self.function)
            if self.kind == "reward":
                check_reward(self.function)
        except SignatureError as error:
            raise DeclarationError(
                self.name, error.where, error.what, error.message, error.remedy
            ) from error


def declaration_of(function: Any) -> Declaration | None:
    """Return the declaration of a decorated function; None for any other object."""
    found = getattr(function, _ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None


class Costs(TypedDict, total=False):
    """The costs of a call, by the names of a job's `rewards` and `tools` (docs/job-reference.md);
    values in the job override them."""

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
    """The costs of a tool, which may keep files between the calls of a trajectory."""

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
    """Declare a reward: a function that returns a finite number, or a dict of numbers by agent.

    Use it bare, or with the costs of calls (`Costs`). A job calls the function with the keywords
    `query`, `turns` and `rewards`. `name` (default: the function's) and `version` are used for
    deployment. Raises `DeclarationError`.
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
    """Declare a tool: a function with JSON arguments that agents may call.

    Use it bare, or with the costs of calls (`ToolCosts`). A model sees the parameters' type hints
    and the docstring (`Tools.definitions`). Raises `DeclarationError`.
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
                f"is not a field of a {kind}'s declaration",
                f"Known: {', '.join(sorted(names))}.",
            )
        chosen = called if name is None else name

        def refuse(field: str, value: object, message: str, remedy: str) -> None:
            raise DeclarationError(called, field, value, message, remedy)

        if not isinstance(chosen, str) or not NAME.fullmatch(chosen):
            refuse("name", chosen, "is not a name", "Use letters, digits, '_', '-' and '.'.")
        if not isinstance(version, str) or not VERSION.fullmatch(version):
            refuse("version", version, "is not a version", 'Write a short text, for example "1".')
        check_costs(costs, refuse)
        text = inspect.cleandoc(target.__doc__ or "")
        made = Declaration(kind, chosen, version, text, dict(costs), target)
        made.check()
        setattr(target, _ATTRIBUTE, made)
        return target

    return declare if function is None else declare(function)


class SignatureError(Exception):
    """A signature has `what` at `where`, which cannot be passed by keyword as JSON."""

    def __init__(self, where: str, what: object, message: str, remedy: str) -> None:
        super().__init__(message)
        self.where, self.what, self.message, self.remedy = where, what, message, remedy


def check_parameters(function: Callable[..., Any]) -> None:
    """Raise `SignatureError` unless every parameter can be given by keyword, as a JSON value."""
    hints = _hints(function)
    for parameter in inspect.signature(function).parameters.values():
        optional = parameter.default is not parameter.empty
        if parameter.kind is parameter.POSITIONAL_ONLY and not optional:
            raise SignatureError(
                parameter.name,
                str(parameter),
                "can only be passed by position",
                "Arguments are passed by name: remove the `/`.",
            )
        hint = hints.get(parameter.name, Any)
        if not _json(hint):
            raise SignatureError(
                parameter.name,
                _shown(hint),
                "is not a JSON type",
                "Use str, int, float, bool, None, list, dict, Literal or TypedDict.",
            )


def check_reward(function: Callable[..., Any]) -> None:
    """Raise `SignatureError` for a return annotation other than a number or a dict of numbers."""
    returned = _hints(function).get("return", Any)
    if not _scores(returned):
        raise SignatureError(
            "return",
            _shown(returned),
            "is not a reward",
            "Return a finite float, or a dict of floats by agent: `-> dict[str, float]`.",
        )


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with the arguments of a function that passes
    `check_parameters`."""
    # The import takes a tenth of a second, and sandboxes do not need it.
    from pydantic import ConfigDict, Field, create_model

    hints = _hints(function)
    fields: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias, since fields of models must not begin with an underscore or shadow a method.
        fields[f"argument_{len(fields)}"] = (hints.get(name, Any), Field(default, alias=name))
    model = create_model(
        "Arguments", __config__=ConfigDict(extra="allow" if more else "forbid"), **fields
    )
    return _plain(model.model_json_schema())


def _json(hint: Any) -> bool:
    """Return whether values of this type survive JSON unchanged: nothing converts arguments."""
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
    """Return `found` without titles, which only repeat the names."""
    found.pop("title", None)
    for entry in found.get("properties", {}).values():
        entry.pop("title", None)
    found.setdefault("properties", {})
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's resolved type hints; none if one cannot be resolved (a `TYPE_CHECKING`
    import), which does not prove that JSON fails."""
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
        # None is allowed in a union: no reward for this trajectory.
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return bool(parts) and all(map(_scores, parts))
    if isinstance(origin or hint, type):
        kind = origin or hint
        if issubclass(kind, Mapping):
            of = typing.get_args(hint)
            return not of or (of[0] is str and _scores(of[1]))
        return hasattr(kind, "__float__") and not issubclass(kind, bool)
    return True  # a type variable or similar: decided by the call


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def definition(
    name: str, description: str, parameters: Mapping[str, Any], *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return a tool in the form shown to models: an item of `tools` of OpenAI's API. `parameters`
    is the JSON schema of the arguments; arguments in `without`, which the job sets, are left
    out."""
    schema = dict(parameters) or {"type": "object", "properties": {}}
    if without:
        kept = {k: v for k, v in schema.get("properties", {}).items() if k not in without}
        required = [key for key in schema.get("required", ()) if key not in without]
        schema = {**schema, "properties": kept, "required": required}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def definition_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the `definition` of a function in this process; for a `partial`, without the bound
    arguments."""
    given: Collection[str] = ()
    if isinstance(function, partial):
        given, function = function.keywords, function.func
    if isinstance(listed := getattr(function, "listed", None), Mapping):  # an MCP server's
        return definition(name, listed["description"], listed["parameters"])
    declared = declaration_of(function)
    if declared is None:
        return definition(name, "", {})
    return definition(name, declared.description, declared.parameters, without=given)
