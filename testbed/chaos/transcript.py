"""Records of a job's steps by the services, to find where two runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from troupe.client.conversion import word
from troupe.client.handle import AsyncJobHandle
from troupe.rpc.channel import connect
from troupe.rpc.errors import TroupeError
from troupe.rpc.settings import ClientSettings
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc


class StepRecord(BaseModel):
    """The record of one step of one policy."""

    model_config = ConfigDict(frozen=True)

    step: int
    outcome: str = ""
    version: int | None = None
    checksum: str = ""
    num_samples: int = 0
    samples_digest: int | None = None
    # Computed by the trainer from the accumulated samples.
    metrics: dict[str, float] = {}
    # sample id -> "trained", or "dropped: reason". Empty where the store keeps no log.
    samples: dict[str, str] = {}


class Transcript(BaseModel):
    """A job's weight versions by policy and step, and its metrics by step."""

    model_config = ConfigDict(frozen=True)

    policies: dict[str, list[StepRecord]] = {}
    metrics: dict[int, dict[str, float]] = {}
    # The reasons of gaps.
    gaps: list[str] = []

    def save(self, path: Path) -> None:
        """Write the transcript as JSON."""
        path.write_text(self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: Path) -> Transcript:
        """Read a file that `save` wrote."""
        return cls.model_validate(json.loads(path.read_bytes()))


async def transcribe(handle: AsyncJobHandle, store: str, settings: ClientSettings) -> Transcript:
    """Return the transcript of a job of a cluster whose experience store is at `store`."""
    gaps: list[str] = []
    job = await handle.info()
    policies: dict[str, list[StepRecord]] = {}
    async with connect(store, settings) as channel:
        stub: store_grpc.ExperienceStoreAsyncStub = store_grpc.ExperienceStoreStub(channel)
        for policy in sorted(job.versions):
            steps = {
                one.step: StepRecord(
                    step=one.step, outcome=one.outcome, version=one.version, checksum=one.checksum
                )
                for one in await handle.versions(policy)
            }
            try:
                await _add_log(stub, handle.id, policy, steps)
            except TroupeError as error:
                gaps.append(f"{policy}: no log of samples: {error}")
            policies[policy] = [steps[step] for step in sorted(steps)]
    rows: dict[int, dict[str, float]] = {}
    for row in await handle.metrics():
        rows.setdefault(row.step, {}).update(row.values)
    return Transcript(policies=policies, metrics=rows, gaps=gaps)


async def _add_log(stub: Any, job_id: str, policy: str, steps: dict[int, StepRecord]) -> None:
    request = store_pb.ReadLogRequest(job_id=job_id, policy=policy)
    async for logged in stub.ReadLog(request, timeout=60):
        # Versions count steps done; the log numbers steps from zero.
        number = logged.step + 1
        known = steps.get(number, StepRecord(step=number))
        changes: dict[str, Any] = {
            "samples": {s.sample_id: _fate(s) for s in logged.samples},
        }
        if logged.HasField("commit"):
            commit = logged.commit
            changes["num_samples"] = commit.num_samples
            changes["metrics"] = dict(commit.metrics)
            if commit.HasField("samples_digest"):
                changes["samples_digest"] = commit.samples_digest
        steps[number] = known.model_copy(update=changes)


def _fate(sample: store_pb.LoggedSample) -> str:
    state = word(common_pb.SampleState.DESCRIPTOR, sample.state)
    return f"{state}: {sample.reason}" if sample.reason else state
