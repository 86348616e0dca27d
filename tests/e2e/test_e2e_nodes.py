"""`troupe head` and `troupe node`: a cluster of three supervisors with declared devices."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from tests.support.ports import free_port
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient
from troupe.rpc import ClientSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token of three hosts"
FOUR = "4xH100-80GB"


@contextmanager
def supervisor(
    directory: Path,
    *arguments: str,
    cwd: Path = ROOT,
    namespace: str = "",
    hidden: Path | None = None,
    **environment: str,
) -> Iterator[psutil.Popen]:
    """A supervisor in the foreground, in a network namespace if one is named; its output is in
    `directory`.log. `hidden`: a directory that its host does not have."""
    masked = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
    with Path(f"{directory}.log").open("ab") as log:
        process = psutil.Popen(
            [
                *(("ip", "netns", "exec", namespace) if namespace else ()),
                *((*masked, str(hidden)) if hidden else ()),
                *(sys.executable, "-m", "troupe.client.cli", *arguments),
                *("--data-dir", str(directory)),
            ],
            cwd=cwd,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "TROUPE_TOKEN": TOKEN,
                "TROUPE_HEARTBEAT_SECONDS": "0.5",
                "TROUPE_LOST_AFTER_BEATS": "8",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(PATIENCE) == 0
            finally:
                if process.poll() is None:
                    process.kill()


def computing(process: psutil.Popen) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each worker and rank below a supervisor, by worker id and rank."""
    found: dict[str, str | None] = {}
    for child in process.children(recursive=True):
        try:
            environment, command = child.environ(), child.cmdline()
        except psutil.Error:
            continue
        if "services.rollout" in command or "services.trainer" in command:
            name = "-".join(environment["TROUPE_WORKER_ID"].split("-")[:2])
            found[name] = environment.get("CUDA_VISIBLE_DEVICES")
        # torchrun, which has started the ranks, has the same last argument.
        elif command[-1:] == ["services.trainer.gang.rank"] and "RANK" in environment:
            found[f"rank {environment['RANK']}"] = environment.get("CUDA_VISIBLE_DEVICES")
    return found


def node(port: int, name: str, *options: str) -> list[str]:
    return [
        *("node", "--head", f"127.0.0.1:{port}", "--name", name, "--advertise", "127.0.0.1"),
        *("--devices-per-trainer", "2", *options),
    ]


async def test_a_job_runs_on_two_nodes_and_goes_on_when_one_is_killed(
    tmp_path: Path, models: Path
) -> None:
    port = free_port()
    head = ["head", "--port", str(port), "--no-panel", "--advertise", "127.0.0.1"]
    client_settings = ClientSettings(token=SecretStr(TOKEN))
    with (
        # The nodes are there first: they wait for their head.
        supervisor(tmp_path / "n1", *node(port, "n1"), TROUPE_DEVICES=FOUR) as first,
        supervisor(
            tmp_path / "n2", *node(port, "n2"), TROUPE_DEVICES=FOUR, CUDA_VISIBLE_DEVICES="0,1,2,3"
        ) as second,
        supervisor(tmp_path / "head", *head, TROUPE_DEVICES=FOUR) as there,
    ):
        async with AsyncClient(f"127.0.0.1:{port}", settings=client_settings) as client:
            async with asyncio.timeout(240):
                while True:
                    try:
                        cluster = await client.cluster()
                    except Exception:
                        cluster = None
                    if cluster and len([one for one in cluster.workers if one.alive]) == 4:
                        break
                    assert first.poll() is second.poll() is there.poll() is None, _logs(tmp_path)
                    await asyncio.sleep(0.5)
            assert {one.id for one in cluster.nodes} == {"n1", "n2"}
            assert {one.node for one in cluster.workers} == {"n1", "n2"}
            given = {d.index: d.process for one in cluster.nodes[:1] for d in one.devices}
            assert given == {0: "rollout-0", 1: "rollout-0", 2: "trainer-0", 3: "trainer-0"}
            _refused(tmp_path / "same", node(port, "n1"), "a node of this name", "n1")
            _refused(tmp_path / "stranger", node(port, "n3"), "token", TROUPE_TOKEN="other")

            over = {
                "pipeline.steps": 4,
                "policies.solver.trainer": {"gang": 2},
                "policies.solver.optimizer": {"lr": 1e-3, "eps": 1e-3},
            }
            handle = await client.submit(job(models, **over))
            async with asyncio.timeout(240):
                while (await handle.info()).step < 1:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.2)
            for process in (first, second):
                seen = computing(process)
                assert seen["rollout-0"] == "0,1"
                assert seen["trainer-0"] == "2,3"
            ranks = computing(first) | computing(second)
            assert (ranks["rank 0"], ranks["rank 1"]) == ("2", "3")
            holders = [
                holder
                for one in (await client.cluster()).nodes
                for device in one.devices
                for holder in device.holders
            ]
            assert holders.count(f"{handle.id}/solver") == 2

            # A host is lost with all its processes. The job continues on the other one.
            lose(second)
            record = await handle.wait(timeout=400)
            assert record.state == "succeeded", record
            audit = await handle.audit()
            assert not audit.violations
            assert not {one.id: one.alive for one in (await client.cluster()).nodes}["n2"]


def lose(node: psutil.Popen) -> None:
    """A host goes down: its supervisor and all below it are killed."""
    below = node.children(recursive=True)
    node.kill()
    for process in below:
        with psutil_gone():
            process.kill()
    node.wait()


@contextmanager
def psutil_gone() -> Iterator[None]:
    """Processes may end by themselves when their supervisor is gone."""
    try:
        yield
    except psutil.NoSuchProcess:
        return


def _refused(directory: Path, arguments: list[str], *said: str, **environment: str) -> None:
    """A supervisor that ends by itself, with one line and no traceback."""
    with supervisor(directory, *arguments, **environment) as process:
        assert process.wait(PATIENCE) in (1, 2)
    text = Path(f"{directory}.log").read_text()
    assert "Traceback" not in text
    for word in said:
        assert word in text.lower(), text


def _logs(directory: Path) -> str:
    return "\n".join(path.read_text()[-1500:] for path in sorted(directory.glob("*.log")))
