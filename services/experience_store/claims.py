"""Leases on ready samples.

A claim holds its samples until it is committed, released, or its lease runs out by the clock of
Redis. Lost for good in the last two cases: its id never holds anything again, and whoever lost a
lease must give up what it accumulated (release) before it may claim in this step again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.experience_store.delivery import Delivery
from services.experience_store.notices import CLAIMABLE, Notices
from services.experience_store.records import Record
from services.experience_store.samples import PayloadGoneError, Samples
from services.experience_store.steps import Steps
from services.experience_store.tables import Tables
from troupe.rpc import FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb

Response = store_pb.ClaimMicroBatchResponse

# Payload bytes of one claim: its response must pass the message limit (64 MiB by default).
CLAIM_BYTES: Final = 32 * 2**20
# A group that may not be split can need more, but it has to pass that limit too.
GROUP_BYTES: Final = 60 * 2**20
_CAUSES: Final = {
    "expired": "its lease ran out",
    "released": "it was released",
    "superseded": "another binding took over",
    "unknown": "no such claim is held",
}


@dataclass(frozen=True)
class ClaimRequest:
    """What a claimant asks for."""

    job: str
    policy: str
    step: int
    claim: str
    """Caller-supplied; repeating it returns the same samples."""
    claimant: str
    max_samples: int
    max_tokens: int
    """0: no bound."""
    lease_seconds: float
    oldest_version: int | None = None
    """Groups with a sample that an older version began are dropped as "stale". It belongs to the
    step: the highest that any claim named holds, a lower one is ignored, because what the higher
    one excluded is gone for good."""
    whole_groups: bool = False
    """Never split a group over two claims, even if that exceeds the bounds."""
    balance_tokens: bool = False
    """Choose samples such that claims have about equally many tokens, not in order of their ids.
    Once a claim asked for it, the samples of its step are kept in order of tokens."""


class Claims:
    """Claims, renewals and releases."""

    def __init__(self, tables: Tables, steps: Steps, samples: Samples, notices: Notices) -> None:
        self._tables = tables
        self._steps = steps
        self._samples = samples
        self._notices = notices

    async def claim(
        self,
        request: ClaimRequest,
        wait_seconds: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> Delivery:
        """Lease a micro-batch, waiting at most `wait_seconds` for a full one, or until whoever
        asked is `gone`: what was leased to the dead would be missing until the lease runs out.

        Raises `FailedPrecondition` of kind `claim_lost` when the claim was lost before, or its
        claimant was superseded, of kind `group_too_large` when a whole group cannot be sent.
        """
        await self._tables.check_policy(request.job, request.policy)
        deadline = time.monotonic() + wait_seconds
        with self._notices.listen(
            request.job,
            policy=request.policy,
            step=request.step,
            kinds=frozenset({CLAIMABLE}),
        ) as bell:
            while True:
                if gone():
                    return Delivery.of(Response.OUTCOME_WAIT)
                response, expiry_seconds = await self._try(request)
                left = deadline - time.monotonic()
                if (
                    response.outcome != Response.OUTCOME_WAIT
                    or left <= 0
                    or self._notices.closing
                    or bell.dropped
                ):
                    return response
                await bell.wait(min(left, expiry_seconds))

    async def _try(self, request: ClaimRequest) -> tuple[Delivery, float]:
        """One attempt; with WAIT, the seconds until a lease runs out."""
        outcome, *rest = await self._steps.on_table(
            "claim",
            request.job,
            request.policy,
            request.step,
            request.claim,
            request.claimant,
            request.max_samples,
            request.max_tokens,
            CLAIM_BYTES,
            _milliseconds(request.lease_seconds),
            "" if request.oldest_version is None else request.oldest_version,
            int(request.whole_groups),
            int(request.balance_tokens),
            GROUP_BYTES,
        )
        if outcome == b"wait":
            expiry = int(rest[0]) / 1000 if int(rest[0]) else math.inf
            return Delivery.of(Response.OUTCOME_WAIT), expiry
        if outcome == b"exhausted":
            return Delivery.of(Response.OUTCOME_EXHAUSTED), math.inf
        if outcome == b"taken":
            raise lost(request.claim, f"it belongs to {rest[0].decode()}")
        if outcome == b"lost":
            raise lost(request.claim, cause_text(rest[0]))
        if outcome == b"too_large":
            raise _too_large(rest[0].decode(), int(rest[1]))
        return await self._deliver(request, *rest), math.inf

    async def _deliver(
        self,
        request: ClaimRequest,
        samples: bytes,
        records: bytes,
        groups: bytes,
        rewards: bytes,
    ) -> Delivery:
        """Lines of samples, of their records, and of rewards; `groups` says for every sample which
        of `rewards`, counted from 1, are its group's.
        """
        if not samples:
            # A repeated claim, whose samples were all dropped meanwhile.
            return Delivery.claimed(request.claim, [], [])
        ids, texts = samples.decode().split("\n"), records.decode().split("\n")
        parsed = list(zip(ids, map(Record.parse, texts), strict=True))
        rewards_of = [[float(one) for one in line.split(b",")] for line in rewards.split(b"\n")]
        try:
            payloads = await self._samples.take(request.job, request.policy, request.step, parsed)
        except PayloadGoneError as error:
            # Committed or dropped by somebody else since the script ran.
            raise lost(request.claim, "its samples are gone") from error
        rows = (
            (payload, record, int(group) - 1)
            for payload, (_, record), group in zip(
                payloads, parsed, groups.split(b","), strict=True
            )
        )
        return Delivery.claimed(request.claim, rows, rewards_of)

    async def renew(
        self, job: str, policy: str, step: int, claimant: str, lease_seconds: float
    ) -> int:
        """Extend all live leases of `claimant`; returns how many claims it holds.

        Raises `FailedPrecondition` of kind `claim_lost` when it lost one.
        """
        await self._tables.check_policy(job, policy)
        outcome, value = await self._steps.on_table(
            "renew", job, policy, step, claimant, _milliseconds(lease_seconds)
        )
        if outcome == b"lost":
            raise lost("", cause_text(value), claimant=claimant)
        return int(value)

    async def release(self, job: str, policy: str, step: int, claimant: str) -> int:
        """Give back what `claimant` holds ('': what anybody holds); returns how many samples.

        A claimant that releases starts afresh. Those whom '' releases are superseded: the next
        one to claim goes on, the others are refused.
        """
        await self._tables.check_policy(job, policy)
        _, released = await self._steps.on_table("release", job, policy, step, claimant)
        self._notices.written(job, policy, step)
        return int(released)

    async def drop_gone(
        self,
        job: str,
        policy: str,
        step: int,
        claimant: str,
        claim: str,
        samples: Sequence[str],
    ) -> int:
        """Drop those of `samples` that a claim holds: values of theirs are nowhere any more. The
        claim goes on with the others. Returns how many were dropped.

        Raises `FailedPrecondition` of kind `claim_lost` for a claim that is not `claimant`'s.
        """
        await self._tables.check_policy(job, policy)
        outcome, value = await self._steps.on_table(
            "drop_gone", job, policy, step, claim, claimant, *samples
        )
        if outcome == b"taken":
            raise lost(claim, f"it belongs to {value.decode()}")
        if outcome == b"lost":
            raise lost(claim, cause_text(value))
        self._notices.written(job, policy, step)
        return int(value)


def lost(claim: str, why: str, *, claimant: str | None = None) -> FailedPrecondition:
    """The error of a claim that holds nothing (any more)."""
    subject = f"claim {claim}" if claim else f"a claim of {claimant}"
    return FailedPrecondition(
        f"{subject} is lost: {why}",
        kind="claim_lost",
        field="claim_id" if claim else "claimant",
        value=claim or claimant,
        remedy="Throw the accumulated gradients away, release, and begin the step again.",
    )


def cause_text(value: bytes) -> str:
    """Why a claim was lost, in words."""
    return _CAUSES.get(value.decode(), value.decode())


def _too_large(group: str, size: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"group {group} has {size:,} bytes, one claim can carry {GROUP_BYTES:,}",
        kind="group_too_large",
        field="whole_groups",
        value=group,
        remedy="Claim without whole_groups, or run fewer or shorter trajectories per query.",
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
