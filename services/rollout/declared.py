"""What a job's functions declare of themselves, asked of the service that runs them: only there
must they be importable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import structlog

from troupe import __version__
from troupe.functions.costs import schema_of, to_spec
from troupe.functions.describing import IMPORT_SECONDS, Described
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc.errors import NotFound
from troupe.rpc.ids import new_id
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

log = structlog.get_logger(__name__)

_NAME: Final = "troupe/describe"
_ENTRYPOINT: Final = "troupe.functions.describing:describe"
# Nothing of a job begins before; it is short beside what waits.
_PRIORITY: Final = 1_000_000
# Of the service, between that it is told of a function and that it is asked for it.
_RESTARTS: Final = 4


async def register_describer(stub: RewardAsyncStub) -> None:
    """Make the function known that describes others. Raises `TroupeError`."""
    costs = {"cores": 0, "memory_mib": 0, "timeout_seconds": IMPORT_SECONDS + 10}
    spec = to_spec(_NAME, __version__, _ENTRYPOINT, costs)
    await stub.RegisterFunction(
        pb.RegisterFunctionRequest(request_id=new_id("register"), function=spec)
    )


async def describe(stub: RewardAsyncStub, entrypoints: Collection[str]) -> dict[str, Described]:
    """What they declare, by entrypoint; of one that cannot be described, nothing: its first call
    says why. Raises `TroupeError` when the service cannot be asked."""
    for left in reversed(range(_RESTARTS + 1)):
        await register_describer(stub)
        try:
            found = await asyncio.gather(*(_describe(stub, one) for one in entrypoints))
        except NotFound as error:
            # A service that was restarted since has forgotten it.
            if error.kind != "function_not_found" or not left:
                raise
            log.info("the reward service forgot its functions", error=error.message)
            continue
        return dict(zip(entrypoints, found, strict=True))
    raise AssertionError("the last round returns or raises")


async def list_described(stub: RewardAsyncStub) -> dict[tuple[str, str], Described]:
    """What is known of the functions of the service, by name and version. Raises `TroupeError`."""
    reply = await stub.ListFunctions(pb.ListFunctionsRequest())
    return {
        (spec.name, spec.version): Described(
            spec.entrypoint,
            spec.kind,
            spec.name,
            spec.version,
            spec.description,
            parameters=schema_of(spec),
        )
        for spec in (status.function for status in reply.functions)
    }


async def _describe(stub: RewardAsyncStub, entrypoint: str) -> Described:
    response = await stub.Invoke(
        pb.InvokeRequest(
            invocation_id=new_id("describe"),
            name=_NAME,
            version=__version__,
            arguments_json=json.dumps({"entrypoint": entrypoint}),
            priority=_PRIORITY,
        ),
        timeout=2 * IMPORT_SECONDS,
    )
    if response.HasField("error"):
        log.info(
            "a function could not be described",
            entrypoint=entrypoint,
            error=response.error.message,
        )
        return Described(entrypoint)
    try:
        return Described(**parse_json(response.result_json))
    except (NotJsonError, TypeError) as error:  # of an imported module that answers for us
        log.warning("a function is described as nothing", entrypoint=entrypoint, error=str(error))
        return Described(entrypoint)
