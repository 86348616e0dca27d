"""The part of the orchestrator double that reports a population."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import xxhash

from troupe.rpc import NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

MIXTURES = [{"player@0": 1.0}, {"player@0": 0.25, "player@5": 0.75}]
POPULATION = orchestrator_pb.Population(
    algorithm="psro",
    symmetric=True,
    iteration=2,
    agents=["p0", "p1"],
    pools=[
        orchestrator_pb.PopulationPool(
            name="player",
            agents=["p0", "p1"],
            learners=["player"],
            members=[
                orchestrator_pb.PopulationMember(
                    member_id="player@0",
                    learner="player",
                    state=orchestrator_pb.MEMBER_STATE_SETTLED,
                ),
                orchestrator_pb.PopulationMember(
                    member_id="player@5",
                    learner="player",
                    version=5,
                    step=5,
                    iteration=1,
                    parent="player@0",
                    num_bytes=2**20,
                    state=orchestrator_pb.MEMBER_STATE_SETTLED,
                ),
                orchestrator_pb.PopulationMember(
                    member_id="player@9",
                    learner="player",
                    version=9,
                    step=9,
                    iteration=2,
                    parent="player@5",
                    state=orchestrator_pb.MEMBER_STATE_CANDIDATE,
                ),
            ],
        )
    ],
    cells=[
        orchestrator_pb.PayoffCell(
            members=[0, 0], mean=[0, 0], matches=4, variance=[1, 1], half_width=0.98
        ),
        orchestrator_pb.PayoffCell(members=[0, 1], mean=[-0.5, 0.5], exact=True, half_width=0.0),
    ],
    history=[
        orchestrator_pb.MetaStrategy(
            iteration=iteration,
            step=5 * iteration,
            mixtures=[orchestrator_pb.Mixture(pool="player", probabilities=shares)],
            values=[0.0, 0.0],
            gains=[0.25] if iteration else [],
            nash_conv=0.9 - 0.4 * iteration,
        )
        for iteration, shares in enumerate(
            [{"player@0": 1.0}, {"player@0": 0.25, "player@5": 0.75}]
        )
    ],
    ratings=[
        orchestrator_pb.MemberRating(member_id="player@5", mean=27.5, deviation=2.25, matches=4)
    ],
    slots=[
        orchestrator_pb.OpponentSlot(
            policy="player--0", pool="player", member_id="player@5", version=2
        )
    ],
    matches_played=4,
    matches_due=3,
    activity="matches: 1 of 4",
)
MATCHES = [
    orchestrator_pb.Match(
        trajectory_id=f"m0x1-t{number}",
        iteration=1,
        members={"p0": "player@0", "p1": "player@5"},
        payoffs={"p0": -1.0, "p1": 1.0},
        state=common_pb.TRAJECTORY_STATE_COMPLETED,
        seconds=2.0,
    )
    for number in range(3)
]
PAGE = 2


class FakePopulation:
    """Three members, two cells, three matches on two pages; a job `plain` has none."""

    files: dict[str, bytes]

    async def GetPopulation(
        self, request: orchestrator_pb.GetPopulationRequest, context: Any
    ) -> orchestrator_pb.GetPopulationResponse:
        await self._note("GetPopulation", request, context)  # type: ignore[attr-defined]
        if request.job_id == "plain":
            error = NotFound("job plain has no population", kind="no_population", field="job_id")
            await self._fail(context, error)  # type: ignore[attr-defined]
        return orchestrator_pb.GetPopulationResponse(population=POPULATION)

    async def ListMatches(
        self, request: orchestrator_pb.ListMatchesRequest, context: Any
    ) -> orchestrator_pb.ListMatchesResponse:
        await self._note("ListMatches", request, context)  # type: ignore[attr-defined]
        first = int(request.page_token or 0)
        size = min(request.page_size, PAGE)
        more = first + size < len(MATCHES)
        return orchestrator_pb.ListMatchesResponse(
            matches=MATCHES[first : first + size],
            next_page_token=str(first + size) if more else "",
        )

    async def ExportMember(
        self, request: orchestrator_pb.ExportMemberRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.ExportCheckpointResponse]:
        await self._note("ExportMember", request, context)  # type: ignore[attr-defined]
        if request.member_id != "player@5":
            error = NotFound("no such member", kind="member_not_found", field="member_id")
            await self._fail(context, error)  # type: ignore[attr-defined]
        content = b"weights"
        yield orchestrator_pb.ExportCheckpointResponse(
            path="model.safetensors",
            data=content,
            end_of_file=True,
            checksum=xxhash.xxh3_64_intdigest(content),
        )
