"""The utilization of hosts over time, in a real Redis; measured by real heartbeats."""

from __future__ import annotations

import math
import time
import types
from collections.abc import AsyncIterator

import pynvml
import pytest
from redis import Redis

import troupe.devices
from services.chassis.heartbeat import Heartbeat, host_id, measured_use
from services.chassis.settings import ServiceSettings
from services.orchestrator.state.host_history import TIERS, HostHistory
from services.orchestrator.state.redis import RedisAccess, host_use_rows
from tests.support.cluster import Cluster
from tests.support.waiting import until
from troupe.devices import GIB, find_devices
from troupe.rpc import InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

HOUR = 3600.0


class Watch:
    """A history with a clock that the test moves."""

    def __init__(self, redis: RedisAccess) -> None:
        self.now = 0.0
        self.history = HostHistory(redis, 10.0, lambda: self.now)

    def note(
        self,
        host: str,
        worker: str,
        busy: float,
        *,
        cores: float = 4.0,
        name: str = "",
        use: orchestrator_pb.HostUse | None = None,
    ) -> None:
        """Let a worker report `busy` seconds of its host's CPU."""
        cpu = orchestrator_pb.HostCpu(cores=cores, busy_seconds=busy, at=self.now)
        self.history.note(host, name or host.partition("/")[0], worker, cpu, use)

    async def read(self, back: float = HOUR) -> orchestrator_pb.ListHostUseResponse:
        """Return what is kept of the last `back` seconds."""
        return await self.history.between(time.time() - back, None, 0)


@pytest.fixture
async def watch(empty_redis: str) -> AsyncIterator[Watch]:
    redis = RedisAccess(empty_redis)
    yield Watch(redis)
    await redis.close()


def used(device: str, utilization: float, used_gib: int) -> orchestrator_pb.HostUse:
    """Return a measurement of half of the memory, and of one GPU of 80 GiB."""
    use = orchestrator_pb.HostUse(memory_bytes=8 * GIB, used_bytes=4 * GIB)
    use.devices.add(
        uuid=device, utilization=utilization, memory_bytes=80 * GIB, used_bytes=used_gib * GIB
    )
    return use


async def test_workers_of_one_host_count_once_and_each_gpu_once(watch: Watch) -> None:
    for worker in ("r0", "t0", "t1"):
        watch.note("a/1", worker, 100.0)
    watch.note("b/2", "r1", 5.0)
    watch.now = 10.0
    # Both see the same CPU and the same GPU; one sees another GPU as well.
    watch.note("a/1", "r0", 120.0, use=used("GPU-0", 0.5, 40))
    watch.note("a/1", "t0", 120.0, use=used("GPU-0", 0.5, 40))
    watch.note("a/1", "t1", 120.0, use=used("GPU-1", 1.0, 80))
    watch.note("b/2", "r1", 15.0)
    await watch.history.write_row()
    found = await watch.read()
    assert [host.host for host in found.hosts] == ["a", "b"]
    a, b = found.hosts
    assert (a.cpu[0], a.memory[0], a.gpu[0], a.gpu_memory[0]) == (0.5, 0.5, 0.75, 0.75)
    assert b.cpu[0] == 0.25
    assert math.isnan(b.gpu[0])
    assert abs(found.times[0] - time.time()) < HOUR


async def test_a_silent_host_has_a_gap_and_equal_names_are_told_apart(
    watch: Watch, empty_redis: str
) -> None:
    watch.note("a/boot1", "r0", 0.0)
    watch.note("a/boot2", "r1", 0.0)
    watch.now = 10.0
    watch.note("a/boot1", "r0", 10.0)
    watch.note("a/boot2", "r1", 40.0)
    await watch.history.write_row()
    watch.now = 50.0
    watch.note("a/boot2", "r1", 80.0)
    await watch.history.write_row()
    with Redis.from_url(empty_redis) as redis:
        rows = redis.xrange(host_use_rows(1))
    first, second = (orchestrator_pb.HostUseRow.FromString(row[b"r"]) for _, row in rows)
    assert list(first.hosts) == ["a (boot1)", "a (boot2)"]
    assert list(first.cpu) == [0.25, 1.0]
    assert list(second.hosts) == ["a"]
    assert list(second.cpu) == [0.25]


