"""The store as a step sees it: claims, leases and the commit of one (policy, step)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from troupe.rpc import DeadlineExceeded, FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

log = structlog.get_logger("troupe.trainer")

T = TypeVar("T")
Claim = store_pb.ClaimMicroBatchResponse
# What the store's answers take beyond the time that it was asked to wait.
_SLACK_SECONDS = 20.0
# Between two attempts to reach a store that the channel's own retries did not reach.
_PAUSE_SECONDS = 1.0


class StepClaims:
    """Everything that one claimant holds of one policy's step.

    A store that is away is waited for: the caller's deadline ends the wait.
    """

    def __init__(
        self, stub: Any, job_id: str, policy: str, step: int, claimant: str, lease: float
    ) -> None:
        self._stub = stub
        self._where: dict[str, Any] = {"job_id": job_id, "policy": policy, "step": step}
        self._claimant = claimant
        self._lease = lease
        # When the oldest lease was last known to be extended.
        self._extended = time.monotonic()
        self.claim_ids: list[str] = []

    @property
    def lapsed(self) -> bool:
        """Whether leases may have run out; if not, a lost claim was taken from us."""
        return time.monotonic() > self._extended + self._lease

    async def committed(self) -> store_pb.StepCommit | None:
        """The step's commit, if there is one."""
        commits = (await self._status()).commits
        return next((c for c in commits if c.policy == self._where["policy"]), None)

    async def claim(self, samples: int, tokens: int, wait: float) -> Claim:
        """Lease a micro-batch; waits in the store until one is ready or there is nothing more."""
        while True:
            asked = time.monotonic()
            # One id per question: the store answers a repeated one as it did the first time.
            request = store_pb.ClaimMicroBatchRequest(
                **self._where,
                request_id=new_id("claim"),
                claimant=self._claimant,
                max_samples=samples,
                max_tokens=tokens,
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
                return response
            if response.outcome == Claim.OUTCOME_EXHAUSTED:
                return response

    async def renew(self) -> None:
        """Extend all leases. Raises FailedPrecondition of kind "claim_lost"."""
        request = store_pb.RenewClaimsRequest(
            **self._where,
            request_id=new_id("renew"),
            claimant=self._claimant,
            lease_seconds=self._lease,
        )
        asked, held = time.monotonic(), len(self.claim_ids)
        try:
            response = await self._stub.RenewClaims(request, timeout=self._lease / 2)
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("leases not renewed", error=str(error), **self._where)
            return
        if response.renewed < held:
            raise FailedPrecondition(
                f"{held - response.renewed} of {held} claims were taken by another binding",
                kind="claim_lost",
                field="claimant",
                value=self._claimant,
            )
        self._extended = asked

    async def contested(self) -> bool:
        """Whether somebody holds samples of this step; asked when we hold none."""
        return any(
            counts.claimed > 0
            for counts in (await self._status()).counts
            if counts.policy == self._where["policy"]
        )

    async def release(self, *, everybody: bool = False, timeout: float | None = None) -> None:
        """Give back what this claimant (or everybody: they are superseded) holds."""
        self.claim_ids.clear()
        request = store_pb.ReleaseClaimsRequest(
            **self._where,
            request_id=new_id("release"),
            claimant="" if everybody else self._claimant,
        )
        if timeout is None:
            await self._patiently(lambda: self._stub.ReleaseClaims(request))
            return
        try:
            await self._stub.ReleaseClaims(request, timeout=timeout)
        except TroupeError as error:
            # The leases run out by themselves.
            log.warning("claims not released", error=str(error), **self._where)

    async def commit(
        self,
        outcome: store_pb.StepOutcome.ValueType,
        reason: str,
        weights: pb.WeightsRef,
        metrics: dict[str, float],
    ) -> store_pb.StepCommit:
        """End the step; returns the commit that holds, which may be somebody else's."""
        request = store_pb.CommitStepRequest(
            **self._where,
            request_id=new_id("commit"),
            claimant=self._claimant,
            claim_ids=self.claim_ids,
            outcome=outcome,
            reason=reason,
            weights=weights,
            metrics=metrics,
        )
        response = await self._patiently(lambda: self._stub.CommitStep(request))
        commit: store_pb.StepCommit = response.commit
        return commit

    async def _status(self) -> store_pb.GetStepResponse:
        request = store_pb.GetStepRequest(job_id=self._where["job_id"], step=self._where["step"])
        return await self._patiently(lambda: self._stub.GetStep(request))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except (Unavailable, DeadlineExceeded) as error:
                log.warning("experience store away", error=str(error), **self._where)
            await asyncio.sleep(_PAUSE_SECONDS)


def is_lost(error: TroupeError) -> bool:
    """Whether the store says that samples are no longer ours."""
    return isinstance(error, FailedPrecondition) and error.kind == "claim_lost"
