"""Leases on ready samples.

A claim holds its samples until it is committed or released, or until its lease expires by the Redis
clock. A released or expired claim is lost for good: its id never holds samples again. A claimant
that lost a lease must discard its accumulated gradients and release before it may claim in this
step again.

A commit ends a policy's step: one script marks the samples of its claims TRAINED and moves the
version. `PairExchange` sums the margins of pairs that several policies learn together, from
their trainers. `KeptRows` holds copies of trained rows, from which a version can be recomputed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.experience_store.database import Database, ScriptCall
from services.experience_store.notices import CLAIMABLE, COUNTS, Notices
from services.experience_store.records import (
    LETTER_OF,
    PolicyKeys,
    RawRow,
    SampleRecord,
    commit_bytes,
    parse_commit,
)
from services.experience_store.requests import clean_reason
from services.experience_store.samples import PayloadGoneError, Samples
from services.experience_store.steps import StepStore
from services.experience_store.tables import TableRegistry
from services.experience_store.versions import checksum_conflict, version_gap, version_of_commit
from troupe.contracts import kinds
from troupe.experience import samples_digest
from troupe.rpc import DataLoss, FailedPrecondition, InvalidArgument
from troupe.rpc.protobuf_wire import tag, varint
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

Response = store_pb.ClaimMicroBatchResponse

_SAMPLES: Final = tag(Response.SAMPLES_FIELD_NUMBER)
_STEMS: Final = tag(Response.STEMS_FIELD_NUMBER)
_SAMPLE: Final = tag(store_pb.ClaimedSample.SAMPLE_FIELD_NUMBER)


@dataclass(frozen=True)
class Delivery:
    """The serialized answer to a claim, which joins the raw rows of its samples (for the cost of
    parsing and serializing them again, see `server.WriteBatch`)."""

    outcome: store_pb.ClaimMicroBatchResponse.Outcome.ValueType
    message: bytes
    """A serialized ClaimMicroBatchResponse."""
    samples: int = 0

    @staticmethod
    def of(outcome: store_pb.ClaimMicroBatchResponse.Outcome.ValueType) -> Delivery:
        """Return an answer without samples."""
        return Delivery(outcome, Response(outcome=outcome).SerializeToString())

    @staticmethod
    def claimed(
        claim: str,
        rows: Iterable[tuple[RawRow, SampleRecord, int]],
        rewards: Sequence[Sequence[float]],
        stems: Iterable[RawRow] = (),
    ) -> Delivery:
        """Return an answer with samples: the raw row and record of each, and the index of its
        group's rewards in `rewards`. `stems` has the other raw rows that they refer to."""
        ends = [
            store_pb.ClaimedSample(group_rewards=values).SerializeToString() for values in rewards
        ]
        outcome = Response.OUTCOME_CLAIMED
        parts: list[RawRow] = [Response(outcome=outcome, claim_id=claim).SerializeToString()]
        count = 0
        for raw_row, record, group in rows:
            # Concatenated serialized messages merge when they are parsed.
            moved, end = record.moved(), ends[group]
            begin = _SAMPLE + varint(len(raw_row) + len(moved))
            size = len(begin) + len(raw_row) + len(moved) + len(end)
            parts += (_SAMPLES, varint(size), begin, raw_row, moved, end)
            count += 1
        for raw_row in stems:
            parts += (_STEMS, varint(len(raw_row)), raw_row)
        return Delivery(outcome, b"".join(parts), count)


# Bytes of rows of one claim: its response must stay within the message limit (64 MiB by default).
CLAIM_BYTES: Final = 32 * 2**20
# A group that may not be split can need more, within the same limit.
GROUP_BYTES: Final = 60 * 2**20
_CAUSES: Final = {
    "expired": "its lease ran out",
    "released": "it was released",
    "superseded": "another binding took over",
    "committed": "another binding has committed the step",
    "unknown": "no such claim is held",
}
# State of a step's samples after its commit, by outcome.
_TARGETS: Final = {
    store_pb.STEP_OUTCOME_APPLIED: LETTER_OF[common_pb.SAMPLE_STATE_TRAINED],
    store_pb.STEP_OUTCOME_SKIPPED: LETTER_OF[common_pb.SAMPLE_STATE_DROPPED],
    store_pb.STEP_OUTCOME_EMPTY: "",
}


