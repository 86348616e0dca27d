"""A data disk that fills up or becomes read-only: reported by name, waited for, and resumed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until
from troupe.cluster.child import Child, ChildState
from troupe.cluster.errors import DiskFull
from troupe.cluster.layout import ChildSpec
from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.redis import redis_executable, write_config
from troupe.cluster.supervisor import Supervisor
from troupe.disks import shortage


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def redis_child(disk: Path, max_restarts: int) -> tuple[ChildSpec, str]:
    config, url = write_config(disk, port := free_port())
    spec = ChildSpec(
        name="redis",
        command=(redis_executable(), str(config)),
        probe=Probe(ProbeKind.REDIS, url),
        address=f"127.0.0.1:{port}",
        max_restarts=max_restarts,
        start_seconds=PATIENCE,
    )
    return spec, url


async def test_redis_waits_for_room_and_has_lost_nothing(disk: Path) -> None:
    spec, url = redis_child(disk, max_restarts=1)
    told: list[str] = []

    def changed(child: Child, event: str) -> None:
        if event:
            told.append(event)

    supervisor = Supervisor([spec], disk / "logs", changed)
    await supervisor.start()
    failure = asyncio.create_task(supervisor.failure())
    client: Any = Redis.from_url(url)
    child = supervisor.children["redis"]
    try:
        kept = 0
        for _ in range(2):  # and a second time
            filler = await asyncio.to_thread(fill, disk)
            with suppress(RedisError, OSError):
                while True:
                    await client.set(f"key-{kept}", bytes(10_000))
                    kept += 1
            await until(lambda: child.state == ChildState.WAITING)
            assert f"the disk of {disk}/logs is full (0 of 32 MiB are free)" in told[-1]
            assert "redis exited with status" in told[-1]
            await asyncio.sleep(2.5)  # it is not started in vain
            assert (child.restarts, failure.done()) == (kept and len(told) // 3, False)
            filler.unlink()
            await until(lambda: child.state == ChildState.SERVING)
            assert told[-1] == "redis is back"
            for number in range(kept):
                assert await client.get(f"key-{number}") == bytes(10_000)
            await client.set(f"key-{kept}", bytes(10_000))
            kept += 1
    finally:
        failure.cancel()
        await client.aclose()
        await supervisor.stop()


async def test_a_service_that_dies_waits_for_a_disk_that_is_read_only(disk: Path) -> None:
    (disk / "logs").mkdir()
    place = disk / "logs"
    spec = ChildSpec(
        name="redis",
        command=(redis_executable(), "--port", str(port := free_port()), "--save", ""),
        probe=Probe(ProbeKind.REDIS, f"redis://127.0.0.1:{port}/0"),
        address=f"127.0.0.1:{port}",
        max_restarts=1,
        start_seconds=PATIENCE,
    )
    told: list[str] = []
    supervisor = Supervisor([spec], place, lambda child, event: told.append(event))
    await supervisor.start()
    failure = asyncio.create_task(supervisor.failure())
    child = supervisor.children["redis"]
    try:
        # Files that are open stay so, as when the kernel makes a damaged disk read-only.
        run("mount", "--bind", "-o", "ro", str(place), str(place))
        try:
            assert shortage(place) == f"the disk of {place} is read-only"
            child.strike()
            await until(lambda: child.state == ChildState.WAITING)
            assert "is read-only; it restarts when files can be written" in told[-1]
        finally:
            run("umount", "-l", str(place))
        await until(lambda: child.state == ChildState.SERVING)
        assert not failure.done()
    finally:
        failure.cancel()
        await supervisor.stop()


async def test_a_service_that_cannot_start_on_a_full_disk_names_it(disk: Path) -> None:
    write = f"open({str(disk / 'state')!r}, 'wb').write(bytes(1 << 20))"
    spec = ChildSpec(
        name="orchestrator",
        command=(sys.executable, "-c", write),
        probe=Probe(ProbeKind.GRPC, f"127.0.0.1:{free_port()}"),
        address="",
    )
    (disk / "logs").mkdir()
    fill(disk)
    with pytest.raises(
        DiskFull, match=r"orchestrator cannot start: the disk of .* is full"
    ) as caught:
        await Supervisor([spec], disk / "logs").start()
    assert caught.value.field == "data_dir"
    assert "Free space there" in (caught.value.remedy or "")


def test_room_is_seen_by_size_and_by_inodes(disk: Path, tmp_path: Path) -> None:
    assert shortage(disk) is None
    assert shortage(tmp_path / "nowhere") is None
    filler = fill(disk)
    assert "is full (0 of 32 MiB are free)" in (shortage(disk) or "")
    filler.unlink()
    assert shortage(disk) is None
    subprocess.run(["mount", "-o", "remount,size=32m,nr_inodes=8", str(disk)], check=True)
    for number in range(7):
        (disk / str(number)).touch()
    assert "inodes" in (shortage(disk) or "")
