"""Weights from a real trainer's devices into SGLang servers, through shared memory and gloo.

The double of the server is a separate process where bytes must travel between processes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.rollout.engines.servers.direct import DirectLoader, other_versions
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.server import SglangServer
from services.rollout.engines.vllm.server import VllmServer
from services.rollout.engines.weights import load_config
from services.trainer import sending
from tests.rollout.engines.real_server import interpreter
from tests.support import sglang_routes
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.interpreters import ROOT, SGLANG, sglang_double
from tests.support.waiting import PATIENCE
from tests.trainer.stage import Trainer, TrainingStage
from troupe.doctor.interpreters import Environment
from troupe.job import JobSpec, PolicySpec
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound
from troupe.transfer.flat_buckets import JoinedGroup, Meeting, flat_buckets
from troupe.transfer.formats.sglang import SglangFormat, flattened
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb

SERVER = Environment("/sglang/python", "3.11.7", SGLANG)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_BUCKET_BYTES", 4096)


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.slow)])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the interpreter of servers: the double's, or SGLang's if the environment names it."""
    if request.param == "real":
        return interpreter(tmp_path)
    return sglang_double(tmp_path)


@pytest.fixture
async def fake(stage: TrainingStage) -> AsyncIterator[FakeSglang]:
    """The double in this process."""
    model = stage.spec().policies["solver"].language_model
    fake = FakeSglang(load_config(model, "solver").to_dict())
    async with serve(fake):
        yield fake


@asynccontextmanager
async def engine_of(spec: JobSpec, **engine: Any) -> AsyncIterator[SglangEngine]:
    own = spec.policies["solver"].model_dump()
    own["engine"] |= {"kind": "sglang", "max_running": 4, "start_timeout_seconds": 400, **engine}
    made = SglangEngine("e0", "solver", PolicySpec.model_validate(own))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def url(fake: FakeSglang) -> str:
    return f"http://127.0.0.1:{fake.server.port}"


def loader_of(engine: SglangEngine) -> DirectLoader:
    loader = engine._server.updater._loader
    assert isinstance(loader, DirectLoader)
    return loader


