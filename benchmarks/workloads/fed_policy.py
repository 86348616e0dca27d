"""A policy of a trainer worker whose steps have made-up samples, through a real store."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from benchmarks.experience_store.servers import Stub
from benchmarks.workloads.one_policy import job_of_one
from troupe import tensors
from troupe.job import JobSpec
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2 as trainer_pb

POLICY: Final = "solver"
QUERIES: Final = ("q0", "q1")
GROUP: Final = 4
# Ids of samples' tokens: in every vocabulary that benchmarks use.
_IDS: Final = range(3, 100)
_SECONDS: Final = 600.0


def spec_of(name: str, policy: dict[str, Any], **sections: Any) -> JobSpec:
    """Return a job of one policy, for steps of two groups of four samples."""
    pipeline = {
        "steps": 10_000,
        "queries_per_step": len(QUERIES),
        "micro_batch_samples": GROUP,
    }
    return job_of_one(name, policy, **{"pipeline": pipeline, **sections})


class FedPolicy:
    """One policy bound to a trainer, and the tables of its job."""

    def __init__(self, spec: JobSpec, trainer: Any, store: Stub) -> None:
        """`trainer`: stub of the worker."""
        self.spec = spec
        self.job_id = new_id("job")
        self.weights = common_pb.WeightsRef()
        """The newest version."""
        self._trainer, self._store = trainer, store

    async def bind(self) -> None:
        """Bind the policy, at the newest version."""
        bind = trainer_pb.BindRequest(
            request_id=new_id(),
            job_id=self.job_id,
            policy=POLICY,
            spec_json=self.spec.model_dump_json(),
            version=self.weights.version,
            checksum=self.weights.checksum,
        )
        self.weights = (await self._trainer.Bind(bind, timeout=_SECONDS)).weights
        await self._store.CreateTables(
            store_pb.CreateTablesRequest(request_id=new_id(), job_id=self.job_id, policies=[POLICY])
        )
        await self._store.OpenVersion(
            store_pb.OpenVersionRequest(
                request_id=new_id(), job_id=self.job_id, weights=self.weights
            )
        )

    async def release(self) -> None:
        """Unbind the policy."""
        release = trainer_pb.ReleaseRequest(request_id=new_id(), job_id=self.job_id, policy=POLICY)
        await self._trainer.Release(release, timeout=_SECONDS)

    async def train(self, step: int) -> store_pb.StepCommit:
        """Train a step, for which there are samples. Raises RuntimeError if it is not applied."""
        request = trainer_pb.RunStepRequest(
            request_id=new_id(), job_id=self.job_id, policy=POLICY, step=step, version=step
        )
        events = [event async for event in self._trainer.RunStep(request, timeout=_SECONDS)]
        commit: store_pb.StepCommit = events[-1].commit
        if commit.outcome != store_pb.STEP_OUTCOME_APPLIED:
            raise RuntimeError(f"the step was not applied: {commit.reason}")
        self.weights = commit.weights
        return commit

    async def play(self, step: int, tokens: int) -> None:
        """Append a step's samples: `tokens` in two groups of four, a quarter of each is prompt."""
        rng = np.random.default_rng(step)
        length = tokens // (len(QUERIES) * GROUP)
        await self._store.OpenStep(
            store_pb.OpenStepRequest(
                request_id=new_id(),
                job_id=self.job_id,
                step=step,
                versions={POLICY: step},
                query_ids=QUERIES,
                group_size=GROUP,
            )
        )
        for query in QUERIES:
            prompt = rng.integers(_IDS.start, _IDS.stop, length // 4).astype(np.int32)
            for number in range(GROUP):
                trajectory = f"{query}-s{step}-t{number}"
                response = rng.integers(_IDS.start, _IDS.stop, length - len(prompt))
                sample = store_pb.Sample(
                    sample_id=f"{query}_0_{trajectory}",
                    policy=POLICY,
                    query_id=query,
                    trajectory_id=trajectory,
                    agent=POLICY,
                    group_id=POLICY,
                    prompt_ids=tensors.to_proto(prompt),
                    response_ids=tensors.to_proto(response.astype(np.int32)),
                    logprobs=tensors.to_proto(np.full(len(response), -5, np.float32)),
                    versions=[common_pb.VersionSpan(version=step, start=0, end=len(response))],
                    reward=float(number % 2),
                    finish_reason="stop",
                )
                await self._store.AppendTrajectory(
                    store_pb.AppendTrajectoryRequest(
                        request_id=new_id(),
                        job_id=self.job_id,
                        step=step,
                        query_id=query,
                        trajectory_id=trajectory,
                        state=common_pb.TRAJECTORY_STATE_COMPLETED,
                        samples=[sample],
                    )
                )
