"""What a call takes where nobody says otherwise, and a function's costs as the wire has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from troupe.outcomes import NotJsonError, json_text, parse_json
from troupe.rpc.errors import InvalidArgument
from troupe.v1 import reward_pb2 as pb

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
"""What is not named here is absent on the wire: none, or as the service is set."""


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
) -> pb.FunctionSpec:
    """A function as the reward service registers it: `costs` go before what it `declared`."""
    return pb.FunctionSpec(
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


def schema_of(spec: pb.FunctionSpec) -> dict[str, Any]:
    """The JSON schema of a function's arguments; empty where what was registered is none."""
    try:
        found = parse_json(spec.parameters_json or "{}")
    except NotJsonError:
        return {}
    return found if isinstance(found, dict) else {}


def costs_of(spec: pb.FunctionSpec) -> dict[str, Any]:
    """The costs on the wire by their names: those that are set."""
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