class Claims:
    """Claims, renewals, releases and commits."""

    def __init__(
        self,
        database: Database,
        tables: TableRegistry,
        steps: StepStore,
        samples: Samples,
        notices: Notices,
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._samples = samples
        self._notices = notices

    async def claim(
        self, request: store_pb.ClaimMicroBatchRequest, wait_seconds: float
    ) -> Delivery:
        """Lease a micro-batch, waiting at most `wait_seconds` for a full one.

        `oldest_version` belongs to the step: the highest value that any claim named applies. A
        lower one is ignored, because samples excluded by a higher one are gone for good. Once a
        claim has asked for `balance_tokens`, the step's samples are ordered by tokens instead of
        ids.

        Raises `FailedPrecondition` of kind `claim_lost` when the claim is already lost or its
        claimant superseded, and of kind `group_too_large` when a whole group cannot be sent.
        """
        job, policy, step = request.job_id, request.policy, request.step
        await self._tables.check_policy(job, policy)
        deadline = time.monotonic() + wait_seconds
        with self._notices.listen(
            job, policy=policy, step=step, kinds=frozenset({CLAIMABLE})
        ) as subscription:
            while True:
                response, expiry_seconds = await self._try(request)
                left = deadline - time.monotonic()
                if (
                    response.outcome != Response.OUTCOME_WAIT
                    or left <= 0
                    or self._notices.closing
                    or subscription.dropped
                ):
                    return response
                await subscription.wait(min(left, expiry_seconds))

    async def _try(self, request: store_pb.ClaimMicroBatchRequest) -> tuple[Delivery, float]:
        """Try once; return the answer and, with WAIT, the seconds until a lease expires."""
        outcome, *rest = await self._steps.on_table(
            "claim",
            request.job_id,
            request.policy,
            request.step,
            request.request_id,
            request.claimant,
            request.max_samples,
            request.max_tokens,
            CLAIM_BYTES,
            _milliseconds(request.lease_seconds),
            request.oldest_version if request.HasField("oldest_version") else "",
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
            raise lost(request.request_id, f"it belongs to {rest[0].decode()}")
        if outcome == b"lost":
            raise lost(request.request_id, cause_text(rest[0]))
        if outcome == b"too_large":
            raise _too_large(rest[0].decode(), int(rest[1]))
        return await self._deliver(request, *rest), math.inf

    async def _deliver(
        self,
        request: store_pb.ClaimMicroBatchRequest,
        samples: bytes,
        records: bytes,
        groups: bytes,
        rewards: bytes,
    ) -> Delivery:
        """Parse the reply of claim.lua: lines of samples, records and rewards. `groups` gives each
        sample the line of its group in `rewards`, from 1.
        """
        if not samples:
            # A repeated claim whose samples have all been dropped since.
            return Delivery.claimed(request.request_id, [], [])
        ids, texts = samples.decode().split("\n"), records.decode().split("\n")
        parsed = list(zip(ids, map(SampleRecord.parse, texts), strict=True))
        rewards_of = [[float(one) for one in line.split(b",")] for line in rewards.split(b"\n")]
        try:
            raw_rows, stems = await self._samples.take(
                request.job_id, request.policy, request.step, parsed, request.known_claims
            )
        except PayloadGoneError as error:
            # Another caller committed or dropped them since the script ran.
            raise lost(request.request_id, "its samples are gone") from error
        rows = (
            (raw_row, record, int(group) - 1)
            for raw_row, (_, record), group in zip(
                raw_rows, parsed, groups.split(b","), strict=True
            )
        )
        return Delivery.claimed(request.request_id, rows, rewards_of, stems)

    async def renew(
        self, job: str, policy: str, step: int, claimant: str, lease_seconds: float
    ) -> int:
        """Extend all live leases of `claimant` and return the number of claims that it holds.

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
        """Give back the samples of `claimant` ('': of all claimants) and return their number.

        A claimant that releases starts afresh. '' supersedes all claimants: the next one to claim
        continues, and the others are refused.
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
        """Drop the claim's samples among `samples`, whose values are lost, and return how many. The
        claim keeps its other samples.

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

    async def commit(
        self,
        job: str,
        claimant: str,
        claims: Sequence[str],
        commit: store_pb.StepCommit,
        *,
        durable: bool = False,
        kept: int | None = None,
        sums: store_pb.PairSums | None = None,
    ) -> tuple[store_pb.StepCommit, bool]:
        """End a step with `commit`; return the stored commit and whether it existed before this
        call.

        `durable`: the training state of its weights is on disk. `kept`: the state is not on disk
        yet, and the claimant has kept the rows of so many micro-batches. `sums`: the policy's sums
        of joint pairs, which are given again if Redis has lost them.

        Raises `FailedPrecondition` and changes nothing when a claim is lost (`claim_lost`),
        trajectories still run (`step_unsealed`), these claims do not hold all remaining samples
        (`step_incomplete`), other rows are kept (`rows_not_kept`), the step or its version does not
        follow the policy's newest one (`version_gap`), the version has another checksum
        (`checksum_conflict`), or the digest of the samples differs from the commit's
        (`digest_mismatch`). A commit without a digest gets the samples' digest.
        """
        await self._tables.check_policy(job, commit.policy)
        table = await self._tables.get(job)
        applied = commit.outcome == store_pb.STEP_OUTCOME_APPLIED
        distinct = list(dict.fromkeys(claims))
        # Only the claimant changes the samples of a live claim (DropGone). The script refuses a
        # claim that is lost before it runs.
        samples = await self._held(job, commit.policy, commit.step, distinct)
        digest = samples_digest(samples)
        agrees = not commit.HasField("samples_digest") or commit.samples_digest == digest
        if samples:
            commit.samples_digest = digest
        base, step = PolicyKeys(job, commit.policy).base, commit.step
        arguments: tuple[str | bytes | int, ...] = (
            claimant,
            _TARGETS[commit.outcome],
            clean_reason(commit.reason) or "step_skipped",
            commit.weights.version,
            int(applied),
            commit_bytes(commit),
            int(agrees),
            table.max_uses,
            commit.weights.checksum,
            version_of_commit(commit),
            int(durable),
            -1 if kept is None else kept,
            *distinct,
        )
        calls = [ScriptCall("commit", base, (step, *arguments))]
        if sums is not None:
            mine = (step, claimant, sums.SerializeToString())
            calls.insert(0, ScriptCall("give_pair_sums", base, mine))
        *_, (outcome, *rest) = await self._steps.on_tables(job, step, calls)
        if outcome in (b"committed", b"existed"):
            if outcome == b"committed":
                self._notices.written(job, commit.policy, commit.step)
            return parse_commit(rest[0]), bool(outcome == b"existed")
        raise _refusal(outcome, rest, commit, claimant)

    async def _held(self, job: str, policy: str, step: int, claims: Sequence[str]) -> list[str]:
        """Return the samples of these claims, except lost ones."""
        if not claims:
            return []
        key = PolicyKeys(job, policy).step(step, "claims")
        found = await self._database.call("HMGET", key, *claims)
        texts = [text.decode() for text in found if text is not None]
        live = (text for text in texts if text and not text.startswith("\t"))
        return [sample for text in live for sample in text.split("\n")]


class PairExchange:
    """Sums over the replies of joint pairs, which the trainers of several policies exchange.

    What a policy has given stays until all policies have committed the step, so that a trainer that
    begins the step again finds the sums that the others have learned from.
    """

    def __init__(
        self, database: Database, tables: TableRegistry, steps: StepStore, notices: Notices
    ) -> None:
        self._database, self._tables, self._steps = database, tables, steps
        self._notices = notices

    async def exchange(
        self, request: store_pb.ExchangePairSumsRequest, wait_seconds: float
    ) -> store_pb.ExchangePairSumsResponse:
        """Keep a policy's sums, if the request has them, and return those over all policies, or,
        after at most `wait_seconds`, the policies that are missing.

        Raises `FailedPrecondition` of kind `claim_lost` when the claimant has lost a claim, or the
        step is committed.
        """
        job, policy, step = request.job_id, request.policy, request.step
        await self._tables.check_policy(job, policy)
        deadline = time.monotonic() + wait_seconds
        mine = [request.sums.SerializeToString()] if request.HasField("sums") else []
        outcome, *rest = await self._steps.on_table(
            "give_pair_sums", job, policy, step, request.claimant, *mine
        )
        if outcome == b"lost":
            raise lost("", cause_text(rest[0]), claimant=request.claimant)
        self._notices.written(job, policy, step)
        with self._notices.listen(
            job, step=step, kinds=frozenset({CLAIMABLE, COUNTS})
        ) as subscription:
            while missing := await self._missing(job, step):
                left = deadline - time.monotonic()
                if left <= 0 or self._notices.closing or subscription.dropped:
                    return store_pb.ExchangePairSumsResponse(missing=missing)
                await subscription.wait(left)
        policies = (await self._tables.get(job)).policies
        given = await self._database.call_each(
            [("GET", PolicyKeys(job, one).step(step, "pair_sums")) for one in policies]
        )
        if None in given:
            raise lost("", cause_text(b"committed"), claimant=request.claimant)
        sums = await asyncio.to_thread(added_up, given)
        return store_pb.ExchangePairSumsResponse(sums=sums)

    async def _missing(self, job: str, step: int) -> list[str]:
        policies = (await self._tables.get(job)).policies
        found = await self._database.call_each(
            [("HEXISTS", PolicyKeys(job, one).step(step, "step"), "pair_sums") for one in policies]
        )
        return [policy for policy, there in zip(policies, found, strict=True) if not there]


def added_up(given: Iterable[bytes]) -> store_pb.PairSums:
    """Return the sums over serialized `PairSums`, added in their order: equal bit for bit for all
    that ask."""
    totals: dict[str, store_pb.PairSum] = {}
    for one in given:
        for mine in store_pb.PairSums.FromString(one).pairs:
            if (total := totals.get(mine.pair)) is None:
                totals[mine.pair] = mine
                continue
            total.chosen += mine.chosen
            total.rejected += mine.rejected
            total.chosen_tokens += mine.chosen_tokens
            total.rejected_tokens += mine.rejected_tokens
            total.policies += mine.policies
    return store_pb.PairSums(pairs=[totals[pair] for pair in sorted(totals)])


class KeptRows:
    """Copies of trained rows, kept until the resulting training state is on disk.

    A trainer that writes its state behind the steps commits versions that only its memory holds.
    The rows of those steps, by micro-batch in order of accumulation, let another trainer recompute
    the versions from the last one on disk. The original rows are freed with their step, whether or
    not the copies are used.
    """

    def __init__(self, database: Database, tables: TableRegistry, steps: StepStore) -> None:
        self._database, self._tables, self._steps = database, tables, steps

    async def keep(self, request: store_pb.KeepRowsRequest) -> None:
        """Copy one micro-batch of an open step, or its sums of joint pairs. Idempotent.

        Raises `FailedPrecondition` of kind `step_committed` when the step is over.
        """
        job, policy, step = request.job_id, request.policy, request.step
        await self._tables.check_policy(job, policy)
        sums = request.sums if request.HasField("sums") else None
        kept = store_pb.KeptMicroBatch(samples=request.samples, sums=sums)
        outcome, *_ = await self._steps.on_table(
            "keep_rows",
            job,
            policy,
            step,
            request.claimant,
            request.index,
            kept.SerializeToString(),
        )
        if outcome == b"committed":
            raise FailedPrecondition(
                f"step {step} of policy {policy} is committed",
                kind="step_committed",
                field="step",
                value=step,
                remedy="Read its commit; another binding did the step.",
            )

    async def describe(self, job: str, policy: str) -> store_pb.DescribeKeptRowsResponse:
        """Return the version on disk, and the later ones whose rows are kept."""
        await self._tables.check_policy(job, policy)
        keys = PolicyKeys(job, policy)
        (durable, checksum), commits, sizes = await self._database.call_each(
            [
                ("HMGET", keys.head, "durable", "durable_checksum"),
                ("HGETALL", f"{keys.kept}:commits"),
                ("HGETALL", f"{keys.kept}:bytes"),
            ]
        )
        versions = sorted(int(version) for version in commits)
        counts = await self._database.call_each(
            [("HLEN", f"{keys.kept}:{version}") for version in versions]
        )
        return store_pb.DescribeKeptRowsResponse(
            durable_version=None if durable is None else int(durable),
            durable_checksum=(checksum or b"").decode(),
            versions=[
                store_pb.KeptVersion(
                    commit=parse_commit(commits[str(version).encode()]), micro_batches=count
                )
                for version, count in zip(versions, counts, strict=True)
            ],
            kept_bytes=sum(int(size) for size in sizes.values()),
        )

    async def read(self, job: str, policy: str, version: int) -> AsyncIterator[bytes]:
        """Yield the micro-batches that made a version, in order, as serialized `KeptMicroBatch`es.

        Raises `DataLoss` of kind `kept_rows_gone` when one is missing.
        """
        await self._tables.check_policy(job, policy)
        key = f"{PolicyKeys(job, policy).kept}:{version}"
        count = await self._database.call("HLEN", key)
        for index in range(max(1, count)):
            batch = await self._database.call("HGET", key, str(index))
            if batch is None:
                raise DataLoss(
                    f"rows of version {version} of policy {policy} are not kept (any more)",
                    kind="kept_rows_gone",
                    field="version",
                    value=version,
                    remedy="Ask again which version is on disk: a later one may be.",
                )
            yield batch

    async def free(self, job: str, policy: str, version: int, checksum: str) -> None:
        """Note that a version is on disk, and free the rows kept for it and earlier versions."""
        await self._tables.check_policy(job, policy)
        await self._database.run("free_rows", PolicyKeys(job, policy).base, 0, version, checksum)


def lost(claim: str, why: str, *, claimant: str | None = None) -> FailedPrecondition:
    """Return the error for a claim that no longer holds samples."""
    subject = f"claim {claim}" if claim else f"a claim of {claimant}"
    return FailedPrecondition(
        f"{subject} is lost: {why}",
        kind=kinds.CLAIM_LOST,
        field="claim_id" if claim else "claimant",
        value=claim or claimant,
        remedy="Throw the accumulated gradients away, release, and begin the step again.",
    )


def cause_text(value: bytes) -> str:
    """Describe why a claim was lost."""
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


def _refusal(
    outcome: bytes, rest: Sequence[bytes], commit: store_pb.StepCommit, claimant: str
) -> FailedPrecondition | InvalidArgument:
    if outcome == b"lost":
        return lost(rest[0].decode(), cause_text(rest[1]), claimant=claimant)
    if outcome == b"taken":
        return lost(rest[0].decode(), f"it belongs to {rest[1].decode()}")
    where = f"step {commit.step} of policy {commit.policy}"
    if outcome == b"unkept":
        return FailedPrecondition(
            f"{where}: {int(rest[0])} of {int(rest[1])} micro-batches are kept",
            kind="rows_not_kept",
            field="kept_micro_batches",
            value=int(rest[1]),
            remedy="Write the training state, and commit with `durable`.",
        )
    if outcome == b"unsealed":
        return FailedPrecondition(
            f"{where} has {int(rest[0])} of {int(rest[1])} trajectories"
            + (", and is held open for more queries" if int(rest[2]) else ""),
            kind="step_unsealed",
            field="step",
            value=commit.step,
            remedy="Claim until OUTCOME_EXHAUSTED, then commit.",
        )
    if outcome == b"incomplete":
        pending, ready, others = (int(number) for number in rest)
        return FailedPrecondition(
            f"{where} has samples that these claims do not hold: "
            f"{pending} pending, {ready} ready, {others} in other claims",
            kind="step_incomplete",
            field="claim_ids",
            remedy="Claim until OUTCOME_EXHAUSTED and name all claims.",
        )
    if outcome == b"digest":
        return FailedPrecondition(
            f"{where}: the trained samples differ from the samples that the claims hold",
            kind="digest_mismatch",
            field="samples_digest",
            remedy="Throw the accumulated gradients away, release, and begin the step again.",
        )
    if outcome == b"conflict":
        return checksum_conflict(commit.weights)
    if outcome == b"gap":
        what = f"step {commit.step} cannot make version {commit.weights.version}"
        return version_gap(commit.weights, int(rest[0]), int(rest[1]), what)
    return InvalidArgument(
        f"{where} has {int(rest[0])} samples: the outcome must say what happened to them",
        field="outcome",
        value=store_pb.StepOutcome.Name(commit.outcome),
        remedy="Use EMPTY only for a step without samples.",
    )
