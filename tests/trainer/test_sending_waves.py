"""A version from a real trainer to the servers of a wave: one process group, each bucket once.

The servers are separate processes, doubles of SGLang or real ones on a CPU, in gloo groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from services.rollout.engines.servers.direct import DirectLoader
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.serving.policy import ServedPolicy
from services.trainer import sending, weight_sender
from tests.support.interpreters import sglang_double
from tests.support.waiting import until
from tests.trainer.stage import TrainingStage
from tests.trainer.test_sending import python as python  # a fixture
from tests.trainer.test_sending import trained
from troupe.contracts import kinds
from troupe.job import JobSpec, PolicySpec
from troupe.transfer import flat_buckets as buckets_module
from troupe.transfer.flat_buckets import FlatBucket, JoinedGroup, flat_buckets
from troupe.transfer.formats.sglang import SglangFormat
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.workflow.languages import Language

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the trainer makes: `rounds` and the `servers` in them, `tensors` read, `bytes` in
    buckets, `groups` and their `members`. `workers`: how many rollout workers a wave is said to be
    of."""
    counts: Counter[str] = Counter()
    make, send = sending.UpdateGroups.make, sending.SendingRound.send

    def sent(round_: sending.SendingRound, named: Any, device: torch.device) -> None:
        counts["rounds"] += 1
        counts["servers"] += len(round_.receivers)
        counts["workers"] = max(one.wanted.wave.workers for one in round_.receivers)
        send(round_, named, device)

    def counted(
        named: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
    ) -> Iterator[FlatBucket]:
        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for one in named:
                counts["tensors"] += 1
                yield one

        for bucket in flat_buckets(read(), limit, device):
            counts["bytes"] += bucket.flat.nbytes
            yield bucket

    def joined(groups: sending.UpdateGroups, name: str, receivers: Sequence[Any]) -> None:
        counts["groups"] += 1
        counts["members"] += len(receivers)
        make(groups, name, receivers)

    monkeypatch.setattr(sending, "_BUCKET_BYTES", 4096)
    monkeypatch.setattr(sending, "flat_buckets", counted)
    monkeypatch.setattr(sending.UpdateGroups, "make", joined)
    monkeypatch.setattr(sending.SendingRound, "send", sent)
    return counts


@asynccontextmanager
async def serving(
    stage: TrainingStage,
    spec: JobSpec,
    first: common_pb.WeightsRef,
    python: str,
    launches: Sequence[Sequence[str]],
) -> AsyncIterator[tuple[ServedPolicy, list[SglangEngine]]]:
    """Yield a policy served by launched servers, one for each of `launches`, their arguments."""
    own = spec.policies["solver"].model_dump()
    own["engine"] |= {
        "kind": "sglang",
        "python": python,
        "update": "broadcast",
        "max_context": 64,
        "max_running": 4,
        "start_timeout_seconds": 400,
        "replicas": len(launches),
    }
    engines = []
    for number, launch in enumerate(launches):
        own["engine"]["launch"] = list(launch)
        policy = PolicySpec.model_validate(own)
        engines.append(SglangEngine(f"e{number}", "solver", policy, replica=number))
    policy = ServedPolicy(
        "solver", cast(Language, None), engines, stage.transfer, policy.engine, first
    )
    try:
        await policy.bring_up()
        yield policy, engines
    finally:
        await policy.release("the test is over")


def reports(engines: Iterable[SglangEngine]) -> list[tuple[int | None, str, int]]:
    """Return the served version, way and fallbacks of each."""
    return [
        (one.version, one.last_update.way if one.last_update else "", one.update_fallbacks)
        for one in engines
    ]


def refused(engine: SglangEngine) -> set[str]:
    loader = engine._server.updater._loader
    assert isinstance(loader, DirectLoader)
    return set(loader._refused)