async def trained(stage: TrainingStage, trainer: Trainer, spec: JobSpec, step: int) -> Any:
    """Return the weights after another step."""
    await stage.open(step, version=step)
    await stage.play(stage.first_model(spec), step=step, version=step)
    return (await trainer.run(step, step)).weights


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("way", "ranks"), [("ipc", 3), ("broadcast", 1)])
async def test_versions_travel_from_the_trainer_to_a_server(
    stage: TrainingStage, python: str, way: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    ranks = 1 if "real" in request.node.name else ranks
    engine = {"python": python, "update": way, "tensor_parallel": ranks, "max_context": 64}
    async with engine_of(spec, **engine) as served:
        await served.update_weights(first, stage.transfer)
        assert served.last_update is not None
        assert (served.last_update.way, served.update_fallbacks) == (way, 0)
        group = loader_of(served)._group
        second = await trained(stage, trainer, spec, 0)
        await served.update_weights(second, stage.transfer)  # proven by the prompt's log-probs
        assert (served.last_update.version, served.last_update.way) == (1, way)
        assert (served.version, served.checksum) == (1, second.checksum)
        assert served.update_fallbacks == 0
        # A group is made once.
        assert loader_of(served)._group == group
        assert bool(group) == (way == "broadcast")


@pytest.mark.usefixtures("small_buckets")
async def test_an_update_that_breaks_half_way_is_loaded_from_host_memory(
    stage: TrainingStage, fake: FakeSglang
) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    async with engine_of(spec, urls=[url(fake)], update="ipc") as served:
        await served.update_weights(first, stage.transfer)
        assert served.last_update is not None
        assert served.last_update.way == "ipc"
        second = await trained(stage, trainer, spec, 0)
        fake.buckets_left = 1  # the first is loaded, the second refused
        await served.update_weights(second, stage.transfer)
        assert (served.version, fake.version) == (1, "1")
        assert (served.last_update.way, served.update_fallbacks) == ("in_place", 1)
        published = stage.weights(second)
        assert all(torch.equal(fake._held[name], published[name]) for name in published)
        assert not fake.session
        # The server has refused the way: it is not tried again.
        fake.buckets_left = -1
        await served.update_weights(third := await trained(stage, trainer, spec, 1), stage.transfer)
        assert (served.last_update.way, served.update_fallbacks) == ("in_place", 1)
        assert served.checksum == third.checksum


async def test_engines_load_from_host_memory_when_the_trainer_moved_on_or_is_gone(
    stage: TrainingStage, fake: FakeSglang
) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    await trainer.bind(spec)
    async with engine_of(spec, urls=[url(fake)], update="ipc") as served:
        second = await trained(stage, trainer, spec, 0)
        third = await trained(stage, trainer, spec, 1)
        await served.update_weights(second, stage.transfer)
        assert served.last_update is not None
        assert (served.last_update.way, served.update_fallbacks) == ("in_place", 1)
        gone = common_pb.WeightsRef()
        gone.CopyFrom(third)
        gone.trained_on.trainer = "127.0.0.1:1"
        await served.update_weights(gone, stage.transfer)
        assert (served.version, served.last_update.way) == (2, "in_place")
        assert served.update_fallbacks == 2


async def test_on_a_cpu_nothing_is_sent_unless_the_job_says_so(
    stage: TrainingStage, fake: FakeSglang
) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    assert first.trained_on.device == "cpu"
    async with engine_of(spec, urls=[url(fake)]) as served:
        await served.update_weights(first, stage.transfer)
        assert served.last_update is not None
        assert (served.last_update.way, served.update_fallbacks) == ("in_place", 0)
        loader = loader_of(served)
        loader._described = replace(loader._described, device="cuda")
        ref = common_pb.WeightsRef()
        ref.CopyFrom(first)
        ref.trained_on.device = "cuda"
        ref.trained_on.device_uuid = "GPU-1"
        # (The server's devices, the job's setting, the way.) A server that cannot open handles of
        # a GPU would end; the devices of an attached server are unknown.
        for visible, setting, way in (
            ({"GPU-0", "GPU-1"}, "auto", "ipc"),
            ({"GPU-0"}, "auto", "broadcast"),
            ({"GPU-0"}, "ipc", None),
            (None, "auto", "broadcast"),
            (None, "ipc", "ipc"),
        ):
            loader._visible, loader._setting = visible, setting
            assert loader.chosen(ref) == way, (visible, setting)
        loader._visible, loader._setting = {"GPU-1"}, "auto"
        ref.trained_on.host_id = "another host"
        assert loader.chosen(ref) == "broadcast"
        loader._setting = "disk"
        assert loader.chosen(ref) is None


async def test_a_server_with_another_nccl_gets_nothing_by_broadcast(
    stage: TrainingStage, fake: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    assert first.trained_on.torch == version("torch")
    async with engine_of(spec, urls=[url(fake)]) as served:
        loader = loader_of(served)
        loader._described = replace(loader._described, device="cuda")
        ref = common_pb.WeightsRef()
        ref.CopyFrom(first)
        source = ref.trained_on
        source.device, source.torch, source.nccl = "cuda", "2.13.0+cu130", "2.29.7"
        for environment, way in (
            (SERVER, "broadcast"),
            (replace(SERVER, packages=SERVER.packages | {"torch": "2.13.0+cu126"}), "broadcast"),
            (None, "broadcast"),  # attached: it does not say
            (replace(SERVER, packages={"nvidia-nccl-cu13": "2.29.7"}), "broadcast"),
            (replace(SERVER, packages=SERVER.packages | {"nvidia-nccl-cu13": "2.30.7"}), None),
            (replace(SERVER, packages=SERVER.packages | {"torch": "2.14.1"}), None),
        ):
            loader._refused.clear()
            loader._environment = environment
            assert loader.chosen(ref) == way, environment
        assert loader._refused == {"broadcast"}
        told = next(one for one in caplog.messages if "no weights by broadcast, but by" in one)
        assert "NCCL 2.29.7" in told
        assert "NCCL 2.30.7" in told
        source.device, loader._setting = "cpu", "broadcast"
        loader._refused.clear()
        packages = SglangServer.group_packages
        assert other_versions(source, replace(SERVER, packages={"torch": "2.14.1"}), packages)
        same = replace(SERVER, packages={"torch": "2.13.0+cpu"})
        assert not other_versions(source, same, packages)
        # vLLM's workers join by NCCL itself.
        source.device = "cuda"
        other = replace(SERVER, packages={"torch": "2.14.1", "nvidia-nccl-cu13": "2.29.7"})
        assert other_versions(source, other, packages)
        assert not other_versions(source, other, VllmServer.group_packages)


async def test_a_launched_server_of_another_torch_is_updated_by_the_next_way(
    stage: TrainingStage, tmp_path: Path
) -> None:
    other = sglang_double(tmp_path, {"sglang": "0.5.23", "torch": "2.14.1"})
    spec, trainer = stage.spec(), await stage.trainer()
    await trainer.bind(spec)
    async with engine_of(spec, python=other, update="broadcast", max_context=64) as served:
        await served.update_weights(await trained(stage, trainer, spec, 0), stage.transfer)
        assert served.last_update is not None
        assert served.last_update.way == "in_place"


async def test_weights_that_cannot_be_sent_are_refused(stage: TrainingStage) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)

    async def events(**wanted: Any) -> list[trainer_pb.SendWeightsEvent]:
        message = trainer_pb.WantedWeights(
            job_id=stage.job_id,
            policy="solver",
            checksum=first.checksum,
            way="ipc",
            ranks=1,
            format="sglang",
        )
        message.MergeFrom(trainer_pb.WantedWeights(**wanted))

        async def messages() -> AsyncIterator[trainer_pb.SendWeightsRequest]:
            yield trainer_pb.SendWeightsRequest(wanted=message)
            await asyncio.sleep(60)

        return [event async for event in trainer.stub.SendWeights(messages(), timeout=PATIENCE)]

    with pytest.raises(InvalidArgument) as way:
        await events(way="post")
    assert way.value.field == "way"
    with pytest.raises(InvalidArgument) as form:
        await events(format="another")
    assert (form.value.field, form.value.value) == ("format", "another")
    with pytest.raises(NotFound, match="not bound"):
        await events(policy="another")
    with pytest.raises(FailedPrecondition) as version:
        await events(version=7)
    assert version.value.kind == "weights_moved_on"


async def test_a_caller_that_leaves_frees_the_trainer(stage: TrainingStage) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    wanted = trainer_pb.WantedWeights(
        job_id=stage.job_id,
        policy="solver",
        checksum=first.checksum,
        way="ipc",
        ranks=1,
        format="sglang",
    )

    async def messages() -> AsyncIterator[trainer_pb.SendWeightsRequest]:
        yield trainer_pb.SendWeightsRequest(wanted=wanted)
        await asyncio.sleep(60)

    stream = trainer.stub.SendWeights(messages(), timeout=PATIENCE)
    async for event in stream:
        assert event.HasField("ready")
        break
    stream.cancel()
    async with asyncio.timeout(sending._READY_SECONDS / 2):
        assert (await trained(stage, trainer, spec, 0)).version == 1


class BrokenGroup(JoinedGroup):
    """A process group with a server that fails at the point `fails`."""

    def __init__(self, fails: str) -> None:
        self.fails, self.ended = fails, threading.Event()

    def broadcast(self, tensor: torch.Tensor) -> Any:
        if self.fails == "broadcast":
            raise torch.distributed.DistBackendError("NCCL error: unhandled system error")
        if self.fails == "blocks":  # as NCCL does while it connects to a server that is gone
            assert self.ended.wait(PATIENCE)
            raise torch.distributed.DistBackendError("aborted")
        return self

    def wait(self) -> None:
        raise torch.distributed.DistBackendError("connection closed by remote peer")

    def end(self) -> None:
        self.ended.set()


class BrokenFormat(SglangFormat):
    def __init__(self, fails: str) -> None:
        self.group = BrokenGroup(fails)

    def join(self, meeting: Meeting) -> JoinedGroup:
        if self.group.fails == "join":
            raise torch.distributed.DistStoreError("wait timeout")
        return self.group


GROUP_FAILURES = ("join", "broadcast", "blocks", "wait")


@pytest.mark.parametrize("fails", GROUP_FAILURES)
@pytest.mark.usefixtures("small_buckets")
async def test_an_update_whose_process_group_fails_raises_a_typed_error_and_takes_another_way(
    stage: TrainingStage, fake: FakeSglang, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BrokenFormat(fails)
    monkeypatch.setattr(sending, "format_of", lambda name: broken)
    if fails == "blocks":
        monkeypatch.setattr(sending, "_seconds", lambda bucket: 0.5)
    # The double joins, and loads what is broadcast, without a group.
    monkeypatch.setattr(sglang_routes, "_joined", lambda body: None)
    for call in ("broadcast", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, call, lambda *arguments: None)
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    async with engine_of(spec, urls=[url(fake)], update="broadcast") as served:
        await served.update_weights(first, stage.transfer)
        assert served.last_update is not None
        assert (served.last_update.way, served.update_fallbacks) == ("in_place", 1)
        # The way is not tried again: the next update would pause its turns just as long.
        second = await trained(stage, trainer, spec, 0)
        await served.update_weights(second, stage.transfer)
        assert (served.last_update.way, served.update_fallbacks) == ("in_place", 1)
        assert (served.version, served.checksum) == (1, second.checksum)
    assert fails == "join" or broken.group.ended.wait(PATIENCE)


@pytest.mark.parametrize("way", ["ipc", "broadcast"])
def test_a_broadcast_that_nobody_receives_is_not_waited_for_on_the_device(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server died: NCCL's kernel does not end, so that the whole device is never idle."""
    broken = BrokenFormat("nowhere")
    monkeypatch.setattr(sending, "format_of", lambda name: broken)
    waited: list[str] = []

    def forbidden(device: object) -> None:
        raise AssertionError("a broadcast is in flight")

    monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
    stream = SimpleNamespace(synchronize=lambda: waited.append("own stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    flat = SimpleNamespace(is_cuda=True, device="cuda:0", nbytes=512 << 20, dtype=torch.bfloat16)
    bucket = SimpleNamespace(flat=flat, dtype="bfloat16", shapes={"t": torch.Size([2])})
    monkeypatch.setattr(sending, "flat_buckets", lambda named, limit, device: iter([bucket] * 3))
    monkeypatch.setattr(broken, "handles", lambda bucket: b"")

    round_ = sending.SendingRound(sending.UpdateGroups("127.0.0.1", torch.device("cpu")))

    def hears(event: trainer_pb.SendWeightsEvent | None) -> None:
        if event is None:
            return
        if event.HasField("ready"):
            round_.acknowledged(receiver)
        elif event.HasField("bucket"):
            round_.left(receiver)

    wanted = trainer_pb.WantedWeights(way=way, ranks=1, format="sglang")
    receiver = sending.Receiver(wanted, hears)
    round_.receivers.append(receiver)
    round_.send([], torch.device("cpu"))
    assert receiver.error is not None
    assert "gave the update up" in receiver.error.message
    assert bool(waited) == (way == "ipc")
    if way == "broadcast":
        assert broken.group.ended.wait(PATIENCE)


_MEMBER = """
import sys, time
from tests.support.sglang_routes import _joined
port, name = int(sys.argv[1]), sys.argv[2]
where = {"master_address": "127.0.0.1", "master_port": port, "group_name": name}
_joined(where | {"rank_offset": 1, "world_size": 2, "backend": "gloo"})
time.sleep(600)
"""


@pytest.mark.slow
def test_a_server_that_receives_nothing_does_not_hold_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_READY_SECONDS", 300.0)
    members: list[subprocess.Popen[bytes]] = []

    def join(event: trainer_pb.SendWeightsEvent | None) -> None:
        assert event is not None
        group = event.group
        command = [sys.executable, "-c", _MEMBER, str(group.port), group.name]
        members.append(subprocess.Popen(command, cwd=ROOT))

    groups = sending.UpdateGroups("127.0.0.1", torch.device("cpu"))
    try:
        wanted = trainer_pb.WantedWeights(ranks=1, format="sglang")
        groups.make("g", [sending.Receiver(wanted, join)])
        work = groups.broadcast("g", torch.zeros(20_000_000))
        assert not work.is_completed()
        dropped = threading.Thread(target=groups.drop, args=("g",), daemon=True)
        dropped.start()
        dropped.join(PATIENCE)
        assert not dropped.is_alive()
    finally:
        for member in members:
            member.kill()


def test_buckets_hold_every_tensor_once() -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(7):
            dtype = torch.float32 if number == 3 else torch.bfloat16
            yield f"t{number}", torch.randn(number, 5).to(dtype)

    given = dict(tensors())
    found: dict[str, torch.Tensor] = {}
    for bucket in flat_buckets(given.items(), 120, torch.device("cpu")):
        content = flattened(bucket)
        assert content["flattened_tensor"].nbytes <= 120 or len(bucket.shapes) == 1
        for one in content["metadata"]:
            part = bucket.flat[one.start_idx : one.end_idx].reshape(one.shape)
            assert one.name not in found
            found[one.name] = part
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert all(found[name].dtype == given[name].dtype for name in given)
