"""Limits of the machine during a job: open files, a full or read-only disk, a moved directory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.standing import Standing, ended, stand_up, until_job
from tests.support.waiting import PATIENCE, until
from troupe.client.records.jobs import JobState
from troupe.cluster import ClusterSettings
from troupe.cluster.daemon import start_detached, stop_running
from troupe.cluster.state import running_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    """Apply `ulimit -Sn LIMIT` to processes that start meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def mounted(*arguments: str) -> None:
    """Mount, or skip the test."""
    command = ["mount", *arguments]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filler


def logs(cluster: Standing) -> str:
    return "\n".join(path.read_text() for path in (cluster.data_dir / "logs").glob("*.log"))


# Two connections in the rollout worker for each trajectory, all open at once.
BY_HTTP = """
import asyncio
import aiohttp
from tests.support.tiny_team import share_of_a

async def asks(query, agents, tools):
    endpoint = agents["solver"].endpoint()
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    messages = [{"role": "user", "content": query["question"]}]
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(
            f"{endpoint.base_url}/chat/completions",
            json={"model": endpoint.model, "messages": messages},
        ) as response:
            answer = await response.json()
        await asyncio.sleep(1)
    critique = await agents["checker"].chat(query["question"])
    text = answer["choices"][0]["message"]["content"]
    return {"solver": share_of_a(text), "checker": share_of_a(critique.text)}
"""


async def test_256_agents_talk_to_the_endpoint_at_once_where_256_files_may_be_open(
    tmp_path: Path,
) -> None:
    with open_files(256), stand_up(tmp_path) as cluster:
        (cluster.code / "by_http.py").write_text(BY_HTTP)
        text = cluster.yaml(
            "by_http:asks", **{"pipeline.queries_per_step": 64, "pipeline.group_size": 4}
        )
        end = await cluster.run(text)
        assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 2), end
        assert "Too many open files" not in logs(cluster)


async def test_a_transfer_directory_that_fills_up_costs_nothing_but_speed(tmp_path: Path) -> None:
    disk = tmp_path / "memory"
    disk.mkdir()
    mounted("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk))
    try:
        with stand_up(tmp_path, transfer_dir=disk) as cluster:
            async with cluster.client() as client:
                handle = await client.submit(cluster.yaml(**{"pipeline.steps": 12}))
                await until_job(handle, lambda job: job.step >= 2)
                filler = fill(disk)
                full_at = (await handle.info()).step
                await until_job(handle, lambda job: job.state.ended or job.step >= full_at + 4)
                filler.unlink()
                end = await ended(handle)
            assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 12), end
    finally:
        unmount(disk)


async def test_a_data_disk_that_fills_up_fails_the_job_until_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    mounted("-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk))
    try:
        with stand_up(tmp_path) as cluster:
            text = cluster.yaml(**{"pipeline.steps": 12, "checkpoint.every": 1})
            redis = cluster.pid("redis")
            async with cluster.client() as client:
                handle = await client.submit(text)
                await until_job(handle, lambda job: job.step >= 2)
                filler = fill(disk)
                await until(lambda: not psutil.pid_exists(redis))  # it ends when it cannot write
                filler.unlink()
                if (await handle.wait(timeout=PATIENCE)).state == JobState.FAILED:
                    end = await ended(handle)
                    assert (end.problem.kind, end.problem.field) == ("storage_full", "data_dir")
                    await handle.resume()
                end = await ended(handle)
            assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 12), end
            assert end.job.versions == {"solver": 12, "checker": 12}
    finally:
        unmount(disk)


async def test_a_data_directory_that_becomes_read_only_fails_the_job_until_it_is_not(
    tmp_path: Path,
) -> None:
    with stand_up(tmp_path) as cluster:
        data_dir = cluster.data_dir
        async with cluster.client() as client:
            text = cluster.yaml(**{"pipeline.steps": 12, "checkpoint.every": 1})
            handle = await client.submit(text)
            await until_job(handle, lambda job: job.step >= 2)
            # Files that are open stay so, as when the kernel makes a damaged disk read-only.
            mounted("--bind", "-o", "ro", str(data_dir), str(data_dir))
            try:
                end = await ended(handle)
                assert end.job.state == JobState.FAILED
                assert end.problem.field == "data_dir"
                assert "Read-only file system" in str(end.problem)
                another = await ended(await client.submit(text))
                assert "Read-only file system" in str(another.problem)
                cluster.kill("trainer-0")  # the state file is readable, too
            finally:
                unmount(data_dir)
            await handle.resume()
            end = await ended(handle)
        assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 12), end


async def test_a_cluster_whose_data_directory_is_read_only_is_stopped(tmp_path: Path) -> None:
    with stand_up(tmp_path) as cluster:
        data_dir = cluster.data_dir
        mounted("--bind", "-o", "ro", str(data_dir), str(data_dir))
        try:
            stop_running(data_dir)
            assert running_state(data_dir) is None
        finally:
            unmount(data_dir)
        start_detached(ClusterSettings(data_dir=data_dir, panel=False, threads=1))


async def test_a_data_directory_that_was_moved_goes_on(tmp_path: Path) -> None:
    with stand_up(tmp_path) as cluster:
        async with cluster.client() as client:
            text = cluster.yaml(**{"pipeline.steps": 6, "checkpoint.every": 1})
            handle = await client.submit(text, "moved")
            await until_job(handle, lambda job: job.step >= 2)
            await handle.pause()
            await until_job(handle, lambda job: job.state == JobState.PAUSED)
        stop_running(cluster.data_dir)
        moved = tmp_path / "elsewhere" / "my runs"
        moved.parent.mkdir()
        shutil.move(cluster.data_dir, moved)
        cluster.data_dir = moved
        start_detached(ClusterSettings(data_dir=moved, panel=False, threads=1))
        async with cluster.client() as client:
            handle = client.job("moved")
            await handle.resume()
            end = await ended(handle)
            assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 6), end
            checkpoints = await handle.checkpoints()
        assert {one.policy for one in checkpoints} == {"solver", "checker"}
        for one in checkpoints:
            assert Path(one.path).is_relative_to(moved)
            assert (Path(one.path) / "model.safetensors").is_file()
