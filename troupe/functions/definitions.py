"""A tool as models are told of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from troupe.functions.declaration import declaration_of


def definition(
    name: str, description: str, parameters: Mapping[str, Any], *, without: Collection[str] = ()
) -> dict[str, Any]:
    """An item of `tools` as OpenAI's API has it. `parameters` is the JSON schema of the arguments;
    `without` are those that are not the model's to give."""
    schema = dict(parameters) or {"type": "object", "properties": {}}
    if without:
        kept = {k: v for k, v in schema.get("properties", {}).items() if k not in without}
        required = [key for key in schema.get("required", ()) if key not in without]
        schema = {**schema, "properties": kept, "required": required}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def definition_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The same of a function that is here; of a partial one, what is left to give."""
    given: Collection[str] = ()
    if isinstance(function, partial):
        given, function = function.keywords, function.func
    declared = declaration_of(function)
    if declared is None:
        return definition(name, "", {})
    return definition(name, declared.description, declared.parameters, without=given)
