"""A trainer worker without models: a real gRPC server that follows a script."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import xxhash

from services.chassis.settings import ServiceSettings
from tests.support.fake_worker import FakeWorker
from troupe.rpc import (
    Aborted,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    TroupeError,
    Unavailable,
    new_id,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc


@dataclass
class TrainerScript:
    """How a trainer worker behaves."""

    seconds: float = 0.0
    # Besides, by policy.
    slow: dict[str, float] = field(default_factory=dict)
    bind_error: TroupeError | None = None
    # Bytes of each of its devices; 0: not bounded.
    memory: int = 0
    # Their torch type.
    device: str = "cpu"
    # TROUPE_TRAINER_FORWARD_TOKENS.
    forward_tokens: int = 0
    # Its values of settings that jobs leave open.
    resolved: tuple[common_pb.ResolvedSetting, ...] = ()
    # Ranks that it can run, of gangs that others lead, too; 0: it does not say.
    ranks: int = 0
    # Steps whose update is skipped (a NaN).
    skip: frozenset[int] = frozenset()
    # By policy: steps in which all advantages are zero.
    flat: Mapping[str, Container[int]] = field(default_factory=dict)
    # Go down, once: "claimed", "committed" (before it is reported), "reported" or "restarted".
    die_when: str = ""
    # Break the stream, once, while the step continues.
    break_stream: bool = False
    # Announce a step's weights so many seconds before their commit; 0: never. `break_announced`:
    # then break the stream, once, while the step continues.
    announce_seconds: float = 0.0
    break_announced: bool = False
    disk_full: bool = False
    # Policies that it may hold at once; 0: any number.
    slots: int = 0
    # The suspended state is gone when it is resumed, once.
    lose_suspended: bool = False
    # A rank has died by the time of the first suspension.
    lose_gang: bool = False
    # Number of suspensions that find no room for the state.
    full_suspensions: int = 0
    # Number of releases that come too late: nothing is released.
    deaf_releases: int = 0
    # The first version of every policy is gone.
    lose_first: bool = False
    # Called when a policy comes onto the device.
    on_device: Callable[[], None] = lambda: None


class FakeTrainer(FakeWorker, trainer_grpc.TrainerServicer):
    """Claims and commits; its weights are a name and a checksum."""

    kind = orchestrator_pb.WORKER_KIND_TRAINER
    name = "troupe.v1.Trainer"

    def __init__(self, settings: ServiceSettings, script: TrainerScript | None = None) -> None:
        super().__init__(settings)
        self.script = script or TrainerScript()
        self.bound: dict[tuple[str, str], common_pb.WeightsRef] = {}
        self.calls: Counter[str] = Counter()
        # Jobs whose data in the host's memory was to be deleted.
        self.deleted: list[str] = []
        self.requests: list[trainer_pb.RunStepRequest] = []
        self.binds: list[trainer_pb.BindRequest] = []
        # Keys of members in the transfer layer.
        self.published: set[str] = set()
        # The maximum of policies bound at once, except for leaving ones.
        self.most = 0
        # Policies whose samples are all claimed, and whose step computes.
        self.computing: set[str] = set()
        # Policies with state here: bound, suspended or prefetched, until a release.
        self.traces: set[tuple[str, str]] = set()
        # Policies whose state was prefetched.
        self.fetched: set[tuple[str, str]] = set()
        self._leaving: set[tuple[str, str]] = set()
        self._steps: dict[tuple[str, str, int], asyncio.Task[store_pb.StepCommit]] = {}
        # By job, policy and step: weights that are announced before their commit.
        self.announced: dict[tuple[str, str, int], common_pb.WeightsRef] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        trainer_grpc.add_TrainerServicer_to_server(self, server)

    def message(self) -> orchestrator_pb.HeartbeatRequest:
        bindings = [
            trainer_pb.BindingStatus(
                job_id=job,
                policy=policy,
                state=common_pb.BINDING_STATE_IDLE,
                version=weights.version,
            )
            for (job, policy), weights in self.bound.items()
        ]
        bindings += [
            trainer_pb.BindingStatus(
                job_id=job, policy=policy, state=common_pb.BINDING_STATE_RELEASED, prefetched=True
            )
            for job, policy in self.fetched - self.bound.keys()
        ]
        return orchestrator_pb.HeartbeatRequest(
            kind=self.kind,
            bindings=bindings,
            trainer=orchestrator_pb.TrainerDevice(
                slots=self.script.slots,
                device=self.script.device,
                memory_bytes=self.script.memory,
                forward_tokens=self.script.forward_tokens,
                ranks=self.script.ranks,
                lends=self.script.ranks > 0,
            ),
        )

    async def down(self) -> None:
        for task in self._steps.values():
            task.cancel()
        await super().down()

    async def Bind(self, request: trainer_pb.BindRequest, context: Any) -> trainer_pb.BindResponse:
        self.calls["Bind"] += 1
        self.binds.append(request)
        if self.script.bind_error is not None:
            raise self.script.bind_error
        weights = self._weights(request.job_id, request.policy, request.version)
        self._bound(request, weights)
        resolved = self.script.resolved
        return trainer_pb.BindResponse(weights=weights, num_parameters=1, resolved=resolved)

    def _weights(self, job_id: str, policy: str, version: int) -> common_pb.WeightsRef:
        """Return the reference of a version that may have the first one's content again."""
        weights = weights_of(job_id, policy, version)
        if (self.settings.data_dir / job_id / "restarted" / policy / str(version)).exists():
            weights.checksum = weights_of(job_id, policy, 0).checksum
        return weights

    async def Restart(
        self, request: trainer_pb.RestartRequest, context: Any
    ) -> trainer_pb.BindResponse:
        self.calls["Restart"] += 1
        key = (request.job_id, request.policy)
        if key not in self.bound:
            raise NotFound(f"{request.policy} is not bound here", kind="not_bound")
        if self.script.lose_first:
            raise FailedPrecondition(
                "no training state of version 0", kind="state_not_found", field="version"
            )
        assert self.bound[key].version in (request.version, request.version + 1)
        folder = self.settings.data_dir / request.job_id / "restarted" / request.policy
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(request.version + 1)).touch()
        self.bound[key] = self._weights(*key, request.version + 1)
        assert self.bound[key].checksum == request.checksum
        await self._maybe_die("restarted")
        return trainer_pb.BindResponse(weights=self.bound[key], num_parameters=1)

    def _bound(
        self,
        request: trainer_pb.BindRequest | trainer_pb.ResumeRequest,
        weights: common_pb.WeightsRef,
    ) -> None:
        self.script.on_device()
        self.bound[request.job_id, request.policy] = weights
        self.traces.add((request.job_id, request.policy))
        self.fetched.discard((request.job_id, request.policy))
        self.most = max(self.most, len(self.bound.keys() - self._leaving))

    async def Suspend(
        self, request: trainer_pb.SuspendRequest, context: Any
    ) -> trainer_pb.SuspendResponse:
        """Between two steps: one that runs is finished first."""
        self.calls["Suspend"] += 1
        key = (request.job_id, request.policy)
        if key not in self.bound:
            raise NotFound(f"{request.policy} is not bound here", kind="not_bound")
        if self.script.full_suspensions:
            self.script.full_suspensions -= 1
            raise ResourceExhausted("no room for the state", kind="storage_full")
        running = [task for (*where, _), task in self._steps.items() if tuple(where) == key]
        self._leaving.add(key)
        await asyncio.gather(*running, return_exceptions=True)
        self._leaving.discard(key)
        version = self.bound.pop(key).version
        if self.script.lose_gang:
            self.script.lose_gang = False
            raise Aborted("a rank ended during 'suspend'", kind="gang_lost")
        state = trainer_pb.SuspendedState(
            key=f"{request.job_id}/{request.policy}/training@{version}",
            checksum="1",
            version=version,
            lease_seconds=30,
            seconds=0.25,
        )
        return trainer_pb.SuspendResponse(state=state)

    async def Resume(
        self, request: trainer_pb.ResumeRequest, context: Any
    ) -> trainer_pb.BindResponse:
        self.calls["Resume"] += 1
        if self.script.lose_suspended:
            self.script.lose_suspended = False
            raise NotFound("it is gone", kind="suspended_state_gone", field="state.key")
        weights = self._weights(request.job_id, request.policy, request.version)
        self._bound(request, weights)
        return trainer_pb.BindResponse(weights=weights, num_parameters=1, seconds=0.25)

    async def Prefetch(
        self, request: trainer_pb.PrefetchRequest, context: Any
    ) -> trainer_pb.PrefetchResponse:
        self.calls["Prefetch"] += 1
        self.traces.add((request.job_id, request.policy))
        self.fetched.add((request.job_id, request.policy))
        return trainer_pb.PrefetchResponse()

    async def RunStep(
        self, request: trainer_pb.RunStepRequest, context: Any
    ) -> AsyncIterator[trainer_pb.StepEvent]:
        self.calls["RunStep"] += 1
        self.requests.append(request)
        bound = self.bound.get((request.job_id, request.policy))
        if bound is None:
            raise NotFound(f"{request.policy} is not bound here", kind="not_bound")
        key = (request.job_id, request.policy, request.step)
        if key not in self._steps or self._steps[key].done():
            self._steps[key] = asyncio.create_task(self._step(request))
        yield trainer_pb.StepEvent(state=common_pb.BINDING_STATE_ACCUMULATING)
        if self.script.break_stream:
            self.script.break_stream = False
            raise Unavailable("the stream broke")
        while self.script.announce_seconds and not self._steps[key].done():
            if (stepped := self.announced.get(key)) is not None:
                yield trainer_pb.StepEvent(
                    state=common_pb.BINDING_STATE_PUBLISHING, stepped=stepped
                )
                if self.script.break_announced:
                    self.script.break_announced = False
                    raise Unavailable("the stream broke")
                break
            await asyncio.sleep(0.01)
        commit = await asyncio.shield(self._steps[key])
        yield trainer_pb.StepEvent(state=common_pb.BINDING_STATE_IDLE, commit=commit)

    async def SaveCheckpoint(
        self, request: trainer_pb.SaveCheckpointRequest, context: Any
    ) -> trainer_pb.SaveCheckpointResponse:
        self.calls["SaveCheckpoint"] += 1
        if self.script.disk_full:
            raise ResourceExhausted(
                "no space left on device",
                kind="disk_full",
                field="data_dir",
                remedy="Free some space.",
            )
        root: Path = self.settings.data_dir / request.job_id / "checkpoints" / request.policy
        path = root / f"v{request.version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(b"weights" * 300_000)
        (path / "config.json").write_text("{}")
        return trainer_pb.SaveCheckpointResponse(path=str(path), num_bytes=1)

    async def KeepMember(
        self, request: trainer_pb.KeepMemberRequest, context: Any
    ) -> trainer_pb.KeepMemberResponse:
        self.calls["KeepMember"] += 1
        if self.bound[request.job_id, request.policy].version != request.version:
            raise FailedPrecondition("it is gone", kind="version_not_kept")
        folder = self._member(request)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(request.checksum)
        return trainer_pb.KeepMemberResponse(path=str(folder), num_bytes=len(request.checksum))

    async def PublishMember(
        self, request: trainer_pb.PublishMemberRequest, context: Any
    ) -> trainer_pb.PublishMemberResponse:
        self.calls["PublishMember"] += 1
        if not self._member(request).is_dir():
            raise NotFound(
                f"the weights of member {request.policy}@{request.version} are gone",
                kind="member_gone",
                field="member",
                value=f"{request.policy}@{request.version}",
            )
        weights = weights_of(request.job_id, request.policy, request.version)
        weights.key = f"{request.job_id}/{request.policy}/members/{request.version}@0"
        self.published.add(weights.key)
        return trainer_pb.PublishMemberResponse(weights=weights)

    async def DropMember(
        self, request: trainer_pb.DropMemberRequest, context: Any
    ) -> trainer_pb.DropMemberResponse:
        self.calls["DropMember"] += 1
        key = f"{request.job_id}/{request.policy}/members/{request.version}@0"
        self.published.discard(key)
        if request.files:
            shutil.rmtree(self._member(request), ignore_errors=True)
        return trainer_pb.DropMemberResponse()

    def _member(self, request: Any) -> Path:
        job = self.settings.data_dir / request.job_id
        return Path(job / "members" / request.policy / f"v{request.version}")

    async def Release(
        self, request: trainer_pb.ReleaseRequest, context: Any
    ) -> trainer_pb.ReleaseResponse:
        if request.delete_states:
            self.deleted.append(request.job_id)
            return trainer_pb.ReleaseResponse()
        self.calls["Release"] += 1
        if self.script.deaf_releases:
            self.script.deaf_releases -= 1
            await asyncio.sleep(60)
        key = (request.job_id, request.policy)
        self.bound.pop(key, None)
        self.traces.discard(key)
        self.fetched.discard(key)
        return trainer_pb.ReleaseResponse()

    async def ListBindings(
        self, request: trainer_pb.ListBindingsRequest, context: Any
    ) -> trainer_pb.ListBindingsResponse:
        return trainer_pb.ListBindingsResponse(bindings=self.message().bindings)

    async def _step(self, request: trainer_pb.RunStepRequest) -> store_pb.StepCommit:
        common: dict[str, Any] = {
            "job_id": request.job_id,
            "policy": request.policy,
            "step": request.step,
        }
        status = await self.store.GetStep(
            store_pb.GetStepRequest(job_id=request.job_id, step=request.step)
        )
        for commit in status.commits:
            if commit.policy == request.policy:
                return commit
        claimant = f"{self.worker_id}/{new_id()}"
        await self.store.ReleaseClaims(
            store_pb.ReleaseClaimsRequest(request_id=new_id("release"), **common)
        )
        claims: list[str] = []
        # How many versions older than ours each claimed sample was begun with.
        stale: list[int] = []
        digest = 0
        while True:
            claim = await self.store.ClaimMicroBatch(
                store_pb.ClaimMicroBatchRequest(
                    request_id=new_id("claim"),
                    claimant=claimant,
                    max_samples=8,
                    lease_seconds=60,
                    wait_seconds=5,
                    oldest_version=request.oldest_version,
                    **common,
                )
            )
            if claim.outcome == store_pb.ClaimMicroBatchResponse.OUTCOME_EXHAUSTED:
                break
            if claim.outcome == store_pb.ClaimMicroBatchResponse.OUTCOME_CLAIMED:
                claims.append(claim.claim_id)
                ids = [one.sample.sample_id.encode() for one in claim.samples]
                digest = (digest + sum(map(xxhash.xxh3_64_intdigest, ids))) % 2**64
                stale += [
                    request.version - min(span.version for span in one.sample.versions)
                    for one in claim.samples
                ]
            await self._maybe_die("claimed")
        self.computing.add(request.policy)
        await asyncio.sleep(self.script.seconds + self.script.slow.get(request.policy, 0.0))
        self.computing.discard(request.policy)
        outcome, version = store_pb.STEP_OUTCOME_APPLIED, request.version + 1
        if request.step in self.script.skip:
            outcome, version = store_pb.STEP_OUTCOME_SKIPPED, request.version
        elif not claims:
            outcome, version = store_pb.STEP_OUTCOME_EMPTY, request.version
        weights = self._weights(request.job_id, request.policy, version)
        if self.script.announce_seconds and outcome == store_pb.STEP_OUTCOME_APPLIED:
            weights.trained_on.step_result = new_id("result")
            stepped = common_pb.WeightsRef()
            stepped.CopyFrom(weights)
            for name in ("key", "checksum"):
                stepped.ClearField(name)
            self.announced[request.job_id, request.policy, request.step] = stepped
            await asyncio.sleep(self.script.announce_seconds)
        metrics = {"loss/policy": 0.5, "grad_norm": float("nan")}
        if request.step in self.script.flat.get(request.policy, ()):
            metrics |= {"advantage/zero_fraction": 1.0, "grad_norm": 0.0}
        if stale:
            metrics |= {"staleness/mean": sum(stale) / len(stale), "staleness/max": max(stale)}
        committed = await self.store.CommitStep(
            store_pb.CommitStepRequest(
                request_id=new_id("commit"),
                claimant=claimant,
                claim_ids=claims,
                outcome=outcome,
                reason="the loss is NaN" if outcome == store_pb.STEP_OUTCOME_SKIPPED else "",
                weights=weights,
                metrics=metrics,
                samples_digest=digest if outcome == store_pb.STEP_OUTCOME_APPLIED else None,
                **common,
            )
        )
        self.bound[request.job_id, request.policy] = committed.commit.weights
        await self._maybe_die("committed")
        return committed.commit

    async def _maybe_die(self, when: str) -> None:
        if self.script.die_when == when:
            self.script.die_when = ""
            raise self.die()


def weights_of(job_id: str, policy: str, version: int) -> common_pb.WeightsRef:
    """Return the weights of a version: equal versions have equal content."""
    return common_pb.WeightsRef(
        job_id=job_id,
        policy=policy,
        version=version,
        key=f"{job_id}/{policy}/weights@{version}",
        checksum=hashlib.sha256(f"{policy}@{version}".encode()).hexdigest()[:32],
        num_bytes=1,
    )
