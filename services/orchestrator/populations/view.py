"""Read access to a job's population: the messages that the API returns."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from typing import Final

from services.chassis.folders import files_below
from services.orchestrator.context import Shared
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.population import due
from services.orchestrator.populations.state import (
    CANDIDATE,
    RETIRED,
    SETTLED,
    FrozenMember,
    PopulationState,
    no_population,
)
from services.orchestrator.state.records import JobRecord, timestamp
from troupe.rpc import NotFound
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

_STATES: Final = {
    CANDIDATE: orchestrator_pb.MEMBER_STATE_CANDIDATE,
    SETTLED: orchestrator_pb.MEMBER_STATE_SETTLED,
    RETIRED: orchestrator_pb.MEMBER_STATE_RETIRED,
}


async def population(shared: Shared, record: JobRecord) -> orchestrator_pb.Population:
    """Return the pools, payoffs and meta-strategies of a job; before it has begun, pools without
    members.

    Raises NotFound of kind "no_population".
    """
    spec = record.spec()
    if spec.population is None:
        raise no_population(record.job_id)
    section, pools = sections(spec)
    found = orchestrator_pb.Population(
        algorithm=section.algorithm,
        symmetric=pools.symmetric,
        agents=pools.agents,
        activity=shared.log.activity(record.job_id),
        pools=[
            orchestrator_pb.PopulationPool(
                name=pool.name, agents=pool.agents, learners=pool.learners
            )
            for pool in pools.pools
        ],
    )
    state = await shared.populations.load(record.job_id)
    if state is None:
        return found
    found.iteration = state.iteration
    found.stopped = state.stopped
    found.matches_played = state.played
    if state.pending and (plan := due(spec, state)):
        # Matches that have ended but are not counted in the payoffs belong to the current round.
        begun = await shared.populations.ended(record.job_id) - sum(state.attempts.values())
        found.matches_due = max(0, len(plan) - max(0, begun))
    for pool in found.pools:
        pool.members.extend(_member(state.members[name]) for name in state.pools[pool.name])
    found.cells.extend(_cells(state))
    found.history.extend(_solutions(state))
    found.ratings.extend(
        orchestrator_pb.MemberRating(member_id=name, **asdict(one))
        for name, one in state.ratings.items()
    )
    found.slots.extend(_slots(state, {s: p.name for p in pools.pools for s in p.slots}))
    return found


async def known_member(shared: Shared, record: JobRecord, member_id: str) -> FrozenMember:
    """Return a member by its id. Raises NotFound of kind "no_population" or "member_not_found"."""
    if record.spec().population is None:
        raise no_population(record.job_id)
    state = await shared.populations.load(record.job_id)
    known = {} if state is None else state.members
    if member_id not in known:
        raise NotFound(
            f"job {record.job_id} has no such member",
            kind="member_not_found",
            field="member_id",
            value=member_id,
            remedy=f"There are: {', '.join(known) or 'none yet'}.",
        )
    return known[member_id]


async def member(shared: Shared, record: JobRecord, member_id: str) -> orchestrator_pb.Checkpoint:
    """Return the files of a member, as a checkpoint.

    Raises NotFound of kind "member_not_found" (no such member) or "member_gone" (files deleted).
    """
    one = await known_member(shared, record, member_id)
    path = record.directory / "members" / one.learner / f"v{one.version}"
    if not await asyncio.to_thread(path.is_dir):
        retired = one.state == RETIRED
        raise NotFound(
            f"the weights of member {member_id} are "
            + ("not kept: a newer version took its place" if retired else f"not in {path}"),
            kind="member_gone",
            field="member_id",
            value=member_id,
            remedy="Export a settled member."
            if retired
            else "Restore the directory, or give trainers and orchestrator one data_dir "
            "(TROUPE_DATA_DIR).",
        )
    return orchestrator_pb.Checkpoint(
        policy=one.learner,
        version=one.version,
        path=str(path),
        num_bytes=sum(file.stat().st_size for file in files_below(path)),
    )


def _member(one: FrozenMember) -> orchestrator_pb.PopulationMember:
    changed = {"state": _STATES[one.state], "frozen_at": timestamp(one.frozen_at)}
    return orchestrator_pb.PopulationMember(**asdict(one) | changed)


def _cells(state: PopulationState) -> list[orchestrator_pb.PayoffCell]:
    found, pooled = [], state.table.pooled
    for key, cell in sorted(state.table.cells.items()):
        one = orchestrator_pb.PayoffCell(
            members=key, mean=cell.mean.tolist(), matches=cell.matches, exact=cell.exact
        )
        if math.isfinite(width := cell.half_width(pooled)):
            one.half_width = width
            one.variance.extend(cell.variance.tolist())
        found.append(one)
    return found


def _solutions(state: PopulationState) -> list[orchestrator_pb.MetaStrategy]:
    return [
        orchestrator_pb.MetaStrategy(
            iteration=one.iteration,
            step=one.step,
            mixtures=[
                orchestrator_pb.Mixture(pool=pool, probabilities=mixture)
                for pool, mixture in one.mixtures.items()
            ],
            values=one.values,
            gains=one.gains.values(),
            nash_conv=one.nash_conv,
        )
        for one in state.history
    ]


def _slots(state: PopulationState, training: dict[str, str]) -> list[orchestrator_pb.OpponentSlot]:
    """Return all slots with their probability in training; `training`: the pool of each training
    slot."""
    shares: dict[str, float] = dict.fromkeys(state.slots, 0.0)
    drawn = [] if state.casting is None else list(state.casting.shares.values())
    for pools in drawn:
        for mixture in pools.values():
            for slot, share in mixture.items():
                if slot in shares:
                    shares[slot] += share / len(drawn)
    return [
        orchestrator_pb.OpponentSlot(
            policy=slot,
            pool=training.get(slot, slot.rpartition("--")[0]),
            member_id=member_id,
            version=version,
            probability=shares[slot],
        )
        for slot, (member_id, version) in state.slots.items()
    ]
