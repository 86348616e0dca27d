"""The weights of members: frozen by whoever trains them, published when a slot wants them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.faults import Attempts, Patience
from services.orchestrator.populations.state import Member
from services.orchestrator.training import Trainers
from services.orchestrator.workers import Worker
from troupe.rpc import NotFound, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import trainer_pb2 as tr

T = TypeVar("T")
_log = structlog.get_logger(__name__)
# Writing or reading the files of one policy.
_SECONDS: Final = 600.0
_DROP_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_TRAINER: Final = orch.WORKER_KIND_TRAINER


class MemberWeights:
    """Has trainer workers keep, publish and drop members."""

    def __init__(self, job: JobContext, trainers: Trainers) -> None:
        self._job = job
        self._trainers = trainers

    async def freeze(self, learner: str) -> tuple[pb.WeightsRef, int]:
        """Keep a learner's newest version for good: what it is, and the bytes of its files.

        No step of it is open. Raises `TroupeError` when that fails for good.
        """
        patience = Patience(f"freezing {learner}", _SECONDS, "population")
        attempts = Attempts(patience)
        trainer = self._trainers.policies[learner]
        while True:
            try:
                worker = await trainer.bind(patience)
                ref = trainer.weights
                request = tr.KeepMemberRequest(
                    request_id=new_id("member"),
                    job_id=self._job.job_id,
                    policy=learner,
                    version=ref.version,
                    checksum=ref.checksum,
                )
                async with worker.while_alive():
                    kept = await worker.trainer.KeepMember(request, timeout=patience.left)
                return ref, kept.num_bytes
            except TroupeError as error:
                trainer.unbind_after(error)
                if error.kind == "version_not_kept":
                    # What is bound again is published again.
                    await trainer.rebind(patience)
                    error = Unavailable(str(error))
                await attempts.failed(error)

    async def publish(self, member: Member, patience: Patience) -> pb.WeightsRef:
        """Have engines find a member's weights.

        Raises NotFound of kind "member_gone" when no trainer worker has its files any more.
        """

        async def call(worker: Worker) -> pb.WeightsRef:
            request = tr.PublishMemberRequest(
                request_id=new_id("member"),
                job_id=self._job.job_id,
                policy=member.learner,
                version=member.version,
                checksum=member.checksum,
            )
            response = await worker.trainer.PublishMember(request, timeout=patience.left)
            weights: pb.WeightsRef = response.weights
            return weights

        return await self._anybody(call, patience, f"publishing {member.member_id}")

    async def drop(self, member: Member, *, files: bool) -> None:
        """Nobody plays it now; with `files`: never again. Who does not answer keeps it."""
        await _drop(self._job, member, files=files)

    async def _anybody(
        self, call: Callable[[Worker], Awaitable[T]], patience: Patience, what: str
    ) -> T:
        """The answer of the first trainer worker that can give one."""
        attempts, workers = Attempts(patience), self._job.shared.workers
        patience.say(what)
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
                # Hosts may share no files, and who has them may be about to come back.
                away = [one for one in workers.all() if one.kind == _TRAINER and not one.usable]
                if not away or time.monotonic() >= until:
                    raise refused
                patience.say(f"{what}: waiting for {away[0]}, which may have its files")
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await patience.wait(workers.change())
            elif passing is not None:
                await attempts.failed(passing)
            else:
                patience.say(f"{what}: waiting for a trainer worker")
                await patience.wait(workers.change())


async def let_go(job: JobContext) -> None:
    """Take all members of a job out of the transfer layer: it is over, or paused. Their files stay;
    whoever wants one again publishes it again. Who does not answer in time keeps them.

    Raises `Superseded`: whoever has the job now may have published its own.
    """
    state = await job.shared.populations.load(job.job_id)
    if state is None:
        return
    held = {member for member, _ in state.slots.values()}
    # A crash may have come between publishing others and saying where.
    members = sorted(state.members.values(), key=lambda one: one.member_id not in held)
    with suppress(TimeoutError):
        async with asyncio.timeout(job.shared.settings.cleanup_seconds):
            for one in members:
                await job.shared.store.check_epoch(job.job_id, job.epoch)
                await _drop(job, one, files=False)


async def _drop(job: JobContext, member: Member, *, files: bool) -> None:
    request = tr.DropMemberRequest(
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


def member_id_of(ref: pb.WeightsRef) -> str:
    """`{learner}@{version}`."""
    return f"{ref.policy}@{ref.version}"


def slot_ref(slot: str, version: int, weights: pb.WeightsRef) -> pb.WeightsRef:
    """A member's weights as version `version` of the slot that is to serve them."""
    found = pb.WeightsRef()
    found.CopyFrom(weights)
    found.policy, found.version = slot, version
    return found
