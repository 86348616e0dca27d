"""The same bytes through the store: append, reward, claim, commit."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.experience_store.servers import Stub
from benchmarks.experience_store.workload import (
    GROUP_SIZE,
    POLICY,
    Shape,
    claim_request,
    commit_request,
    fill_request,
    make_appends,
    open_request,
)
from troupe.rpc import new_id, protobuf_wire
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")
Claim = store_pb.ClaimMicroBatchResponse
MICRO_BATCH = 64
CALL_SECONDS = 60.0


@dataclass
class Timings:
    """Seconds of every call, by its name."""

    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def of(self, name: str, call: Awaitable[T]) -> T:
        """Return the answer of `call`, and record its time."""
        started = time.perf_counter()
        answer = await call
        self.calls[name].append(time.perf_counter() - started)
        return answer


@dataclass(frozen=True)
class Ending:
    """A serialized ending, like the serialized rows for raw Redis."""

    job: str
    step: int
    samples: Sequence[str]
    message: bytes
    """An AppendTrajectoryRequest."""

    @staticmethod
    def of(append: store_pb.AppendTrajectoryRequest) -> Ending:
        """Return the ending in `append`."""
        samples = [row.sample_id for row in append.samples]
        return Ending(append.job_id, append.step, samples, append.SerializeToString())

    def SerializeToString(self) -> bytes:  # noqa: N802 - a message's method
        """Return the bytes, like a message for `ExperienceWriter`."""
        return self.message


async def create(stub: Stub) -> str:
    """Create a fresh job's tables; return its id."""
    job = new_id("bench")
    await stub.CreateTables(
        store_pb.CreateTablesRequest(request_id=new_id(), job_id=job, policies=[POLICY])
    )
    first = common_pb.WeightsRef(job_id=job, policy=POLICY)
    await stub.OpenVersion(
        store_pb.OpenVersionRequest(request_id=new_id(), job_id=job, weights=first)
    )
    return job


async def drop(stub: Stub, job: str) -> None:
    """Free the job's data."""
    await stub.DropTables(
        store_pb.DropTablesRequest(request_id=new_id(), job_id=job, purge_log=True)
    )


async def append_all(stub: Stub, endings: Iterable[Ending], writers: int, timings: Timings) -> None:
    """End the trajectories with `writers` concurrent writers, each followed by its rows'
    rewards."""
    waiting = iter(endings)

    async def write() -> None:
        for ending in waiting:
            written = stub.writer.append(ending, CALL_SECONDS)  # type: ignore[arg-type]
            await timings.of("append", written)
            fill = fill_request(ending.job, ending.step, ending.samples)
            await timings.of("reward", stub.writer.fill(fill, CALL_SECONDS))

    async with asyncio.TaskGroup() as group:
        for _ in range(writers):
            group.create_task(write())


async def claim_all(stub: Stub, job: str, step: int, timings: Timings) -> list[str]:
    """Claim until the step is exhausted; return the claims.

    Rows stay serialized, like the rows in raw Redis's answers: only the message around them is
    parsed.
    """
    claims: list[str] = []
    while True:
        answer: bytes = await timings.of("claim", stub.claim(claim_request(job, step, MICRO_BATCH)))
        rest, rows = protobuf_wire.split(answer, 0, len(answer), Claim.SAMPLES_FIELD_NUMBER)
        claimed = Claim.FromString(rest)
        if claimed.outcome == Claim.OUTCOME_EXHAUSTED:
            return claims
        if claimed.outcome == Claim.OUTCOME_CLAIMED:
            if not 0 < len(rows) <= MICRO_BATCH:
                raise RuntimeError(f"a claim has {len(rows)} rows")
            claims.append(claimed.claim_id)


async def run_step(
    stub: Stub,
    shape: Shape,
    job: str,
    endings: Sequence[Ending],
    writers: int,
    timings: Timings,
) -> float:
    """Return the seconds from the first append to the commit of step 0, while a trainer claims."""
    await stub.OpenStep(open_request(job, 0, shape))
    started = time.perf_counter()
    claiming = asyncio.create_task(claim_all(stub, job, 0, timings))
    await append_all(stub, endings, writers, timings)
    claims = await claiming
    commit = await timings.of("commit", stub.CommitStep(commit_request(job, 0, claims)))
    seconds = time.perf_counter() - started
    if commit.commit.num_samples != shape.rows:
        raise RuntimeError(f"{commit.commit.num_samples} of {shape.rows} rows were trained")
    return seconds


async def ready_seconds(stub: Stub, shape: Shape, groups: int) -> list[float]:
    """Return the seconds from sending each group's last reward to receiving its claim."""
    job = await create(stub)
    one = Shape(shape.tokens, groups, 1)
    await stub.OpenStep(open_request(job, 0, one))
    appends = make_appends(job, 0, one)
    found = []
    for start in range(0, len(appends), GROUP_SIZE):
        group = appends[start : start + GROUP_SIZE]
        *most, last = [row.sample_id for append in group for row in append.samples]
        for append in group:
            await stub.writer.append(append, CALL_SECONDS)
        await stub.writer.fill(fill_request(job, 0, most), CALL_SECONDS)
        call = stub.ClaimMicroBatch(claim_request(job, 0, GROUP_SIZE))
        waiting = asyncio.ensure_future(_answer(call))
        await asyncio.sleep(0.01)
        started = time.perf_counter()
        fill = stub.writer.fill(fill_request(job, 0, [last]), CALL_SECONDS)
        filling = asyncio.ensure_future(_answer(fill))
        claimed = await waiting
        found.append(time.perf_counter() - started)
        await filling
        if len(claimed.samples) != GROUP_SIZE:
            raise RuntimeError("the claim is not the group that became ready")
    await drop(stub, job)
    return found


async def _answer(call: Awaitable[T]) -> T:
    return await call
