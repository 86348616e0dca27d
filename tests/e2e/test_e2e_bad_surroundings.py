"""Bad surroundings through the whole product: disks, ports, Redis, clients, messages."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.standing import Standing, ended, run_cli, stand_up, until_job
from tests.support import tiny_team
from tests.support.waiting import PATIENCE
from troupe.client.records.jobs import JobState
from troupe.rpc import ResourceExhausted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with stand_up(tmp_path_factory.mktemp("standing")) as standing:
        yield standing


@contextmanager
def small_disk(mount: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size at `mount`."""
    mount.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(mount)]
    allowed = os.geteuid() == 0
    if not allowed or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def on_disk(*directories: Path) -> int:
    """Bytes that the files take, in whole pages."""
    files = [file for directory in directories for file in directory.rglob("*") if file.is_file()]
    return sum(4096 * (1 + file.stat().st_size // 4096) for file in files)


async def test_a_full_disk_costs_the_newest_checkpoint_until_there_is_room(
    cluster: Standing,
) -> None:
    saved = on_disk(cluster.models / "solver", cluster.models / "checker")
    text = cluster.yaml(**{"checkpoint.every": 1, "checkpoint.keep": 3})
    # Room for the files of the first step, but not for the second's.
    with small_disk(cluster.data_dir / "full" / "checkpoints", saved * 3 // 2):
        end = await cluster.run(text, "full")
        async with cluster.client() as client:
            left = await client.job("full").checkpoints()
        assert {one.version for one in left} == {1} or len(left) == 3
        for one in left:
            AutoModelForCausalLM.from_pretrained(one.path)
            AutoTokenizer.from_pretrained(one.path)
    assert end.job.state == JobState.FAILED
    assert end.job.versions == {"solver": 2, "checker": 2}
    assert (end.problem.kind, end.problem.field) == ("storage_full", "data_dir")
    assert "no checkpoint of" in str(end.problem)
    assert "full/checkpoints" in str(end.problem)
    assert any(
        re.match(r"no checkpoint of \w+ after step 2: .*no room for a checkpoint in", text)
        for text in end.notices
    )
    async with cluster.client() as client:
        handle = client.job("full")
        await handle.resume()
        end = await ended(handle)
        assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 2)
        left = await handle.checkpoints()
    assert {(one.policy, one.version) for one in left} == {("solver", 2), ("checker", 2)}


async def test_a_full_disk_for_training_state_fails_the_job_until_there_is_room(
    cluster: Standing,
) -> None:
    text = cluster.yaml()
    with small_disk(cluster.data_dir / "packed" / "state", 64 << 10):
        end = await cluster.run(text, "packed")
        assert end.job.state == JobState.FAILED
        assert (end.problem.kind, end.problem.field) == ("storage_full", "data_dir")
    async with cluster.client() as client:
        handle = client.job("packed")
        await handle.resume()
        end = await ended(handle)
    assert (end.job.state, end.job.versions) == (JobState.SUCCEEDED, {"solver": 2, "checker": 2})


async def test_a_client_that_vanishes_leaves_the_job_running(
    cluster: Standing, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(cluster.yaml(**{"pipeline.steps": 20}))
    process = cluster.cli("train", str(job), "--job-id", "left")
    async with cluster.client() as client:
        handle = client.job("left")
        assert process.stdout is not None
        while "step 1/20" not in (line := process.stdout.readline()):
            assert line, "it ended before the first step"
        process.kill()
        process.communicate()
        assert not (await handle.info()).state.ended
        end = await ended(handle)
    assert (end.job.state, end.job.step) == (JobState.SUCCEEDED, 20)


async def test_a_message_over_the_limit_is_refused_and_harms_nobody(cluster: Standing) -> None:
    await cluster.run(cluster.yaml(), "talker")
    async with cluster.client() as client:
        handle = client.job("talker")
        with pytest.raises(ResourceExhausted, match="over the message limit") as caught:
            await handle.generate("solver", "a" * (70 << 20))
        assert caught.value.field == "max_message_mib"
        assert "TROUPE_MAX_MESSAGE_MIB" in str(caught.value)
        assert (await handle.generate("solver", "a?")).version == 2


async def test_redis_comes_back(cluster: Standing) -> None:
    async with cluster.client() as client:
        handle = await client.submit(cluster.yaml(**{"pipeline.steps": 20}))
        await until_job(handle, lambda job: job.step >= 2)
        cluster.kill("redis")
        end = await ended(handle)
    assert (end.job.state, end.job.problem) == (JobState.SUCCEEDED, None)
    assert end.job.versions == {"solver": 20, "checker": 20}


@pytest.mark.parametrize(
    "service", ["rollout-0", "trainer-0", "reward", "experience_store", "orchestrator"]
)
async def test_a_service_that_gets_no_more_memory_costs_nothing(
    cluster: Standing, service: str
) -> None:
    async with cluster.client() as client:
        handle = await client.submit(cluster.yaml(**{"pipeline.steps": 20}))
        await until_job(handle, lambda job: job.step >= 2)
        # Less than it has: each further mapping fails.
        resource.prlimit(cluster.pid(service), resource.RLIMIT_AS, (1 << 20, 1 << 20))
        end = await ended(handle)
    assert (end.job.state, end.job.problem) == (JobState.SUCCEEDED, None)
    assert end.job.versions == {"solver": 20, "checker": 20}


def said(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and the one line that a failing command leaves on stderr."""
    _, err = process.communicate(timeout=PATIENCE)
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return process.returncode, err


def test_a_failed_job_is_one_line_of_the_command(cluster: Standing, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(cluster.yaml(**{"policies.solver.model.path": "/nowhere/solver"}))
    status, line = said(cluster.cli("train", str(job)))
    assert status == 1
    assert "policies.solver.model.path = /nowhere/solver: " in line
    assert "there is no such directory. Give an existing directory" in line


def test_a_command_that_cannot_start_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(tiny_team.job(tmp_path / "models"))
    (tmp_path / "wrong.yaml").write_text(
        tiny_team.job(tmp_path / "models").replace("group_size", "groupsize")
    )
    (tmp_path / "empty.yaml").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        nobody = "redis://127.0.0.1:1/0"
        cases: dict[str, tuple[tuple[str, ...], int]] = {
            r"pipeline\.groupsize = 8: there is no such field\. Did you mean `group_size`\?": (
                ("wrong.yaml",),
                2,
            ),
            r"empty\.yaml: is empty\. Start from an example": (("empty.yaml",), 2),
            rf"panel_port = {port}: another program listens .* choose another with --panel-port": (
                ("job.yaml", "--panel-port", port, "--data-dir", "one"),
                1,
            ),
            rf"redis_port = {port}: another program listens .*another with --redis-port": (
                ("job.yaml", "--redis-port", port, "--data-dir", "two"),
                1,
            ),
            r"redis_url = \S+: Redis at \S+ does not answer: .*Start it, or correct the URL": (
                ("job.yaml", "--redis-url", nobody, "--data-dir", "three"),
                1,
            ),
            r"data_dir = \S+/empty\.yaml: cannot be written: Not a directory\. Choose another": (
                ("job.yaml", "--data-dir", "empty.yaml"),
                1,
            ),
            r"no service answers .* at 127\.0\.0\.1:1\): .*Check that the service runs": (
                ("job.yaml", "--cluster", "127.0.0.1:1"),
                1,
            ),
        }
        running = {
            message: run_cli("train", *arguments, cwd=tmp_path)
            for message, (arguments, _) in cases.items()
        }
        for message, process in running.items():
            status, line = said(process)
            assert re.search(message, line), line
            assert status == cases[message][1]
