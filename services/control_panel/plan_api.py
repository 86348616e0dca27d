"""The planner over REST: the best split of a cluster's devices for a job, and a picture of the
resulting step. Plans are computed in a separate process, one at a time."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from pydantic import Field

from services.control_panel import views
from services.control_panel.calls import upstream
from services.control_panel.jobs_api import JobId, read_specification, specification_body
from troupe.rpc.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# A large job on hundreds of devices takes about half a minute.
_SECONDS: Final = 120.0
_GIVEN: Final = asyncio.Semaphore(1)

router = APIRouter(prefix="/api", tags=["planner"])
Count = Annotated[int, Query(ge=1, le=4096)]
Rate = Annotated[float, Query(ge=0, le=1e9)]


class PlanView(views.View):
    """The best split of a cluster's devices for a job."""

    best: dict[str, Any]
    """Predicted seconds per step, devices, utilizations, bottleneck; `policies`: engines per host
    (`replicas`), devices of each (`tensor_parallel`), the policy whose engines these are
    (`shares_engines_of`; empty: its own), `gang`, turns at once, bytes to train."""
    others: list[dict[str, Any]]
    """The next best, in the same form."""
    considered: int
    """Splits that fit."""
    hosts: int
    seconds_with_one_more_host: float | None
    shared: list[str]
    """Savings of policies that share engines, as text."""
    measured: list[str]
    """The measurements behind the prediction, as text."""
    assumed: list[str]
    changes: list[str] = Field(alias="set")
    """The job's fields for this split, in the form of `--set`."""
    picture: dict[str, Any]
    """Picture of the steps that the prediction is the mean of: their `seconds` together, `ends` of
    each, and `lanes` of engines and trainers with `busy` times as [policy, begin, end]."""


@router.post("/plan", openapi_extra=specification_body(required=True))
async def plan_job(
    request: Request,
    devices: Annotated[str, Query(description="All devices, as in 64xH100-80GB.", max_length=200)],
    hosts: Count = 1,
    profile: Annotated[
        str, Query(description="The id of an earlier run whose measurements to use.")
    ] = "",
    turns: Annotated[float, Query(description="Mean number of rounds in a trajectory.")] = 4.0,
    prompt_tokens: Annotated[float, Query(description="New prompt tokens of a turn.")] = 500.0,
    response_tokens: Annotated[
        float, Query(description="Tokens sampled in a turn; 0: a third of `max_new_tokens`.")
    ] = 0.0,
    wait_seconds: Annotated[float, Query(description="Seconds of tools after a turn.")] = 1.0,
    tflops: Annotated[Rate, Query(description="Device's peak; 0: by its class.")] = 0.0,
    gigabytes_per_second: Annotated[
        Rate, Query(description="Device's memory bandwidth; 0: by its class.")
    ] = 0.0,
) -> PlanView:
    """Plan a job: the body is its YAML (or JSON). Nothing is submitted."""
    spec = await read_specification(request)
    measured = ""
    if profile:
        reply = await upstream(request).stub.GetJobProfile(
            orchestrator_pb.GetJobProfileRequest(job_id=profile)
        )
        measured = reply.profile_json
    asked = {
        "spec": spec,
        "devices": devices,
        "hosts": hosts,
        "profile": measured,
        "turns": turns,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "wait_seconds": wait_seconds,
        "tflops": tflops,
        "gigabytes_per_second": gigabytes_per_second,
    }
    async with _GIVEN:
        return PlanView.model_validate(await _planned(asked))


@router.get("/jobs/{job_id}/profile")
async def get_profile(request: Request, job_id: JobId) -> dict[str, Any]:
    """Return the measured profile of a job for planners: histograms of lengths and waits, speeds of
    engines and trainers, a sample of its trajectories' lengths."""
    reply = await upstream(request).stub.GetJobProfile(
        orchestrator_pb.GetJobProfileRequest(job_id=job_id)
    )
    found: dict[str, Any] = json.loads(reply.profile_json)
    return found


async def _planned(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a planning process, which ends with the call. Raises its problem."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "troupe.twin.plans",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            out, errors = await process.communicate(json.dumps(asked).encode())
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the planner found no plan within {_SECONDS:g} s",
            field="query.devices",
            value=asked["devices"],
            remedy="Plan it with `troupe plan`, which has no time limit.",
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        if "No module named 'simpy'" in last:
            raise FailedPrecondition(
                "the planner is not installed where the panel runs",
                field="plan",
                remedy='Install it there: `pip install "troupe-rl[plan]"`.',
            )
        raise Internal(f"the planner failed: {last}")
    found: dict[str, Any] = json.loads(out)
    if (problem := found.get("problem")) is not None:
        early = problem.pop("code") == FailedPrecondition.code.name
        raise (FailedPrecondition if early else InvalidArgument)(**problem)
    return found
