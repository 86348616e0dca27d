"""Faults on real processes: an embedded cluster of stub services and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from testbed.chaos.cluster import DisturbedCluster, ServiceProcess
from testbed.chaos.fault_injector import POWER_OFF, FaultInjector
from testbed.chaos.faults import Freeze, SlowDisk, Stall, kill
from testbed.chaos.schedule import PlannedFault
from tests.support.stub_services import write_stub_services
from tests.support.waiting import until
from troupe.cluster import ClusterSettings
from troupe.cluster.redis import ping

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DisturbedCluster]:
    write_stub_services(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = ClusterSettings(
        data_dir=tmp_path / "runs", panel=False, max_restarts=100, max_backoff_seconds=0.3
    )
    cluster = DisturbedCluster(settings, proxied=True)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


def pids(cluster: DisturbedCluster) -> dict[str, int]:
    lives = [cluster.process_of(service) for service in cluster.services]
    return {life.service: life.pid for life in lives if life is not None}


def tracer_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("TracerPid:")[2].split()[0])


async def test_killed_services_are_counted_and_replaced(cluster: DisturbedCluster) -> None:
    before = pids(cluster)
    assert set(before) == set(cluster.services)
    planned = [
        PlannedFault("kill", ("reward",)),
        PlannedFault("kill", ("redis", "trainer-0"), variant="together"),
        PlannedFault("kill", ("orchestrator",), seconds=0.6, variant="again"),
        PlannedFault("partition", pair=("rollout-0", "reward"), seconds=60.0, variant="severed"),
        PlannedFault("stall", ("rollout-0",), seconds=60.0),
        PlannedFault("kill", ("rollout-0",)),  # also one that is stopped can be killed
        PlannedFault("kill", ("reward",)),  # never comes: enough
    ]
    told: list[str] = []
    disturber = FaultInjector(
        cluster, iter(planned), kills=6, power_offs=0, progress=lambda: 1.0, tell=told.append
    )

    await disturber.run()

    done = disturber.done
    assert (done.kills, done.troubles) == (6, [])
    killed = [one.victim for one in done.injected if one.kind == "kill"]
    # Those that die together are noted in the order in which they come back.
    assert [killed[0], *sorted(killed[1:3]), *killed[3:]] == [
        "reward", "redis", "trainer-0", "orchestrator", "rollout-0",
    ]  # fmt: skip
    assert "SIGKILL, twice" in {one.means for one in done.injected}
    after = pids(cluster)
    assert set(after) == set(before)
    replaced = {name for name in before if after[name] != before[name]}
    assert replaced == set(killed)
    # Lasting faults are healed at the end, even before their time.
    assert cluster.network.link(("rollout-0", "reward")).target
    assert psutil.Process(after["rollout-0"]).status() != psutil.STATUS_STOPPED


async def test_a_power_cut_ends_everything_and_the_disk_is_left(cluster: DisturbedCluster) -> None:
    before = pids(cluster)
    kept = cluster.settings.data_dir / "kept"
    kept.write_text("on disk")
    memory = cluster.settings.transfer_dir
    assert memory is not None
    (memory / "lost").write_text("in memory")
    progress = iter([0.1, 0.6, 0.6, *[0.9] * 100])
    disturber = FaultInjector(
        cluster,
        iter(()),
        kills=0,
        power_offs=1,
        progress=lambda: next(progress),
        tell=lambda text: None,
    )

    await disturber.run()

    assert [one.kind for one in disturber.done.injected] == [POWER_OFF]
    assert not any(psutil.pid_exists(pid) for pid in before.values())
    assert set(pids(cluster)) == set(before)
    assert await ping(cluster.cluster.state.redis_url, 2.0) is None
    assert kept.read_text() == "on disk"
    assert not (memory / "lost").exists()


async def test_a_stalled_process_does_nothing_and_goes_on(cluster: DisturbedCluster) -> None:
    fault = Stall("redis")
    url = cluster.cluster.state.redis_url

    await fault.inject(cluster)
    assert await ping(url, 0.3) is not None
    await fault.heal(cluster)

    assert await ping(url, 5.0) is None
    await fault.heal(cluster)  # harmless


async def test_a_frozen_service_stands_still_with_all_its_processes(
    cluster: DisturbedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = psutil.Popen(["sh", "-c", "sleep 60 & wait"])
    await until(parent.children)
    children = parent.children()
    life = ServiceProcess("trainer-0", parent.pid, parent.create_time())
    monkeypatch.setattr(cluster, "process_of", lambda name: life)
    fault = Freeze("trainer-0")

    await fault.inject(cluster)
    family = [parent, *children]
    # A process stops when it has handled the signal, some moments after it was sent.
    await until(lambda: {one.status() for one in family} == {psutil.STATUS_STOPPED})
    await fault.heal(cluster)
    assert psutil.STATUS_STOPPED not in {one.status() for one in family}

    for one in family:
        one.kill()
    parent.wait()
    await fault.inject(cluster)  # the process is gone


async def test_a_slow_disk_leaves_its_process_alive_and_alone(cluster: DisturbedCluster) -> None:
    life = cluster.process_of("redis")
    assert life is not None
    fault = SlowDisk("redis")

    await fault.inject(cluster)
    await asyncio.sleep(0.3)  # how long the disk is slow; any time will do
    await fault.heal(cluster)

    assert await ping(cluster.cluster.state.redis_url, 5.0) is None
    assert cluster.process_of("redis") == life
    assert tracer_of(life.pid) == 0
    # A process that died meanwhile does no harm either.
    await fault.inject(cluster)
    await kill(life)
    await fault.heal(cluster)
    await cluster.until_healthy("redis", 20.0, but=life)
