"""Shorthands for trainer tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from services.trainer.learning.model import load_model
from tests.support.training import make_rollout, make_spec, score
from tests.support.waiting import PATIENCE, until
from troupe.job import JobSpec
from troupe.rpc import DeadlineExceeded, NotFound, new_id
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

PROMPTS = {"q0": (5, 6, 7, 8), "q1": (9, 10, 11), "q2": (12, 13)}


class Trainer:
    """One trainer service and a client of it."""

    def __init__(self, server: Any, channel: Any, stage: TrainingStage) -> None:
        self.server, self.channel = server, channel
        self.stub = trainer_grpc.TrainerStub(channel)
        self._stage, self._job = stage, stage.job_id

    @property
    def worker(self) -> Any:
        """The worker, where it runs in this process."""
        return self.server.service.worker

    async def bind(
        self,
        spec: JobSpec,
        policy: str = "solver",
        version: int = 0,
        checksum: str = "",
        hosts: trainer_pb.GangHosts | None = None,
    ) -> common_pb.WeightsRef:
        request = trainer_pb.BindRequest(
            request_id=new_id(),
            job_id=self._job,
            policy=policy,
            spec_json=spec.model_dump_json(),
            version=version,
            checksum=checksum,
            hosts=hosts,
        )
        weights: common_pb.WeightsRef = (await self.stub.Bind(request)).weights
        await self._stage.bound(weights)
        return weights

    async def bind_again(self, spec: JobSpec, **version: Any) -> common_pb.WeightsRef:
        """Bind as the orchestrator does: again, if it takes longer than a call's deadline."""
        for _ in range(4):
            with contextlib.suppress(DeadlineExceeded):
                return await self.bind(spec, **version)
        raise AssertionError("the policy was not bound")

    async def events(
        self, step: int, version: int, policy: str = "solver", oldest_version: int | None = None
    ) -> list[trainer_pb.StepEvent]:
        request = trainer_pb.RunStepRequest(
            request_id=new_id(),
            job_id=self._job,
            policy=policy,
            step=step,
            version=version,
            oldest_version=oldest_version,
        )
        return [event async for event in self.stub.RunStep(request, timeout=240)]

    async def run(
        self, step: int, version: int, policy: str = "solver", oldest_version: int | None = None
    ) -> store_pb.StepCommit:
        return (await self.events(step, version, policy, oldest_version))[-1].commit

    async def trained(self, samples: int) -> None:
        """Wait until a running step has taken this many samples."""

        async def so_many() -> bool:
            return any(one.samples >= samples for one in await self.statuses())

        await until(so_many)

    async def accumulates(self) -> bool:
        """Return whether a policy's step accumulates gradients."""
        accumulating = common_pb.BINDING_STATE_ACCUMULATING
        return any(one.state == accumulating for one in await self.statuses())

    async def checkpoint(self, version: int, policy: str = "solver") -> Path:
        request = trainer_pb.SaveCheckpointRequest(
            request_id=new_id(), job_id=self._job, policy=policy, version=version
        )
        return Path((await self.stub.SaveCheckpoint(request)).path)

    async def suspend(self, policy: str = "solver") -> trainer_pb.SuspendedState:
        request = trainer_pb.SuspendRequest(request_id=new_id(), job_id=self._job, policy=policy)
        state: trainer_pb.SuspendedState = (await self.stub.Suspend(request)).state
        return state

    async def resume(
        self,
        spec: JobSpec,
        state: trainer_pb.SuspendedState,
        checksum: str = "",
        policy: str = "solver",
        version: int | None = None,
    ) -> common_pb.WeightsRef:
        request = trainer_pb.ResumeRequest(
            request_id=new_id(),
            job_id=self._job,
            policy=policy,
            spec_json=spec.model_dump_json(),
            version=state.version if version is None else version,
            checksum=checksum,
            state=state,
        )
        weights: common_pb.WeightsRef = (await self.stub.Resume(request, timeout=PATIENCE)).weights
        return weights

    async def prefetch(
        self, spec: JobSpec, state: trainer_pb.SuspendedState, policy: str = "solver"
    ) -> None:
        request = trainer_pb.PrefetchRequest(
            request_id=new_id(),
            job_id=self._job,
            policy=policy,
            spec_json=spec.model_dump_json(),
            state=state,
        )
        await self.stub.Prefetch(request)

    async def release(self, policy: str = "solver") -> None:
        await self.stub.Release(
            trainer_pb.ReleaseRequest(request_id=new_id(), job_id=self._job, policy=policy)
        )

    async def statuses(self) -> list[trainer_pb.BindingStatus]:
        response = await self.stub.ListBindings(trainer_pb.ListBindingsRequest())
        return list(response.bindings)


