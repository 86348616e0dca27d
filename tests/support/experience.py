"""Makes and drives experience: samples, trajectories, claims of one job of a store under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.experience_store.records import LETTER_OF, Ending, StagedRow
from services.experience_store.requests import Fill
from services.experience_store.samples import SampleFills
from services.experience_store.steps import StepStatus
from services.experience_store.store import Store
from services.experience_store.trajectories import Append, Appended
from tests.support.waiting import until
from troupe import tensors
from troupe.rpc import TroupeError, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

Response = store_pb.ClaimMicroBatchResponse


def make_sample(
    query: str,
    turn: int,
    trajectory: str,
    *,
    policy: str = "solver",
    agent: str = "solver",
    reward: float | None = 1.0,
    tokens: int = 8,
    version: int = 0,
    columns: dict[str, store_pb.Column] | None = None,
) -> store_pb.Sample:
    """A row whose token ids are its turn number; half of them are prompt."""
    response = tokens - tokens // 2

    def ids(length: int) -> common_pb.Tensor:
        values: npt.NDArray[np.int32] = np.full(length, turn, np.int32)
        return tensors.ids_to_proto(values)

    sample = store_pb.Sample(
        sample_id=f"{query}_{turn}_{trajectory}",
        policy=policy,
        query_id=query,
        trajectory_id=trajectory,
        agent=agent,
        turn=turn,
        group_id=f"{query}/{agent}",
        prompt_ids=ids(tokens // 2),
        response_ids=ids(response),
        logprobs=tensors.to_proto(np.zeros(response, np.float32)),
        versions=[common_pb.VersionSpan(version=version, start=0, end=response)],
        columns=columns or {},
        finish_reason="stop",
    )
    if reward is not None:
        sample.reward = reward
    return sample


def staged_row(sample: store_pb.Sample, raw_row: bytes | None = None) -> StagedRow:
    """Return the row that the store would stage, without the store's checks."""
    tokens = sum(sample.prompt_ids.shape) + sum(sample.response_ids.shape)
    names = store_pb.Sample(query_id=sample.query_id, trajectory_id=sample.trajectory_id)
    return StagedRow.of(sample, raw_row or sample.SerializeToString(), tokens, names)