async def test_all_servers_of_a_wave_share_one_group_and_every_bucket(
    stage: TrainingStage,
    python: str,
    made: Counter[str],
    request: pytest.FixtureRequest,
) -> None:
    count = 2 if "real" in request.node.name else 3
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    async with serving(stage, spec, first, python, [()] * count) as (policy, engines):
        assert reports(engines) == [(0, "broadcast", 0)] * count
        for version in (1, 2):
            ref = await trained(stage, trainer, spec, version - 1)
            made.clear()
            # Each server is proven by the prompt's log-probs.
            await policy.update(ref, workers=version)
            assert reports(engines) == [(version, "broadcast", 0)] * count
            # (The trainer knows from the first version that the second worker does not send.)
            assert (made["rounds"], made["servers"], made["workers"]) == (1, count, version)
            published = stage.weights(ref)
            # For any number of servers: one copy of each tensor, in buckets for all.
            assert made["tensors"] == len(published)
            assert made["bytes"] == sum(tensor.nbytes for tensor in published.values())
            # The group of all is kept for later versions.
            assert (made["groups"], made["members"]) == ((1, count) if version == 1 else (0, 0))


@pytest.mark.parametrize("fault", ["dies", "refuses"])
async def test_a_server_that_fails_in_a_wave_costs_only_itself(
    stage: TrainingStage, tmp_path: Path, fault: str, made: Counter[str]
) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    first = await trainer.bind(spec)
    # By itself the server takes the first version, and of the second one some buckets.
    buckets = len(list(flat_buckets(stage.weights(first).items(), 4096, CPU)))
    faulty = (f"--{fault}-after", str(buckets + 2))
    async with serving(stage, spec, first, sglang_double(tmp_path), [(), faulty, ()]) as (
        policy,
        engines,
    ):
        assert reports(engines) == [(0, "broadcast", 0)] * 3
        ref = await trained(stage, trainer, spec, 0)
        await policy.update(ref)
        good, bad = [engines[0], engines[2]], engines[1]
        # In the same pause, from host memory.
        assert reports(good) == [(1, "in_place", 1)] * 2
        assert [refused(one) for one in good] == [set(), set()]
        assert refused(bad) == {"broadcast"}
        if fault == "dies":
            await until(lambda: bad.restarts == 1 and policy.serving == 3)
        assert reports([bad])[0][:2] == (1, "in_place")
        # The others continue together.
        made.clear()
        await policy.update(await trained(stage, trainer, spec, 1))
        assert reports(good) == [(2, "broadcast", 1)] * 2
        assert reports([bad])[0][:2] == (2, "in_place")
        assert (made["groups"], made["members"]) == (1, 2)


class Server:
    """A server with scripted answers to each event, in no real group."""

    def __init__(
        self, round_: sending.SendingRound, way: str, says: Callable[[Server, int], None]
    ) -> None:
        self.round, self._says, self.events = round_, says, 0
        wanted = trainer_pb.WantedWeights(way=way, ranks=1, format="sglang")
        self.receiver = sending.Receiver(wanted, self._hears)
        self.buckets: list[trainer_pb.WeightBucket] = []
        round_.receivers.append(self.receiver)

    def _hears(self, event: trainer_pb.SendWeightsEvent | None) -> None:
        if event is None or event.HasField("group"):
            return
        if event.HasField("bucket"):
            self.buckets.append(event.bucket)
        self._says(self, self.events)
        self.events += 1

    @property
    def error(self) -> str:
        """Return the kind of its error."""
        return "" if self.receiver.error is None else self.receiver.error.kind


def loads(server: Server, event: int) -> None:
    server.round.acknowledged(server.receiver)


def leaves(server: Server, event: int) -> None:
    if event < 2:
        return loads(server, event)
    return server.round.left(server.receiver)


def fails(server: Server, event: int) -> None:
    if event < 2:
        return loads(server, event)
    return server.round.failed(server.receiver, "out of memory")


def is_silent(server: Server, event: int) -> None:
    if event < 2:
        loads(server, event)


