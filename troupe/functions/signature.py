"""What a function's signature says: what may be handed to it as JSON, and what comes back."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any


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
