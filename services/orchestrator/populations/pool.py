"""The weights of members: frozen by whoever trains them, published when a slot wants them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
        request = tr.DropMemberRequest(
            request_id=new_id("member"),
            job_id=self._job.job_id,
            policy=member.learner,
            version=member.version,
            files=files,
        )
        for worker in self._job.shared.workers.usable(orch.WORKER_KIND_TRAINER):
            try:
                async with worker.while_alive():
                    await worker.trainer.DropMember(request, timeout=_DROP_SECONDS)
            except TroupeError as error:
                _log.warning("member not dropped", member=member.member_id, error=str(error))

    async def _anybody(
        self, call: Callable[[Worker], Awaitable[T]], patience: Patience, what: str
    ) -> T:
        """The answer of the first trainer worker that can give one."""
        attempts, workers = Attempts(patience), self._job.shared.workers
        patience.say(what)
        while True:
            refused: TroupeError | None = None
            passing: TroupeError | None = None
            for worker in workers.usable(orch.WORKER_KIND_TRAINER):
                try:
                    async with worker.while_alive():
                        return await call(worker)
                except NotFound as error:
                    refused = error
                except TroupeError as error:
                    passing = error
            if passing is None and refused is not None:
                raise refused
            if passing is not None:
                await attempts.failed(passing)
            else:
                patience.say(f"{what}: waiting for a trainer worker")
                await patience.wait(workers.change())


def member_id_of(ref: pb.WeightsRef) -> str:
    """`{learner}@{version}`."""
    return f"{ref.policy}@{ref.version}"


def slot_ref(slot: str, version: int, weights: pb.WeightsRef) -> pb.WeightsRef:
    """A member's weights as version `version` of the slot that is to serve them."""
    found = pb.WeightsRef()
    found.CopyFrom(weights)
    found.policy, found.version = slot, version
    return found
