"""Costs of functions: their defaults, and their form in a protobuf `FunctionSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from troupe.outcomes import NotJsonError, json_text, parse_json
from troupe.rpc.errors import InvalidArgument
from troupe.v1 import reward_pb2 as reward_pb

DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "timeout_seconds": 30.0,
        "memory_mib": 512,
        "cores": 1,
        "parallel_fraction": 0.9,
        "sandbox": "process",
        "processes": 64,
        "disk_mib": 256,
    }
)
"""Costs without a default here are absent on the wire, which means none or the reward service's
setting."""


def to_spec(
    name: str,
    version: str,
    entrypoint: str,
    costs: Mapping[str, Any],
    *,
    declared: Mapping[str, Any] = MappingProxyType({}),
    kind: str = "",
    description: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> reward_pb.FunctionSpec:
    """Return the message that registers a function; `costs` override what it `declared`."""
    return reward_pb.FunctionSpec(
        name=name,
        version=version,
        entrypoint=entrypoint,
        kind=kind,
        description=description,
        parameters_json=_schema(parameters) if parameters else "",
        **{**DEFAULTS, **declared, **costs},
    )


def _schema(parameters: Mapping[str, Any]) -> str:
    try:
        return json_text(dict(parameters))
    except NotJsonError as error:
        raise InvalidArgument(
            f"is not JSON: {error}",
            field="function.parameters",
            remedy="Give a JSON schema of the arguments.",
        ) from error


def schema_of(spec: reward_pb.FunctionSpec) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; empty if the registered text is not a
    schema."""
    try:
        found = parse_json(spec.parameters_json or "{}")
    except NotJsonError:
        return {}
    return found if isinstance(found, dict) else {}


def costs_of(spec: reward_pb.FunctionSpec) -> dict[str, Any]:
    """Return the costs that are set in a message, by name."""
    own = ("name", "version", "entrypoint", "kind", "description", "parameters_json")
    return {
        field.name: _plain(field, value)
        for field, value in spec.ListFields()
        if field.name not in (*own, "source_sha256")
    }


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:  # a map
        return dict(value)
    return list(value) if field.is_repeated else value
