"""Rows of a given length, and the steps that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from troupe import tensors
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

POLICY = "solver"
GROUP_SIZE = 4


@dataclass(frozen=True)
class Shape:
    """A step of one policy: queries x GROUP_SIZE trajectories x turns rows."""

    tokens: int
    """Tokens of one row; half of them are prompt."""
    queries: int
    turns: int

    @property
    def rows(self) -> int:
        """Number of rows of the step."""
        return self.queries * GROUP_SIZE * self.turns

    def trajectories(
        self, step: int, queries: Iterable[int] | None = None
    ) -> list[tuple[str, str]]:
        """Yield (query, trajectory) of all trajectories of the step, or of some of its queries."""
        return [
            (f"q{query}", f"q{query}-s{step}-t{number}")
            for query in (range(self.queries) if queries is None else queries)
            for number in range(GROUP_SIZE)
        ]


def make_row(shape: Shape, query: str, trajectory: str, turn: int) -> store_pb.Sample:
    """Return a row without its reward. Its tokens are random and thus not compressible."""
    response = shape.tokens - shape.tokens // 2
    rng = np.random.default_rng(turn)
    return store_pb.Sample(
        sample_id=f"{query}_{turn}_{trajectory}",
        policy=POLICY,
        query_id=query,
        trajectory_id=trajectory,
        agent="solver",
        turn=turn,
        group_id=f"{query}/solver/{turn}",
        prompt_ids=tensors.to_proto(
            rng.integers(0, 150_000, shape.tokens - response, dtype=np.int32)
        ),
        response_ids=tensors.to_proto(rng.integers(0, 150_000, response, dtype=np.int32)),
        logprobs=tensors.to_proto(rng.random(response, dtype=np.float32)),
        versions=[common_pb.VersionSpan(version=0, start=0, end=response)],
        finish_reason="stop",
    )


def make_appends(
    job: str,
    step: int,
    shape: Shape,
    *,
    queries: Iterable[int] | None = None,
    rewarded: bool = False,
) -> list[store_pb.AppendTrajectoryRequest]:
    """Return the endings of all trajectories of a step, or of some of its queries."""
    found = []
    for query, trajectory in shape.trajectories(step, queries):
        rows = [make_row(shape, query, trajectory, turn) for turn in range(shape.turns)]
        for row in rows if rewarded else ():
            row.reward = float(hash(row.sample_id) % 7)
        found.append(
            store_pb.AppendTrajectoryRequest(
                request_id=new_id("append"),
                job_id=job,
                step=step,
                query_id=query,
                trajectory_id=trajectory,
                state=common_pb.TRAJECTORY_STATE_COMPLETED,
                samples=rows,
            )
        )
    return found


def payload_bytes(requests: list[store_pb.AppendTrajectoryRequest]) -> int:
    """Return the stored bytes of all rows."""
    return sum(row.ByteSize() for request in requests for row in request.samples)


def open_request(job: str, step: int, shape: Shape) -> store_pb.OpenStepRequest:
    """Return the request that opens the step."""
    return store_pb.OpenStepRequest(
        request_id=new_id("open"),
        job_id=job,
        step=step,
        versions={POLICY: step},
        query_ids=[f"q{query}" for query in range(shape.queries)],
        group_size=GROUP_SIZE,
    )


def fill_request(job: str, step: int, samples: Sequence[str]) -> store_pb.FillColumnsRequest:
    """Return the request with late rewards of some rows, as for one scored trajectory."""
    first, *more = samples
    return store_pb.FillColumnsRequest(
        request_id=new_id("fill"),
        job_id=job,
        step=step,
        policy=POLICY,
        sample_id=first,
        reward=1.0,
        more=[store_pb.SampleColumns(sample_id=sample, reward=1.0) for sample in more],
    )


def claim_request(job: str, step: int, samples: int) -> store_pb.ClaimMicroBatchRequest:
    """Return the request for a micro-batch, with a wait."""
    return store_pb.ClaimMicroBatchRequest(
        request_id=new_id("claim"),
        job_id=job,
        policy=POLICY,
        step=step,
        claimant="trainer",
        max_samples=samples,
        lease_seconds=600,
        wait_seconds=60,
    )


def commit_request(job: str, step: int, claims: list[str]) -> store_pb.CommitStepRequest:
    """Return the request that commits the step."""
    return store_pb.CommitStepRequest(
        request_id=new_id("commit"),
        job_id=job,
        policy=POLICY,
        step=step,
        claimant="trainer",
        claim_ids=claims,
        outcome=store_pb.STEP_OUTCOME_APPLIED,
        weights=common_pb.WeightsRef(job_id=job, policy=POLICY, version=step + 1),
    )