async def test_old_rows_are_means_and_their_number_is_bounded(
    watch: Watch, empty_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.orchestrator.state.host_history.TIERS", ((1, 100), (6, 1440)))
    watch.note("a/1", "r0", 0.0)
    busy = 0.0
    for row in range(1, 361):
        watch.now = 10.0 * row
        busy += 40.0 if row % 2 else 0.0  # every other row is fully busy
        watch.note("a/1", "r0", busy)
        await watch.history.write_row()
    with Redis.from_url(empty_redis) as redis:
        fine, coarse = redis.xlen(host_use_rows(1)), redis.xlen(host_use_rows(6))
        means = [
            orchestrator_pb.HostUseRow.FromString(row[b"r"]).cpu[0]
            for _, row in redis.xrange(host_use_rows(6))
        ]
    assert fine < 360, "the oldest rows are dropped"
    assert coarse == 60
    assert means == [pytest.approx(0.5)] * 60
    # Further back than single rows reach, the means answer.
    found = await watch.read(back=HOUR)
    assert found.hosts[0].cpu[0] == pytest.approx(0.5)


async def test_64_hosts_over_two_weeks_are_read_as_few_points(
    watch: Watch, empty_redis: str
) -> None:
    row = orchestrator_pb.HostUseRow(
        hosts=[f"node-{i:03}" for i in range(64)],
        cpu=[0.5] * 64,
        memory=[0.25] * 64,
        gpu=[1.0] * 64,
        gpu_memory=[math.nan] * 64,
    ).SerializeToString()
    rows, most = TIERS[-1]
    now = time.time()
    with Redis.from_url(empty_redis) as redis:
        pipe = redis.pipeline()
        for i in range(most):
            at = round(1000 * (now - 10.0 * rows * (most - i)))
            pipe.xadd(host_use_rows(rows), {"r": row}, id=f"{at}-0")
        pipe.execute()
        assert redis.memory_usage(host_use_rows(rows), samples=0) < 8 << 20
    found = await watch.history.between(now - 14 * 86400, now, 100)
    assert 100 <= len(found.times) <= 101
    assert list(found.times) == sorted(found.times)
    assert len(found.hosts) == 64
    assert set(found.hosts[63].cpu) == {0.5}
    assert all(map(math.isnan, found.hosts[0].gpu_memory))
    assert found.ByteSize() < 200_000


@pytest.mark.parametrize(
    ("field", "since", "points"), [("since", 2e9 + 1e9, 10), ("points", 0.0, 5000)]
)
async def test_a_bad_range_names_its_field(
    watch: Watch, field: str, since: float, points: int
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await watch.history.between(since, None, points)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["since", "until"])
@pytest.mark.parametrize(("seconds", "nanos"), [(0, -1), (0, 2**31 - 1), (2**62, 0), (-(2**40), 0)])
async def test_an_invalid_date_is_refused_by_field_and_value(
    cluster: Cluster, field: str, seconds: int, nanos: int
) -> None:
    request = orchestrator_pb.ListHostUseRequest()
    stamp = getattr(request, field)
    stamp.seconds, stamp.nanos = seconds, nanos
    with pytest.raises(InvalidArgument) as caught:
        await cluster.api.ListHostUse(request)
    assert caught.value.field == field
    assert str(seconds or nanos) in str(caught.value)


async def test_a_range_before_the_epoch_is_empty(cluster: Cluster) -> None:
    request = orchestrator_pb.ListHostUseRequest()
    request.since.seconds, request.until.seconds = -62135596800, -1
    assert not (await cluster.api.ListHostUse(request)).hosts


async def test_heartbeats_bring_measurements_that_survive_a_restart(
    cluster: Cluster,
) -> None:
    """The worker's heartbeat and the orchestrator's own host are one host."""
    await restart(cluster, 0.2)
    settings = ServiceSettings(
        orchestrator_address=cluster.settings.address, port=7, worker_id="w1"
    )
    beat = Heartbeat(
        settings,
        lambda: orchestrator_pb.HeartbeatRequest(kind=orchestrator_pb.WORKER_KIND_ROLLOUT),
        interval=0.05,
    )
    await beat.start()
    request = orchestrator_pb.ListHostUseRequest()
    request.since.FromNanoseconds(time.time_ns() - 30 * 10**9)

    async def measured() -> bool:
        found = await cluster.api.ListHostUse(request)
        return bool(found.hosts) and found.hosts[0].cpu[-1] >= 0 and found.hosts[0].memory[-1] > 0

    await until(measured)
    found = await cluster.api.ListHostUse(request)
    assert [one.host for one in found.hosts] == [host_id().partition("/")[0]]
    await beat.stop()
    await restart(cluster, 1000)
    assert await measured()


async def restart(cluster: Cluster, host_use_seconds: float) -> None:
    """Restart the orchestrator with another interval between measurements."""
    await cluster.stop_orchestrator()
    update = {"host_use_seconds": host_use_seconds}
    cluster.settings = cluster.settings.model_copy(update=update)
    await cluster.start_orchestrator()


def test_the_driver_s_figures_of_the_own_devices_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML's answers, with the real library; its driver is not here."""
    monkeypatch.setattr(troupe.devices, "_driver", troupe.devices._Driver())
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=GIB),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=25),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    devices = find_devices({"TROUPE_DEVICES": "4xH100-80GB", "CUDA_VISIBLE_DEVICES": "2,3"})
    use = measured_use(devices)
    assert 0 < use.used_bytes < use.memory_bytes
    assert [(one.uuid, one.utilization, one.used_bytes) for one in use.devices] == [
        ("2", 0.25, GIB),
        ("3", 0.25, GIB),
    ]
