"""Populations over REST: pools, payoffs, matches."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from services.control_panel import views
from services.control_panel.jobs_api import JobId, upstream
from troupe.v1 import orchestrator_pb2 as pb

router = APIRouter(prefix="/api/jobs", tags=["populations"])


@router.get("/{job_id}/population")
async def get_population(request: Request, job_id: JobId) -> dict[str, Any]:
    """Pools with their members, the payoff table, meta-strategies over time, ratings."""
    reply = await upstream(request).stub.GetPopulation(pb.GetPopulationRequest(job_id=job_id))
    return views.plain(reply.population)


@router.get("/{job_id}/matches")
async def list_matches(
    request: Request,
    job_id: JobId,
    member: Annotated[str, Query(description="Only those in which this member played.")] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="`next_page` of the answer before.")] = "",
) -> dict[str, Any]:
    """Matches between members, newest first. A match is a trajectory of the same id."""
    reply = await upstream(request).stub.ListMatches(
        pb.ListMatchesRequest(job_id=job_id, member_id=member, page_size=limit, page_token=page)
    )
    return {
        "matches": [views.plain(match) for match in reply.matches],
        "next_page": reply.next_page_token,
    }
