"""The experience store's client for one step of one policy: claims, leases, commit, values.

`StepClaims` holds the leases of one attempt at a step; `Values` loads columns kept by reference.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import structlog

from services.trainer.learning.samples import Load
from services.trainer.state.suspension import SuspendedStep
from troupe import prefixes
from troupe.contracts import kinds
from troupe.job import JobSpec
from troupe.rpc import (
    Attempts,
    DeadlineExceeded,
    FailedPrecondition,
    RetryPolicy,
    TroupeError,
    Unavailable,
    new_id,
)
from troupe.tensors import to_proto
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

log = structlog.get_logger("troupe.trainer")

Array = np.ndarray[Any, np.dtype[Any]]
# Function that fetches the value of a key; waits up to the given seconds (0: one try). Raises
# TransferError.
Fetch = Callable[[str, float], Array]
# Function that parses claimed samples into rows and loads their values.
Read = Callable[[Sequence[store_pb.ClaimedSample], Load], Sequence[Any]]

# Errors that count as a lost value: also one whose bytes have changed.
_GONE: Final = (KeyNotFound, Corrupt)
Claim = store_pb.ClaimMicroBatchResponse
# Seconds that the deadline of a claim exceeds the time that the store is asked to wait.
_SLACK_SECONDS = 20.0
_UNREACHABLE: Final = (Unavailable, DeadlineExceeded)
# Claims, and their bytes, that are kept because later samples begin with the same tokens.
_RECENT_CLAIMS: Final = 16
_RECENT_BYTES: Final = 128 * 2**20
# Retries once a second without limit, after the channel's own retries have failed.
_STORE_RETRY: Final = RetryPolicy(
    max_attempts=None, initial_backoff=1.0, max_backoff=1.0, jitter=0.0
)
_RELEASE_SECONDS = 3.0


class ValueGone(Exception):
    """No host has a value."""


class Values:
    """Loader of column values of claimed samples, for one attempt at a step. Blocking."""

    def __init__(self, fetch: Fetch, wait_seconds: float) -> None:
        """Create the loader. `wait_seconds`: how long to wait for the first missing value of a
        claim, since its host may return. Further missing values are not waited for, since a lost
        host loses many values.
        """
        self._fetch = fetch
        self._wait_seconds = wait_seconds
        # Remaining wait for the current claim, and its values.
        self._left = wait_seconds
        self._found: dict[str, Array] = {}

    def read(
        self, claimed: Sequence[store_pb.ClaimedSample], read: Read
    ) -> tuple[Sequence[Any], list[store_pb.Sample]]:
        """Parse a claim into rows; return them, and the samples left out because of lost values.

        Raises the errors of `read`, and TransferError: a retryable TransferTimeout while a host
        that may have a value does not answer.
        """
        self._left = self._wait_seconds
        found = self._found = {}

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

    def with_values(
        self, claimed: Iterable[store_pb.ClaimedSample]
    ) -> list[store_pb.ClaimedSample]:
        """Return copies of samples of the last claim that hold the values which `read` has
        loaded."""
        whole = []
        for item in claimed:
            columns, payloads = item.sample.columns.values(), item.sample.payloads
            referring = any(c.HasField("ref") or c.HasField("parts") for c in columns)
            if referring or any(payload.HasField("ref") for payload in payloads):
                given, item = item, store_pb.ClaimedSample()
                item.CopyFrom(given)
                for column in item.sample.columns.values():
                    if column.HasField("ref") and column.ref in self._found:
                        column.tensor.CopyFrom(to_proto(self._found[column.ref]))
                    elif column.HasField("parts"):
                        refs = (part.column.ref for part in column.parts.parts)
                        if all(ref in self._found for ref in refs if ref):
                            value = prefixes.column_value(column.parts, self._found.__getitem__)
                            column.tensor.CopyFrom(to_proto(value))
                for payload in item.sample.payloads:
                    if payload.HasField("ref") and payload.ref in self._found:
                        payload.data = self._found[payload.ref].tobytes()
            whole.append(item)
        return whole

    def _load(self, key: str) -> Array:
        try:
            return self._fetch(key, self._left)
        except (*_GONE, TransferTimeout) as error:
            if isinstance(error, TransferTimeout) and not isinstance(error.__cause__, _GONE):
                raise
            self._left = 0.0
            raise ValueGone(f"the value '{key}' is gone") from error


class RecentClaims:
    """The last claims of an attempt at a step, in unchanged form: later claims refer to their
    samples, which the store then does not send again."""

    def __init__(self, limit: int = _RECENT_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._claims: OrderedDict[str, tuple[int, list[store_pb.Sample]]] = OrderedDict()

    @property
    def claim_ids(self) -> list[str]:
        """The claims whose samples are here."""
        return list(self._claims)

    def complete(self, claim: Claim) -> None:
        """Add to `claim` the stems of its samples that arrived in earlier claims, and keep it."""
        samples = [item.sample for item in claim.samples]
        size = claim.ByteSize()
        if any(sample.HasField("stem") for sample in samples):
            known = {prefixes.key_of(one): one for _, some in self._claims.values() for one in some}
            known |= {prefixes.key_of(one): one for one in claim.stems}
            stems = prefixes.stems_of(samples, known)
            sent = {prefixes.key_of(one) for one in claim.stems}
            claim.stems.extend(one for one in stems if prefixes.key_of(one) not in sent)
        self._claims[claim.claim_id] = size, samples
        self._bytes += size
        while self._claims and (self._bytes > self._limit or len(self._claims) > _RECENT_CLAIMS):
            _, (size, _) = self._claims.popitem(last=False)
            self._bytes -= size


class StepClaims:
    """The claims and leases of one attempt at one policy's step.

    Each attempt has its own claimant id, so that a late response to an earlier attempt is not
    mistaken for a response to this one. Calls are retried while the store is unreachable.
    """

    def __init__(
        self,
        stub: Any,
        job_id: str,
        policy: str,
        step: int,
        claimant: str,
        lease: float,
        unfinished: SuspendedStep | None = None,
    ) -> None:
        """Begin an attempt. `unfinished`: continue with the claims of a suspended step."""
        self._stub = stub
        self._where: dict[str, Any] = {"job_id": job_id, "policy": policy, "step": step}
        self.claimant = f"{claimant}/{new_id()[:8]}" if unfinished is None else unfinished.claimant
        self._lease = lease
        # The time at which the oldest lease was last known to be extended.
        self._extended = time.monotonic()
        self._claiming: asyncio.Task[Claim] | None = None
        self._late_release: asyncio.Task[None] | None = None
        self._closed = False
        self.claim_ids: list[str] = [] if unfinished is None else list(unfinished.claim_ids)
        self._recent = RecentClaims()
        # Request id of the last claim, and of a suspended step's claim that has to be repeated.
        self.last_request = ""
        self._repeated_request = "" if unfinished is None else unfinished.pending_claim

    @property
    def lapsed(self) -> bool:
        """Whether leases may have expired; if not, a lost claim was taken by another binding."""
        return time.monotonic() > self._extended + self._lease

    async def committed(self, step: int | None = None) -> store_pb.StepCommit | None:
        """Return the commit of this step, or of another step that the store still has; None if
        none."""
        commits = (await self._status(step)).commits
        return next((c for c in commits if c.policy == self._where["policy"]), None)

    async def claim(self, bounds: Mapping[str, Any], wait: float) -> Claim:
        """Lease a micro-batch; the store waits until one is ready or the step is exhausted.

        `bounds`: fields of ClaimMicroBatchRequest (`bounds_of`).
        Cancelling the caller does not cancel the request: the store may still answer with samples,
        which `close` then releases.
        """
        self._claiming = asyncio.create_task(self._claim(bounds, wait))
        return await asyncio.shield(self._claiming)

    async def _claim(self, bounds: Mapping[str, Any], wait: float) -> Claim:
        while True:
            began = time.monotonic()
            # Retries reuse the request id, so that the store returns the same samples.
            self.last_request = self._repeated_request or new_id("claim")
            self._repeated_request = ""
            request = store_pb.ClaimMicroBatchRequest(
                **self._where,
                request_id=self.last_request,
                claimant=self.claimant,
                **bounds,
                lease_seconds=self._lease,
                wait_seconds=wait,
                known_claims=self._recent.claim_ids,
            )
            response: Claim = await self._repeated(
                self._stub.ClaimMicroBatch, request, timeout=wait + _SLACK_SECONDS
            )
            if response.outcome == Claim.OUTCOME_CLAIMED:
                if not self.claim_ids:
                    self._extended = began
                self.claim_ids.append(response.claim_id)
                self._recent.complete(response)
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
        began, held = time.monotonic(), len(self.claim_ids)
        try:
            response = await self._stub.RenewClaims(request, timeout=self._lease / 2)
        except _UNREACHABLE as error:
            log.warning("leases not renewed", error=str(error), **self._where)
            return
        if response.renewed < held:
            if await self.committed() is not None:
                return  # this attempt has committed: no lease is left
            raise FailedPrecondition(
                f"{held - response.renewed} of {held} claims were taken by another binding",
                kind=kinds.CLAIM_LOST,
                field="claimant",
                value=self.claimant,
            )
        self._extended = began

    async def drop_gone(self, claim_id: str, sample_ids: Sequence[str]) -> None:
        """Drop those samples of a claim whose values are lost; the claim keeps the others.

        Raises FailedPrecondition of kind "claim_lost".
        """
        request = store_pb.DropGoneRequest(
            **self._where,
            request_id=new_id("gone"),
            claimant=self.claimant,
            claim_id=claim_id,
            sample_ids=sample_ids,
        )
        await self._repeated(self._stub.DropGone, request)

    async def exchange(
        self, sums: store_pb.PairSums, wait: float, note: Callable[[Sequence[str]], None]
    ) -> store_pb.PairSums:
        """Give the policy's sums of joint pairs, and return those over all policies once each has
        given its own. `note` is called with the policies that are waited for.

        Raises FailedPrecondition of kind "claim_lost".
        """
        missing: Sequence[str] = [self._where["policy"]]
        while True:
            # Once the store has them, it is only asked: they may be megabytes, and others take
            # long.
            given = self._where["policy"] not in missing
            request = store_pb.ExchangePairSumsRequest(
                **self._where,
                request_id=new_id("pairs"),
                claimant=self.claimant,
                sums=None if given else sums,
                wait_seconds=wait,
            )
            answer: store_pb.ExchangePairSumsResponse = await self._repeated(
                self._stub.ExchangePairSums, request, timeout=wait + _SLACK_SECONDS
            )
            missing = answer.missing
            note(missing)
            if not missing:
                return answer.sums

    async def keep_rows(
        self,
        index: int,
        samples: Sequence[store_pb.ClaimedSample],
        sums: store_pb.PairSums | None = None,
    ) -> None:
        """Have the store keep a copy of the step's micro-batch `index`, or, after the last one, the
        `sums` that its joint pairs were learned with.

        Raises ResourceExhausted if there is no room, or if the message is too large.
        """
        request = store_pb.KeepRowsRequest(
            **self._where,
            request_id=new_id("keep"),
            claimant=self.claimant,
            index=index,
            samples=prefixes.share(samples),
            sums=sums,
        )
        await self._repeated(self._stub.KeepRows, request)

    async def contested(self) -> bool:
        """Return whether another claimant holds samples of this step, when this attempt holds
        none."""
        return any(
            counts.claimed > 0
            for counts in (await self._status()).counts
            if counts.policy == self._where["policy"]
        )

    async def supersede(self) -> None:
        """Release all claims of the step; their holders can then no longer commit it."""
        await self._repeated(self._stub.ReleaseClaims, self._release_request(""))

    async def close(self) -> None:
        """Release all claims; a claim in flight is released in the background (`settled`)."""
        self._closed = True
        await self._release()
        if self._claiming is not None and not self._claiming.done():
            self._late_release = asyncio.create_task(self._release_late(self._claiming))

    async def freeze(self) -> None:
        """Stop claiming without releasing anything: the suspended step keeps its claims."""
        self._closed = True
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.wait({self._claiming})

    async def settled(self) -> None:
        """Wait until a claim that was in flight at `close` is released."""
        if self._late_release is not None:
            await asyncio.wait({self._late_release})

    async def _release_late(self, claiming: asyncio.Task[Claim]) -> None:
        await asyncio.wait({claiming})
        failed = claiming.cancelled() or claiming.exception() is not None
        if not failed and claiming.result().outcome == Claim.OUTCOME_CLAIMED:
            await self._release()

    async def _release(self) -> None:
        self.claim_ids.clear()
        try:
            request = self._release_request(self.claimant)
            await self._stub.ReleaseClaims(request, timeout=_RELEASE_SECONDS)
        except TroupeError as error:
            # The claims are then released when their leases expire.
            log.warning("claims not released", error=str(error), **self._where)

    def _release_request(self, claimant: str) -> store_pb.ReleaseClaimsRequest:
        return store_pb.ReleaseClaimsRequest(
            **self._where, request_id=new_id("release"), claimant=claimant
        )

    async def commit(
        self,
        outcome: store_pb.StepOutcome.ValueType,
        reason: str,
        weights: common_pb.WeightsRef,
        metrics: dict[str, float],
        digest: int | None = None,
        *,
        durable: bool = False,
        kept: int | None = None,
        sums: store_pb.PairSums | None = None,
    ) -> store_pb.CommitStepResponse:
        """Commit the step; the answer has the valid commit, which may be another binding's.

        `digest`: digest of the samples whose gradients are in `weights`. `durable`: the state of
        these weights is on disk; `kept`: it is not, but the rows of this many micro-batches are
        kept. `sums`: as given to `exchange`. Raises FailedPrecondition of kind "digest_mismatch" if
        the claims have other samples.
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
            kept_micro_batches=kept,
            durable=durable,
            pair_sums=sums,
        )
        response: store_pb.CommitStepResponse = await self._repeated(self._stub.CommitStep, request)
        return response

    async def _status(self, step: int | None = None) -> store_pb.GetStepResponse:
        request = store_pb.GetStepRequest(
            job_id=self._where["job_id"],
            step=self._where["step"] if step is None else step,
            counts_only=True,
        )
        status: store_pb.GetStepResponse = await self._repeated(self._stub.GetStep, request)
        return status

    async def _repeated(self, call: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Return the answer to an RPC, which is repeated while the store is unreachable until
        `close`."""

        def retryable(error: Exception) -> bool:
            return isinstance(error, _UNREACHABLE) and not self._closed

        attempts = Attempts(_STORE_RETRY, timeout=None, retryable=retryable)
        while True:
            try:
                return await call(*args, **how)
            except TroupeError as error:
                if retryable(error):
                    log.warning("experience store unreachable", error=str(error), **self._where)
                await attempts.failed(error)


def is_lost(error: TroupeError) -> bool:
    """Return whether the store reports lost claims."""
    return isinstance(error, FailedPrecondition) and error.kind == kinds.CLAIM_LOST


def bounds_of(spec: JobSpec, oldest_version: int | None) -> dict[str, Any]:
    """Return the limits of a job's micro-batches, as fields of ClaimMicroBatchRequest."""
    pipeline = spec.pipeline
    return {
        "max_samples": pipeline.micro_batch_samples,
        "max_tokens": pipeline.micro_batch_tokens,
        "oldest_version": None if oldest_version is None else max(0, oldest_version),
        # Whole groups: gradients are computed by group, or groups are dropped and replaced whole.
        "whole_groups": pipeline.deterministic or pipeline.dynamic_sampling,
        "balance_tokens": pipeline.balance_tokens,
    }


def last_refs(claim: Claim, max_uses: int) -> Iterator[str]:
    """Return the keys of columns and payloads of those samples of a claim that are trained for the
    last time."""
    return refs_of(c.sample for c in claim.samples if c.sample.uses + 1 >= max_uses)


def refs_of(samples: Iterable[store_pb.Sample], *, shared: bool = True) -> Iterator[str]:
    """Yield the keys of columns and payloads that samples keep by reference, except keys of earlier
    samples that they begin with. `shared`: also of columns that later samples may begin with."""
    for sample in samples:
        for name, column in sample.columns.items():
            if name in prefixes.SHARED_COLUMNS and not shared:
                continue
            own = column.parts.parts[-1].column if column.HasField("parts") else column
            if own.HasField("ref"):
                yield own.ref
        if shared:
            yield from (payload.ref for payload in sample.payloads if payload.HasField("ref"))
