"""The store as a step sees it: claims, leases and the commit of one (policy, step)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import numpy as np
import structlog

from services.trainer.learning.samples import Load
from services.trainer.state.suspension import HalfStep
from troupe.job import JobSpec
from troupe.rpc import DeadlineExceeded, FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

Array = np.ndarray[Any, np.dtype[Any]]
# The value under a key, waiting so many seconds for it (0: asking once). Raises TransferError.
Fetch = Callable[[str, float], Array]
# Rows of claimed samples, whose values it loads.
Read = Callable[[Sequence[store_pb.ClaimedSample], Load], Sequence[Any]]

# What is not what was set is as good as gone.
_GONE: Final = (KeyNotFound, Corrupt)


class ValueGone(Exception):
    """No host has the value under `key`."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the value '{key}' is gone")
        self.key = key


class Values:
    """Loads values for one attempt at a step. Blocking."""

    def __init__(self, fetch: Fetch, patience: float) -> None:
        """`patience`: seconds that the first value of a claim which is nowhere is waited for: a
        host that is away may come back. No other one of the claim is: hosts are lost with many
        values at once. The next claim, which may be hours later, waits anew."""
        self._fetch = fetch
        self._patience = patience
        # What is left of it for the claim that is being read.
        self._left = patience

    def read(
        self, claimed: Sequence[store_pb.ClaimedSample], read: Read
    ) -> tuple[Sequence[Any], list[store_pb.Sample]]:
        """The rows of a claim, and those of its samples that values are gone of.

        Raises what `read` does, and TransferError: TransferTimeout, which repetition may cure,
        while a host that may have a value does not answer.
        """
        self._left = self._patience
        found: dict[str, Array] = {}

        def load(key: str) -> Array:
            if key not in found:
                found[key] = self._load(key)
            return found[key]

        try:
            return read(claimed, load), []
        except ValueGone:
            pass
        kept: list[store_pb.ClaimedSample] = []
        gone: list[store_pb.Sample] = []
        for item in claimed:
            try:
                read([item], load)
            except ValueGone:
                gone.append(item.sample)
            else:
                kept.append(item)
        return read(kept, load), gone

    def _load(self, key: str) -> Array:
        try:
            return self._fetch(key, self._left)
        except (*_GONE, TransferTimeout) as error:
            if isinstance(error, TransferTimeout) and not isinstance(error.__cause__, _GONE):
                raise
            self._left = 0.0
            raise ValueGone(key) from error


log = structlog.get_logger("troupe.trainer")

T = TypeVar("T")
Claim = store_pb.ClaimMicroBatchResponse
# What the store's answers take beyond the time that it was asked to wait.
_SLACK_SECONDS = 20.0
# Between two attempts to reach a store that the channel's own retries did not reach.
_PAUSE_SECONDS = 1.0
_RELEASE_SECONDS = 3.0


@dataclass(frozen=True)
class Bounds:
    """What a micro-batch may consist of; fields as in ClaimMicroBatchRequest."""

    max_samples: int
    max_tokens: int = 0
    oldest_version: int | None = None
    whole_groups: bool = False
    balance_tokens: bool = False


