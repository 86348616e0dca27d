"""Functions (rewards and tools) over REST: deploy, list, call, delete, read their output."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request
from pydantic import ConfigDict, Field

from services.control_panel import views
from services.control_panel.calls import upstream
from troupe.client.conversion import to_json
from troupe.client.functions import checked_costs
from troupe.client.records.functions import result_of
from troupe.functions.costs import to_spec
from troupe.outcomes import NotJsonError, json_text
from troupe.rpc.errors import InvalidArgument
from troupe.rpc.ids import new_id
from troupe.v1 import reward_pb2 as reward_pb

router = APIRouter(prefix="/api/functions", tags=["functions"])

# Deadline of a call over REST; browsers and proxies wait no longer.
_INVOKE_SECONDS = 300.0


class DeploymentRequest(views.View):
    """A function to deploy."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The name to call it by."""
    version: str = "1"
    """The version; name and version identify one function permanently."""
    entrypoint: str
    """`package.module:attribute`, in `files` or installed where the reward service runs."""
    kind: str = Field(default="", pattern="^(|reward|tool)$")
    """`reward` or `tool`."""
    files: dict[str, str] = Field(default_factory=dict)
    """Source files by path; none if the code is installed."""
    costs: dict[str, Any] = Field(default_factory=dict)
    """Costs, as in a job's `rewards` and `tools`: cores, timeout_seconds, sandbox, ..."""
    description: str = ""
    """A description for people and models."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """JSON schema of the arguments."""


class InvocationOutcome(views.View):
    """The outcome of a call: a `value` or an `error`."""

    invocation_id: str
    value: Any = None
    error: dict[str, Any] | None = None
    """Kind, message, traceback, and the end of its output."""
    queue_seconds: float
    run_seconds: float
    cold_start_seconds: float
    cores: int


@router.get("")
async def list_functions(request: Request) -> dict[str, Any]:
    """List all functions with their calls, cold starts and learned speed-up, and the worker pool.
    Functions of jobs are named after their job."""
    reply = await upstream(request).functions.ListFunctions(reward_pb.ListFunctionsRequest())
    return {
        "functions": [to_json(one) for one in reply.functions],
        "pool": to_json(reply.pool),
    }


@router.post("", status_code=201)
async def deploy_function(request: Request, deployment: DeploymentRequest) -> dict[str, Any]:
    """Deploy a function; deploying the same again changes nothing."""
    stub = upstream(request).functions
    spec = to_spec(
        deployment.name,
        deployment.version,
        deployment.entrypoint,
        checked_costs(deployment.costs),
        kind=deployment.kind,
        description=deployment.description,
        parameters=deployment.parameters,
    )
    if deployment.files:
        files = [
            reward_pb.SourceFile(path=p, content=t.encode()) for p, t in deployment.files.items()
        ]
        upload = reward_pb.UploadSourceRequest(request_id=new_id("panel"), files=files)
        spec.source_sha256 = (await stub.UploadSource(upload)).sha256
    await stub.RegisterFunction(
        reward_pb.RegisterFunctionRequest(request_id=new_id("panel"), function=spec)
    )
    return to_json(spec)


@router.post("/{name}/invoke")
async def invoke_function(
    request: Request,
    name: str,
    arguments: Annotated[dict[str, Any], Body(description="Keyword arguments.")],
    version: Annotated[str, Query(description="Default: the one deployed last.")] = "",
    trajectory_id: Annotated[
        str, Query(description="Trajectory whose files a stateful function uses.")
    ] = "",
    idempotency_key: Annotated[
        str | None, Header(description="A call repeated with the same key runs once.")
    ] = None,
) -> InvocationOutcome:
    """Call a function and wait for its outcome."""
    invocation_id = idempotency_key or new_id("panel")
    reply = await upstream(request).functions.Invoke(
        reward_pb.InvokeRequest(
            invocation_id=invocation_id,
            name=name,
            version=version,
            arguments_json=_json(arguments),
            trajectory_id=trajectory_id,
        ),
        timeout=_INVOKE_SECONDS,
    )
    value, error = result_of(reply)
    return InvocationOutcome(
        invocation_id=invocation_id,
        value=value,
        error=None if error is None else to_json(error),
        queue_seconds=reply.queue_seconds,
        run_seconds=reply.run_seconds,
        cold_start_seconds=reply.cold_start_seconds,
        cores=reply.cores,
    )


@router.get("/{name}/logs")
async def read_logs(
    request: Request,
    name: str,
    version: Annotated[str, Query(description="Default: all versions.")] = "",
    lines: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[dict[str, Any]]:
    """Return the last lines that calls of the function printed."""
    call = upstream(request).functions.ReadLogs(
        reward_pb.ReadLogsRequest(name=name, version=version, lines=lines)
    )
    return [to_json(line) async for line in call]


@router.delete("/{name}/{version}")
async def delete_function(request: Request, name: str, version: str) -> dict[str, bool]:
    """Delete a deployed function and cancel its calls."""
    reply = await upstream(request).functions.DeleteFunction(
        reward_pb.DeleteFunctionRequest(request_id=new_id("panel"), name=name, version=version)
    )
    return {"deleted": reply.deleted}


def _json(arguments: dict[str, Any]) -> str:
    try:
        return json_text(arguments)
    except NotJsonError as error:
        raise InvalidArgument(
            f"is not JSON: {error}",
            field="body",
            remedy="Send strings, finite numbers, booleans, null, arrays and objects only.",
        ) from error