class NoGroup(JoinedGroup):
    def broadcast(self, tensor: torch.Tensor) -> Any:
        return self

    def wait(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def round_(monkeypatch: pytest.MonkeyPatch) -> sending.SendingRound:
    """A round of buckets of 64 bytes, whose process groups carry nothing."""
    monkeypatch.setattr(SglangFormat, "join", lambda *arguments: NoGroup())
    monkeypatch.setattr(sending, "_BUCKET_BYTES", 64)
    monkeypatch.setattr(sending, "_seconds", lambda bucket: 0.2)
    return sending.SendingRound(sending.UpdateGroups("127.0.0.1", CPU))


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(4):
        yield f"t{number}", torch.full((16,), float(number))


OWN, PEER = kinds.UPDATE_GROUP_FAILED, kinds.UPDATE_PEER_FAILED


@pytest.mark.parametrize(
    ("behaviour", "errors"),
    [
        ((loads, loads, loads), ("", "", "")),
        ((loads, leaves, loads), (PEER, OWN, PEER)),
        ((loads, fails, loads), (PEER, OWN, PEER)),
        ((loads, is_silent, loads), (PEER, OWN, PEER)),
        # A group that a server has left fails for the others, too.
        ((fails, leaves, fails), (PEER, OWN, PEER)),
        ((fails, fails, fails), (OWN, OWN, OWN)),
    ],
)
def test_only_failed_servers_are_blamed_and_one_without_a_group_gets_everything(
    round_: sending.SendingRound, behaviour: Sequence[Any], errors: Sequence[str]
) -> None:
    servers = [Server(round_, "broadcast", says) for says in behaviour]
    near = Server(round_, "ipc", loads)
    round_.send(tensors(), CPU)
    assert tuple(server.error for server in servers) == errors
    assert near.error == ""
    names = [[one.name for one in bucket.tensors] for bucket in near.buckets]
    assert names == [["t0"], ["t1"], ["t2"], ["t3"]]


async def test_a_round_waits_for_all_servers_of_the_rollout_workers_that_usually_send() -> None:
    def complete(waves: Sequence[str], workers: int, usual: int | None) -> list[bool]:
        """Return whether it begins after each server; servers of a wave of two share a name."""
        groups = sending.UpdateGroups("127.0.0.1", CPU)
        assembly, found = weight_sender._Assembly(sending.SendingRound(groups)), []
        for name in waves:
            servers = waves.count(name)
            wave = trainer_pb.UpdateWave(wave_id=name, servers=servers, workers=workers)
            wanted = trainer_pb.WantedWeights(way="ipc", ranks=1, wave=wave)
            assembly.add(sending.Receiver(wanted, lambda event: None), usual)
            found.append(assembly.complete.is_set())
        assert assembly.count == len(set(waves))
        return found

    assert complete("a", 1, None) == [True]
    assert complete("aa", 1, 7) == [False, True]
    assert complete("abab", 2, None) == [False, False, False, True]
    # One of two workers had no server for the previous version.
    assert complete("aa", 2, 1) == [False, True]


def test_tensors_in_host_memory_are_copied_straight_into_a_bucket_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[tuple[int, int, float]] = []

    def uploaded(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            assert target.is_cuda
            assert target.shape == source.shape
            copies.append((target.storage_offset(), source.numel(), float(source[0])))

    # The device's memory, without one.
    empty = torch.empty

    def fake(*arguments: Any, device: Any = None, **options: Any) -> torch.Tensor:
        with FakeTensorMode():
            return empty(*arguments, device=device, **options)

    monkeypatch.setattr(buckets_module, "upload", uploaded)
    monkeypatch.setattr(torch, "empty", fake)
    (bucket,) = flat_buckets(tensors(), 1 << 20, torch.device("cuda"))
    assert (bucket.flat.device.type, bucket.flat.numel()) == ("cuda", 64)
    assert copies == [(16 * number, 16, float(number)) for number in range(4)]


def test_no_group_is_made_for_servers_that_have_left(round_: sending.SendingRound) -> None:
    servers = [Server(round_, "broadcast", leaves), Server(round_, "ipc", fails)]
    for server in servers:
        server.events = 2
    read: list[str] = []
    round_.send(((name, (read.append(name), tensor)[1]) for name, tensor in tensors()), CPU)
    assert all(server.error for server in servers)
    assert len(read) == 0
