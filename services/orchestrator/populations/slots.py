"""Slots: frozen policies into which members of a population are loaded as new versions.

`MemberWeights` has trainer workers keep, publish and drop members' weights; `Slots` decides which
slot serves which member, and draws the opponents of training queries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import numpy as np
import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, RetryBackoff, run_all
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.state import (
    Casting,
    FrozenMember,
    Mixture,
    PopulationState,
    PopulationStore,
    live_policy,
)
from troupe.contracts import kinds
from troupe.populations.slots import share_slots, training_seat
from troupe.rpc import NotFound, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Time limit in seconds for writing or reading the files of one policy.
_SECONDS: Final = 600.0
_DROP_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_TRAINER: Final = orchestrator_pb.WORKER_KIND_TRAINER


class Slots:
    """Slots with loaded members, and the draw of opponents for training queries.

    A slot's assignment (member, version n of the slot) is durable before any engine loads it, so
    that a version of a slot always has the same content.
    """

    def __init__(
        self,
        job: JobContext,
        weights: MemberWeights,
        store: PopulationStore,
        state: PopulationState,
    ) -> None:
        self._job, self._weights, self._store = job, weights, store
        self._state = state
        self._population, self._pools = sections(job.spec)
        # Lock, held while members are published for slots, or unpublished because no slot has them.
        self._placement_lock = asyncio.Lock()
        self.engines: Engines

    @property
    def separate_match_slots(self) -> bool:
        """Whether matches have slots of their own (`population.evaluation_slots`)."""
        return self._population.evaluation_slots > 0

    async def refs(self, deadline: Deadline) -> dict[str, common_pb.WeightsRef]:
        """Publish the members in slots; return each slot's weights."""
        held = dict.fromkeys(member for member, _ in self._state.slots.values())
        published = {
            name: await self._weights.publish(self._state.members[name], deadline) for name in held
        }
        return {
            slot: slot_ref(slot, version, published[member])
            for slot, (member, version) in self._state.slots.items()
        }

    async def republish(self, slot: str) -> None:
        """Publish a slot's weights again after all hosts have lost them."""
        seconds = self._job.shared.settings.bind_timeout_seconds
        member, _ = self._state.slots[slot]
        deadline = Deadline(f"publishing {member} again", seconds, "bind_timeout_seconds")
        await self._weights.publish(self._state.members[member], deadline)

    async def load_matches(self, wanted: Mapping[str, list[int]], deadline: Deadline) -> None:
        """Load the members at the `wanted` indices of each pool into the slots of matches."""
        members = {
            pool.name: [self._state.pools[pool.name][at] for at in wanted[pool.name]]
            for pool in self._pools.pools
        }
        slots = {pool.name: pool.match_slots for pool in self._pools.pools}
        await self._load(self._place(members, slots), deadline)

    def places(self) -> dict[tuple[str, str], str]:
        """Return the match slot that serves each member, by (pool, member)."""
        return {
            (pool.name, self._state.slots[slot][0]): slot
            for pool in self._pools.pools
            for slot in reversed(pool.match_slots)
        }

    def match_floors(self) -> dict[str, int] | None:
        """Return the minimum versions that matches need: they do not wait for training's newest
        ones."""
        if not self.separate_match_slots:
            return None
        training = [slot for pool in self._pools.pools for slot in pool.slots]
        return dict.fromkeys([*self._job.spec.trained_policies, *training], 0)

    @property
    def training_floors(self) -> dict[str, int]:
        """Return the minimum versions of match slots for training, which accepts any version."""
        return {slot: 0 for pool in self._pools.pools for slot in pool.evaluation_slots}

    async def cast(self, step: int, deadline: Deadline) -> None:
        """Draw the opponents of the steps from `step` on, and load them."""
        state = self._state
        if self._pools.together:
            return
        if self._redraws(step):
            seed, wanted = self._job.spec.seed, {}
            shares: dict[str, dict[str, Mixture]] = {name: {} for name in self._pools.learners}
            for number, pool in enumerate(self._pools.pools):
                mixtures = [state.mixtures[name][pool.name] for name in shares]
                frozen = [_frozen(one) for one in mixtures]
                some = [one for one in frozen if one]
                loaded, parts = share_slots(some, len(pool.slots), (seed, step, number))
                wanted[pool.name] = loaded
                drawn = iter(parts)
                for name, mixture, own in zip(shares, mixtures, frozen, strict=True):
                    rest = {one: p for one, p in mixture.items() if live_policy(one)}
                    left = 1.0 - sum(rest.values())
                    part = next(drawn) if own else {}
                    shares[name][pool.name] = rest | {m: left * p for m, p in part.items()}
            taken = {pool.name: pool.slots for pool in self._pools.pools}
            placed = self._place(wanted, taken)
            by_pool = {
                (pool.name, member): slot
                for pool in self._pools.pools
                for slot, member in placed.items()
                if slot in pool.slots
            }
            state.casting = Casting(
                step,
                placed,
                {
                    learner: {
                        pool: {
                            one if live_policy(one) else by_pool[pool, one]: share
                            for one, share in mixture.items()
                        }
                        for pool, mixture in pools.items()
                    }
                    for learner, pools in shares.items()
                },
            )
        assert state.casting is not None, "drawn above, or before"
        await self._load(state.casting.members, deadline)

    def _redraws(self, step: int) -> bool:
        casting, every = self._state.casting, self._population.redraw_steps
        return casting is None or bool(every and step >= casting.step + every)

    def cast_of(self, index: int) -> tuple[dict[str, str], list[str]]:
        """Return the policy that plays each agent in the training query at `index`, and its
        learners.

        A pure function of the job's seed and the draw of opponents, so the same after a restart.
        """
        casting = self._state.casting
        if self._pools.together or casting is None:
            return {}, []
        places = self._pools.places
        learner, seats = places[index % len(places)]
        own = seats[training_seat(index // len(places), len(seats))]
        rng = np.random.default_rng((self._job.spec.seed, index))
        cast = {own: learner}
        for agent in self._pools.agents:
            if agent != own:
                mixture = casting.shares[learner][self._pools.pool_of(agent).name]
                names, shares = list(mixture), np.array(list(mixture.values()))
                drawn = names[int(rng.choice(len(names), p=shares / shares.sum()))]
                cast[agent] = live_policy(drawn) or drawn
        return cast, [learner]

    def _place(
        self, wanted: Mapping[str, list[str]], slots: Mapping[str, tuple[str, ...]]
    ) -> dict[str, str]:
        """Assign the `wanted` members to slots, and return, by slot, the member to load.

        Members that are already loaded keep their slots.
        """
        placed: dict[str, str] = {}
        for pool, members in wanted.items():
            free = list(slots[pool])
            missing = []
            for member in members:
                there = [slot for slot in free if self._state.slots[slot][0] == member]
                if there:
                    placed[there[0]] = member
                    free.remove(there[0])
                else:
                    missing.append(member)
            placed |= dict(zip(free, missing, strict=False))
        return placed

    async def _load(self, members: Mapping[str, str], deadline: Deadline) -> None:
        state = self._state
        # Steps and matches load members concurrently: neither may unpublish a member that the other
        # has published and not yet put into a slot.
        async with self._placement_lock:
            changed = {slot: one for slot, one in members.items() if state.slots[slot][0] != one}
            before = {state.slots[slot][0] for slot in changed}
            refs: dict[str, common_pb.WeightsRef] = {}
            for member in dict.fromkeys(changed.values()):
                refs[member] = await self._weights.publish(state.members[member], deadline)
            loaded = {slot: (one, state.slots[slot][1] + 1) for slot, one in changed.items()}
            await self._store.save_slots(self._job.job_id, self._job.epoch, state, loaded)
        loads: list[Any] = [
            self.engines.update(slot_ref(slot, version, refs[member]), deadline)
            for slot, (member, version) in loaded.items()
        ]
        await run_all(*loads)
        async with self._placement_lock:
            held = {member for member, _ in state.slots.values()}
            over = {one.member_id for one in state.unneeded()}
            for member in sorted(before - held):
                await self._weights.drop(state.members[member], files=member in over)


def slot_ref(slot: str, version: int, weights: common_pb.WeightsRef) -> common_pb.WeightsRef:
    """Return a member's weights as version `version` of a slot."""
    found = common_pb.WeightsRef()
    found.CopyFrom(weights)
    found.policy, found.version = slot, version
    return found


def member_id_of(ref: common_pb.WeightsRef) -> str:
    """Return the member id of a frozen version: `{learner}@{version}`."""
    return f"{ref.policy}@{ref.version}"


def _frozen(mixture: Mixture) -> Mixture:
    return {name: share for name, share in mixture.items() if live_policy(name) is None}


class MemberWeights:
    """Client of the trainer workers that keep, publish and delete members' weights."""

    def __init__(self, job: JobContext, trainers: Trainers) -> None:
        self._job = job
        self._trainers = trainers

    async def freeze(self, learner: str) -> tuple[common_pb.WeightsRef, int]:
        """Write a learner's newest version as a member's files; return it and the files' bytes.

        The learner must have no open step. Raises `TroupeError` if retries fail.
        """
        deadline = Deadline(f"freezing {learner}", _SECONDS, "population")
        attempts = RetryBackoff(deadline)
        trainer = self._trainers.policies[learner]
        while True:
            try:
                worker = await trainer.bind(deadline)
                ref = trainer.weights
                request = trainer_pb.KeepMemberRequest(
                    request_id=new_id("member"),
                    job_id=self._job.job_id,
                    policy=learner,
                    version=ref.version,
                    checksum=ref.checksum,
                )
                async with worker.while_alive():
                    kept = await worker.trainer.KeepMember(request, timeout=deadline.left)
                return ref, kept.num_bytes
            except TroupeError as error:
                trainer.unbind_after(error)
                if error.kind == kinds.VERSION_NOT_KEPT:
                    # Bind again, which publishes the version again.
                    await trainer.rebind(deadline)
                    error = Unavailable(str(error))
                await attempts.failed(error)

    async def publish(self, member: FrozenMember, deadline: Deadline) -> common_pb.WeightsRef:
        """Publish a member's weights to the transfer layer, for engines to load.

        Raises NotFound of kind "member_gone" if no trainer worker has its files any more.
        """
        request = trainer_pb.PublishMemberRequest(
            request_id=new_id("member"),
            job_id=self._job.job_id,
            policy=member.learner,
            version=member.version,
            checksum=member.checksum,
        )
        response: trainer_pb.PublishMemberResponse = await self._call_any_worker(
            lambda worker: worker.trainer.PublishMember(request, timeout=deadline.left),
            deadline,
            f"publishing {member.member_id}",
        )
        return response.weights

    async def drop(self, member: FrozenMember, *, files: bool) -> None:
        """Unpublish a member's weights, and with `files` delete its files; best effort."""
        await _drop(self._job, member, files=files)

    async def _call_any_worker(
        self, call: Callable[[WorkerHandle], Awaitable[T]], deadline: Deadline, what: str
    ) -> T:
        """Return the answer of the first trainer worker that succeeds; `what` names the call in
        errors."""
        attempts, workers = RetryBackoff(deadline), self._job.shared.workers
        deadline.report(what)
        until = time.monotonic() + self._job.shared.settings.workers_timeout_seconds
        while True:
            refused: TroupeError | None = None
            passing: TroupeError | None = None
            for worker in workers.usable(_TRAINER):
                try:
                    async with worker.while_alive():
                        return await call(worker)
                except NotFound as error:
                    refused = error
                except TroupeError as error:
                    passing = error
            if passing is None and refused is not None:
                # Hosts may not share files: the worker that has them may be restarting.
                away = [one for one in workers.all() if one.kind == _TRAINER and not one.usable]
                if not away or time.monotonic() >= until:
                    raise refused
                deadline.report(f"{what}: waiting for {away[0]}, which may have its files")
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await deadline.wait(workers.change())
            elif passing is not None:
                await attempts.failed(passing)
            else:
                deadline.report(f"{what}: waiting for a trainer worker")
                await deadline.wait(workers.change())


async def unpublish_members(job: JobContext) -> None:
    """Unpublish all members of a job that has ended or is paused; their files stay.

    Workers that do not answer in time keep them. Raises `Superseded` if another orchestrator has
    taken the job over, since it may also have published members.
    """
    state = await job.shared.populations.load(job.job_id)
    if state is None:
        return
    held = {member for member, _ in state.slots.values()}
    # All members, not only those in slots: a crash may have left others published.
    members = sorted(state.members.values(), key=lambda one: one.member_id not in held)
    with suppress(TimeoutError):
        async with asyncio.timeout(job.shared.settings.cleanup_seconds):
            for one in members:
                await job.shared.store.check_epoch(job.job_id, job.epoch)
                await _drop(job, one, files=False)


async def _drop(job: JobContext, member: FrozenMember, *, files: bool) -> None:
    request = trainer_pb.DropMemberRequest(
        request_id=new_id("member"),
        job_id=job.job_id,
        policy=member.learner,
        version=member.version,
        files=files,
    )
    for worker in job.shared.workers.usable(_TRAINER):
        try:
            async with worker.while_alive():
                await worker.trainer.DropMember(request, timeout=_DROP_SECONDS)
        except TroupeError as error:
            _log.warning("member not dropped", member=member.member_id, error=str(error))