class StepClaims:
    """Everything that one attempt at one policy's step holds.

    Each attempt is a claimant of its own, so that a late answer to an earlier one is not
    taken for its own.     A store that is away is waited for: the caller's deadline ends the wait.
    """

    def __init__(
        self,
        stub: Any,
        job_id: str,
        policy: str,
        step: int,
        claimant: str,
        lease: float,
        half: HalfStep | None = None,
    ) -> None:
        """`half`: go on with what a step held that was suspended."""
        self._stub = stub
        self._where: dict[str, Any] = {"job_id": job_id, "policy": policy, "step": step}
        self.claimant = f"{claimant}/{new_id()[:8]}" if half is None else half.claimant
        self._lease = lease
        # When the oldest lease was last known to be extended.
        self._extended = time.monotonic()
        self._asking: asyncio.Task[Claim] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._closed = False
        self.claim_ids: list[str] = [] if half is None else list(half.claim_ids)
        # The id of the last question; of one that is to be asked again.
        self.question = ""
        self._again = "" if half is None else half.question

    @property
    def lapsed(self) -> bool:
        """Whether leases may have run out; if not, a lost claim was taken from us."""
        return time.monotonic() > self._extended + self._lease

    async def committed(self, step: int | None = None) -> store_pb.StepCommit | None:
        """The step's commit, if there is one; or that of another step, if it is kept."""
        commits = (await self._status(step)).commits
        return next((c for c in commits if c.policy == self._where["policy"]), None)

    async def claim(self, bounds: Bounds, wait: float) -> Claim:
        """Lease a micro-batch; waits in the store until one is ready or there is nothing more.

        A caller that is cancelled does not take the question back: the store may still answer
        it with samples, which `close` then returns.
        """
        self._asking = asyncio.create_task(self._ask(bounds, wait))
        return await asyncio.shield(self._asking)

    async def _ask(self, bounds: Bounds, wait: float) -> Claim:
        while True:
            asked = time.monotonic()
            # One id per question: the store answers a repeated one as it did the first time.
            self.question, self._again = self._again or new_id("claim"), ""
            request = store_pb.ClaimMicroBatchRequest(
                **self._where,
                request_id=self.question,
                claimant=self.claimant,
                **asdict(bounds),
                lease_seconds=self._lease,
                wait_seconds=wait,
            )
            response: Claim = await self._patiently(
                lambda request=request: self._stub.ClaimMicroBatch(  # type: ignore[misc]
                    request, timeout=wait + _SLACK_SECONDS
                )
            )
            if response.outcome == Claim.OUTCOME_CLAIMED:
                if not self.claim_ids:
                    self._extended = asked
                self.claim_ids.append(response.claim_id)
            if response.outcome != Claim.OUTCOME_WAIT or self._closed:
                return response

    async def renew(self) -> None:
        """Extend all leases. Raises FailedPrecondition of kind "claim_lost"."""
        request = store_pb.RenewClaimsRequest(
            **self._where,
            request_id=new_id("renew"),
            claimant=self.claimant,
            lease_seconds=self._lease,
        )
        asked, held = time.monotonic(), len(self.claim_ids)
        try:
            response = await self._stub.RenewClaims(request, timeout=self._lease / 2)
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("leases not renewed", error=str(error), **self._where)
            return
        if response.renewed < held:
            if await self.committed() is not None:
                return  # by us: the answer is under way, and nothing is left to renew
            raise FailedPrecondition(
                f"{held - response.renewed} of {held} claims were taken by another binding",
                kind="claim_lost",
                field="claimant",
                value=self.claimant,
            )
        self._extended = asked

    async def drop_gone(self, claim_id: str, sample_ids: Sequence[str]) -> None:
        """Drop samples of a claim, which goes on with the others: values of theirs are gone.

        Raises FailedPrecondition of kind "claim_lost".
        """
        request = store_pb.DropGoneRequest(
            **self._where,
            request_id=new_id("gone"),
            claimant=self.claimant,
            claim_id=claim_id,
            sample_ids=sample_ids,
        )
        await self._patiently(lambda: self._stub.DropGone(request))

    async def contested(self) -> bool:
        """Whether somebody holds samples of this step; asked when we hold none."""
        return any(
            counts.claimed > 0
            for counts in (await self._status()).counts
            if counts.policy == self._where["policy"]
        )

    async def supersede(self) -> None:
        """Give back what anybody holds of the step; they can no longer commit it."""
        await self._patiently(lambda: self._stub.ReleaseClaims(self._release_request("")))

    async def close(self) -> None:
        """Give everything back, also what is being claimed right now; that is not waited for."""
        self._closed = True
        await self._give_back()
        if self._asking is not None and not self._asking.done():
            self._leaving = asyncio.create_task(self._give_back_late(self._asking))

    async def freeze(self) -> None:
        """Ask no more, and give nothing back: somebody else goes on with what is held."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def settled(self) -> None:
        """Wait until the last claim under way was answered and given back."""
        if self._leaving is not None:
            await asyncio.wait({self._leaving})

    async def _give_back_late(self, asking: asyncio.Task[Claim]) -> None:
        await asyncio.wait({asking})
        failed = asking.cancelled() or asking.exception() is not None
        if not failed and asking.result().outcome == Claim.OUTCOME_CLAIMED:
            await self._give_back()

    async def _give_back(self) -> None:
        self.claim_ids.clear()
        try:
            request = self._release_request(self.claimant)
            await self._stub.ReleaseClaims(request, timeout=_RELEASE_SECONDS)
        except TroupeError as error:
            # The leases run out by themselves.
            log.warning("claims not released", error=str(error), **self._where)

    def _release_request(self, claimant: str) -> store_pb.ReleaseClaimsRequest:
        return store_pb.ReleaseClaimsRequest(
            **self._where, request_id=new_id("release"), claimant=claimant
        )

    async def commit(
        self,
        outcome: store_pb.StepOutcome.ValueType,
        reason: str,
        weights: pb.WeightsRef,
        metrics: dict[str, float],
        digest: int | None = None,
    ) -> store_pb.StepCommit:
        """End the step; returns the commit that holds, which may be somebody else's.

        `digest`: of the samples whose gradients are in `weights`. Raises FailedPrecondition of
        kind "digest_mismatch" when they are not those that we hold.
        """
        request = store_pb.CommitStepRequest(
            **self._where,
            request_id=new_id("commit"),
            claimant=self.claimant,
            claim_ids=self.claim_ids,
            outcome=outcome,
            reason=reason,
            weights=weights,
            metrics=metrics,
            samples_digest=digest,
        )
        response = await self._patiently(lambda: self._stub.CommitStep(request))
        commit: store_pb.StepCommit = response.commit
        return commit

    async def _status(self, step: int | None = None) -> store_pb.GetStepResponse:
        request = store_pb.GetStepRequest(
            job_id=self._where["job_id"],
            step=self._where["step"] if step is None else step,
            counts_only=True,
        )
        return await self._patiently(lambda: self._stub.GetStep(request))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except (Unavailable, DeadlineExceeded) as error:
                if self._closed:
                    raise
                log.warning("experience store away", error=str(error), **self._where)
            await asyncio.sleep(_PAUSE_SECONDS)


def is_lost(error: TroupeError) -> bool:
    """Whether the store says that samples are no longer ours."""
    return isinstance(error, FailedPrecondition) and error.kind == "claim_lost"


def bounds_of(spec: JobSpec, oldest_version: int | None) -> Bounds:
    """What micro-batches of a job consist of."""
    pipeline = spec.pipeline
    return Bounds(
        max_samples=pipeline.micro_batch_samples,
        max_tokens=pipeline.micro_batch_tokens,
        oldest_version=None if oldest_version is None else max(0, oldest_version),
        # A group is the unit of gradient, or is dropped and replaced as a whole.
        whole_groups=pipeline.deterministic or pipeline.dynamic_sampling,
        balance_tokens=pipeline.balance_tokens,
    )


def last_refs(claim: Claim, max_uses: int) -> Iterator[str]:
    """Keys of columns that nobody needs once these samples are trained again."""
    return refs_of(c.sample for c in claim.samples if c.sample.uses + 1 >= max_uses)


def refs_of(samples: Iterable[store_pb.Sample]) -> Iterator[str]:
    """Keys of columns that samples keep by reference."""
    for sample in samples:
        yield from (column.ref for column in sample.columns.values() if column.HasField("ref"))