@dataclass
class Stage:
    """One job of a store, with the calls that tests make, shortened."""

    store: Store
    job: str
    policies: tuple[str, ...]
    queries: tuple[str, ...]
    group_size: int
    step: int = 0
    redundant: int = 0
    """Trajectories per query beyond `group_size`."""
    first_checksum: str = ""
    """The checksum of the policies' first weights."""
    appended: Appended | None = None
    """The outcome of the last ending."""

    @property
    def counted(self) -> int:
        """The step that the last ending counts for."""
        assert self.appended is not None
        return self.appended.step

    @property
    def trajectories(self) -> list[tuple[str, str]]:
        """(query, trajectory) of all trajectories of the step."""
        return [
            (query, f"{query}-s{self.step}-t{number}")
            for query in self.queries
            for number in range(self.group_size + self.redundant)
        ]

    async def until(self, counts: dict[str, int]) -> None:
        """Wait until the samples are in these states."""

        async def so_many() -> bool:
            return await self.counts() == counts

        await until(so_many)

    async def until_waiting(self) -> None:
        """Wait until a claim of the job waits for changes."""
        await until(lambda: self.job in self.store.notices._subscriptions)

    async def append(
        self,
        query: str,
        trajectory: str,
        samples: Sequence[store_pb.Sample] | None = None,
        *,
        attempt: str | None = None,
        solved: bool = False,
    ) -> bool:
        """End a trajectory COMPLETED; by default with one sample of every policy."""
        if samples is None:
            samples = [
                make_sample(query, turn, trajectory, policy=policy, agent=policy)
                for turn, policy in enumerate(self.policies)
            ]
        return await self.end(
            query, trajectory, "COMPLETED", samples, attempt=attempt, solved="1" if solved else ""
        )

    async def fail(self, query: str, trajectory: str, reason: str = "deadline: 9 s") -> bool:
        """End a trajectory FAILED."""
        return await self.end(query, trajectory, "FAILED", [], reason=reason)

    async def end(
        self,
        query: str,
        trajectory: str,
        state: str,
        samples: Sequence[store_pb.Sample],
        *,
        reason: str = "",
        attempt: str | None = None,
        solved: str = "",
    ) -> bool:
        """End a trajectory; whether this ending won."""
        ending = Ending(state, attempt or new_id("append"), query, reason, solved=solved)
        rows = [staged_row(sample) for sample in samples]
        append = Append(self.job, self.step, trajectory, ending, rows)
        (result,) = await self.store.trajectories.append_each([append])
        if isinstance(result, TroupeError):
            raise result
        self.appended = result
        return self.appended.accepted

    async def append_all(self) -> None:
        """End all trajectories of the step with one sample of every policy."""
        for query, trajectory in self.trajectories:
            await self.append(query, trajectory)

    async def claim(
        self,
        claimant: str = "trainer",
        *,
        claim: str | None = None,
        policy: str = "solver",
        samples: int = 64,
        tokens: int = 0,
        lease: float = 60,
        wait: float = 0,
        oldest: int | None = None,
        whole: bool = False,
        balance: bool = False,
        known: Sequence[str] = (),
    ) -> Response:
        """Claim a micro-batch; by default without waiting."""
        request = store_pb.ClaimMicroBatchRequest(
            job_id=self.job,
            policy=policy,
            step=self.step,
            request_id=claim or new_id("claim"),
            claimant=claimant,
            max_samples=samples,
            max_tokens=tokens,
            lease_seconds=lease,
            oldest_version=oldest,
            whole_groups=whole,
            balance_tokens=balance,
            known_claims=known,
        )
        delivery = await self.store.claims.claim(request, wait)
        response = Response.FromString(delivery.message)
        assert (response.outcome, len(response.samples)) == (delivery.outcome, delivery.samples)
        return response

    async def fill(
        self,
        sample: str,
        *,
        policy: str = "solver",
        reward: float | None = None,
        columns: dict[str, store_pb.Column] | None = None,
        drop_reason: str = "",
    ) -> tuple[str, bool]:
        """Fill columns; the state's letter and whether anything was written."""
        fill = Fill(sample, reward, columns or {}, drop_reason)
        calls = [SampleFills(self.job, policy, self.step, [fill])]
        (filled,) = await self.store.samples.fill_each(calls)
        if isinstance(filled, TroupeError):
            raise filled
        state, accepted = filled[0]
        return LETTER_OF[state], accepted

    async def release(self, claimant: str, *, policy: str = "solver") -> int:
        """Give back what `claimant` holds ('' for all)."""
        return await self.store.claims.release(self.job, policy, self.step, claimant)

    async def renew(self, claimant: str, lease: float = 60, *, policy: str = "solver") -> int:
        """Extend the leases of `claimant`."""
        return await self.store.claims.renew(self.job, policy, self.step, claimant, lease)

    async def commit(
        self,
        claims: Sequence[str],
        claimant: str = "trainer",
        *,
        policy: str = "solver",
        version: int = 1,
        outcome: store_pb.StepOutcome.ValueType = store_pb.STEP_OUTCOME_APPLIED,
        reason: str = "",
        digest: int | None = None,
        checksum: str = "",
        **how: Any,
    ) -> tuple[store_pb.StepCommit, bool]:
        """Commit the step; the commit that holds, and whether it was there before."""
        commit = store_pb.StepCommit(
            policy=policy,
            step=self.step,
            outcome=outcome,
            reason=reason,
            weights=self.weights(version, policy, checksum),
            metrics={"loss/policy": 0.5},
            samples_digest=digest,
        )
        return await self.store.claims.commit(self.job, claimant, claims, commit, **how)

    def weights(
        self, version: int, policy: str = "solver", checksum: str = ""
    ) -> common_pb.WeightsRef:
        """The weights of a version."""
        return common_pb.WeightsRef(
            job_id=self.job, policy=policy, version=version, checksum=checksum
        )

    async def counts(self, policy: str = "solver") -> dict[str, int]:
        """Samples per state, without zeros."""
        status = await self.store.steps.status(self.job, self.step)
        counts = next(c for c in status.counts if c.policy == policy)
        names = ("pending", "ready", "claimed", "trained", "dropped")
        return {name: getattr(counts, name) for name in names if getattr(counts, name)}

    async def open(
        self,
        step: int,
        version: int | None = None,
        *,
        held_open: bool = False,
        cursor: int = 0,
        queries: Sequence[str] | None = None,
    ) -> tuple[bool, list[str]]:
        """Open a step, by default of the same shape, and play on it. Before the first one, record
        the policies' first weights."""
        self.step = step
        if step == 0:
            for policy in self.policies:
                await self.store.versions.open(
                    self.job, self.weights(version or 0, policy, self.first_checksum)
                )
        request = store_pb.OpenStepRequest(
            job_id=self.job,
            step=step,
            versions=dict.fromkeys(self.policies, step if version is None else version),
            query_ids=self.queries if queries is None else queries,
            group_size=self.group_size,
            held_open=held_open,
            cursor=cursor,
            redundant=self.redundant,
        )
        return await self.store.steps.open(request)

    async def amend(self, **changes: Any) -> list[str]:
        """Amend the step; the queries that were to leave but are complete."""
        lists = {name: f"{name}_query_ids" for name in ("add", "drop", "carry")}
        named = {(lists | {"reason": "drop_reason"}).get(k, k): v for k, v in changes.items()}
        request = store_pb.AmendStepRequest(job_id=self.job, step=self.step, **named)
        return await self.store.steps.amend(request)

    async def status(self, **wanted: bool) -> StepStatus:
        """How far the step is."""
        return await self.store.steps.status(self.job, self.step, **wanted)

    async def table(self, policy: str = "solver") -> store_pb.PolicyCounts:
        """Return the counts of a policy's table."""
        return next(c for c in (await self.status()).counts if c.policy == policy)


async def make_stage(
    store: Store,
    job: str,
    *,
    policies: tuple[str, ...] = ("checker", "solver"),
    queries: tuple[str, ...] = ("q0", "q1"),
    group_size: int = 2,
    required: Sequence[str] = (),
    max_uses: int = 1,
    drop_without_signal: bool = False,
    held_open: bool = False,
    redundant: int = 0,
    version: int = 0,
) -> Stage:
    """Declare the tables of a job, record its policies' first weights, and open step 0."""
    stage = Stage(store, job, policies, queries, group_size, redundant=redundant)
    await store.tables.create(
        job, policies, required, max_uses=max_uses, drop_without_signal=drop_without_signal
    )
    await stage.open(0, version, held_open=held_open)
    return stage


def ids_of(response: Response) -> list[str]:
    """The sample ids of a claim, in its order."""
    return [claimed.sample.sample_id for claimed in response.samples]