class TrainingStage:
    """One job in a real store, and the trainers that a test starts for it."""

    def __init__(
        self,
        job_id: str,
        tokenizer: Path,
        root: Path,
        store_channel: Any,
        start: Callable[..., Awaitable[tuple[Any, Any]]],
    ) -> None:
        """`start` starts a trainer worker with these settings: its server and a channel."""
        self.job_id = job_id
        self.tokenizer = tokenizer
        self.root = root
        self.store = store_grpc.ExperienceStoreStub(store_channel)
        self.transfer = Transfer(root / "transfer")
        self._channel, self._start = store_channel, start
        # By policy: the first weights that a trainer bound.
        self._first: dict[str, common_pb.WeightsRef] = {}

    async def trainer(self, **settings: object) -> Trainer:
        """Start another trainer worker."""
        return Trainer(*await self._start(**settings), self)

    async def sibling(self, **settings: object) -> tuple[TrainingStage, Trainer]:
        """Return another job in the same store, with its own trainer worker."""
        job = TrainingStage(new_id("job"), self.tokenizer, self.root, self._channel, self._start)
        return job, await job.trainer(**settings)

    def spec(self, **changes: Any) -> JobSpec:
        return make_spec(self.tokenizer, **changes)

    async def open(
        self,
        step: int = 0,
        *,
        policies: Sequence[str] = ("solver",),
        queries: Sequence[str] = ("q0", "q1"),
        group_size: int = 4,
        version: int = 0,
        **tables: Any,
    ) -> None:
        """Declare the tables and admit a step."""
        await self.store.CreateTables(
            store_pb.CreateTablesRequest(
                request_id=new_id(), job_id=self.job_id, policies=policies, **tables
            )
        )
        await self._record_first()
        await self.store.OpenStep(
            store_pb.OpenStepRequest(
                request_id=new_id(),
                job_id=self.job_id,
                step=step,
                versions=dict.fromkeys(policies, version),
                query_ids=queries,
                group_size=group_size,
            )
        )

    async def bound(self, weights: common_pb.WeightsRef) -> None:
        """Record a policy's first weights in the store, as the orchestrator does; where there are
        no tables yet, when they are declared."""
        self._first.setdefault(weights.policy, weights)
        with contextlib.suppress(NotFound):
            await self._record_first()

    async def _record_first(self) -> None:
        for weights in self._first.values():
            await self.store.OpenVersion(
                store_pb.OpenVersionRequest(
                    request_id=new_id(), job_id=self.job_id, weights=weights
                )
            )

    async def append(
        self, query: str, trajectory: str, samples: Sequence[store_pb.Sample], step: int = 0
    ) -> None:
        """End a trajectory: COMPLETED with samples, FAILED without."""
        state = (
            common_pb.TRAJECTORY_STATE_COMPLETED if samples else common_pb.TRAJECTORY_STATE_FAILED
        )
        await self.store.AppendTrajectory(
            store_pb.AppendTrajectoryRequest(
                request_id=new_id(),
                job_id=self.job_id,
                step=step,
                query_id=query,
                trajectory_id=trajectory,
                state=state,
                reason="" if samples else "deadline: test",
                samples=samples,
            )
        )

    def rollouts(
        self,
        model: Any,
        *,
        step: int = 0,
        policies: Sequence[str] = ("solver",),
        queries: Sequence[str] = ("q0", "q1"),
        group_size: int = 4,
        version: int = 0,
        seed: int = 0,
    ) -> list[tuple[str, str, list[store_pb.Sample]]]:
        """(query, trajectory, samples) of a whole step, with rewards that differ."""
        generator = torch.Generator().manual_seed(seed * 1000 + step)
        found = []
        for query in queries:
            for number in range(group_size):
                trajectory = f"{query}-s{step}-t{number}"
                prompt = PROMPTS[query]
                length = int(torch.randint(1, 6, (1,), generator=generator))
                response = torch.randint(64, (length,), generator=generator).tolist()
                logprobs = score(model, [*prompt, *response], len(prompt)).tolist()
                samples = [
                    make_rollout(
                        query,
                        trajectory,
                        policy=policy,
                        turn=turn,
                        prompt=prompt,
                        response=response,
                        logprobs=logprobs,
                        reward=float(number % 2),
                        version=version,
                    )
                    for turn, policy in enumerate(policies)
                ]
                found.append((query, trajectory, samples))
        return found

    async def play(self, model: Any, **options: Any) -> None:
        """Append all trajectories of a step."""
        for query, trajectory, samples in self.rollouts(model, **options):
            await self.append(query, trajectory, samples, options.get("step", 0))

    def first_model(self, spec: JobSpec, policy: str = "solver") -> Any:
        """The model at version 0."""
        return load_model(policy, spec.policies[policy], spec.seed)

    def weights(self, ref: common_pb.WeightsRef) -> dict[str, torch.Tensor]:
        """Published weights, verified."""
        found: dict[str, torch.Tensor] = self.transfer.get(ref.key, expected_checksum=ref.checksum)[
            0
        ]
        return found


def fill_up(disk: Path, leave: int) -> Path:
    """Write a file that leaves this many bytes of room; delete it to have the room back."""
    ballast = disk / "ballast"
    room = os.statvfs(disk)
    ballast.write_bytes(b"x" * (room.f_bavail * room.f_bsize - leave))
    return ballast
