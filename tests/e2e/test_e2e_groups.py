"""A gang over nodes that share no disk and no network interface, and have neither the job's models
nor its code: refused, formed, and formed again when a host is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from tests.e2e.hosts import Host, may_separate, rejoin, separate
from tests.e2e.test_e2e_nodes import TOKEN, computing, lose, supervisor
from tests.support.ports import free_port
from tests.support.tiny_team import job
from troupe.client import AsyncClient, AsyncJobHandle
from troupe.rpc import ClientSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_PATIENCE = 300.0

LOSS = """
def gradient(tokens):
    return -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    """Three hosts, each with a separate network if possible."""
    hosts = [Host(f"n{i}", tmp_path / f"n{i}") for i in range(3)]
    apart = may_separate()
    try:
        for number, host in enumerate(hosts):
            if apart:
                separate(host, number)
        yield hosts
    finally:
        for host in hosts:
            rejoin(host)


async def test_a_gang_over_two_nodes_goes_on_with_a_third_when_one_is_lost(
    tmp_path: Path, models: Path, machines: list[Host]
) -> None:
    port, home = free_port(), machines[0].home
    head = ["head", "--port", str(port), "--no-panel", "--advertise", home]

    def node(host: Host, *options: str) -> list[str]:
        where = ("--head", f"{home}:{port}", "--advertise", host.address)
        return ["node", "--name", host.name, *where, *options]

    settings = ClientSettings(token=SecretStr(TOKEN))
    async with AsyncClient(f"{home}:{port}", settings=settings) as client:
        with ExitStack() as running:

            def start(host: Host, devices: str, *options: str) -> psutil.Popen:
                return running.enter_context(
                    supervisor(
                        host.directory,
                        *node(host, *options),
                        namespace=host.namespace,
                        hidden=models if host.namespace else None,
                        TROUPE_DEVICES=devices,
                        TROUPE_GANG_TIMEOUT_SECONDS="30",
                    )
                )

            running.enter_context(
                supervisor(
                    tmp_path / "head",
                    *head,
                    TROUPE_DEVICES="1GB",
                    TROUPE_GANG_WAIT_SECONDS="2",
                    TROUPE_LOST_AFTER_BEATS="20",
                )
            )
            first = start(machines[0], "2x80GB", "--engine-devices", "1", "--trainer-devices", "1")
            second = start(machines[1], "80GB", "--engine-devices", "0", "--trainer-devices", "1")
            await there(client, 3, tmp_path)

            too_large = job(models, **{"policies.solver.trainer": {"gang": 4}})
            refused = await (await client.submit(too_large)).wait(timeout=_PATIENCE)
            assert refused.state == "failed"
            assert refused.problem is not None
            assert refused.problem.kind == "gang_too_large"
            assert "has 2" in refused.problem.message

            # A loss that no node can import, unless the job brings it.
            (tmp_path / "own").mkdir()
            (tmp_path / "own/brought_losses.py").write_text(LOSS)
            over = {
                "algorithm.loss": "brought_losses:gradient",
                "code": {"include": ["brought_losses.py"], "root": str(tmp_path / "own")},
                "pipeline.steps": 4,
                "limits.step_seconds": 900,
                "policies.solver.trainer": {"gang": 2},
                "policies.solver.optimizer": {"lr": 1e-3, "eps": 1e-3},
            }
            handle = await client.submit(job(models, **over))
            await stepped(handle, 1)
            assert sorted(ranks(first) + ranks(second)) == ["rank 0", "rank 1"]
            assert len(ranks(first)) == 1
            holders = [
                (one.id, holder)
                for one in (await client.cluster()).nodes
                for device in one.devices
                for holder in device.holders
            ]
            assert {(one.name, f"{handle.id}/solver") for one in machines[:2]} <= set(holders)
            # No host reads another's disk: each has whole states, its own or copies.
            for host in machines[:2]:
                assert set(host.directory.rglob("state/solver/v*/whole.*")), host
                # Only the head has the models.
                copies = list(host.directory.rglob("models/*/model.safetensors"))
                assert bool(copies) == bool(host.namespace), host

            lose(second)
            third = start(machines[2], "80GB", "--engine-devices", "0", "--trainer-devices", "1")
            record = await handle.wait(timeout=900)
            assert record.state == "succeeded", (record, logs(tmp_path))
            assert record.versions["solver"] == 4
            assert not (await handle.audit()).violations
            assert third.poll() is None
            assert set(machines[2].directory.rglob("state/solver/v*/whole.*"))
            assert "gang is complete" in logs(tmp_path)


def ranks(node: psutil.Popen) -> list[str]:
    return [name for name in computing(node) if name.startswith("rank")]


async def stepped(handle: AsyncJobHandle, steps: int) -> None:
    async with asyncio.timeout(_PATIENCE):
        while (await handle.info()).step < steps:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.2)


async def there(client: AsyncClient, workers: int, directory: Path) -> None:
    """Wait until this number of workers is up."""
    async with asyncio.timeout(_PATIENCE):
        while True:
            try:
                cluster = await client.cluster()
            except Exception:
                cluster = None
            if cluster and len([one for one in cluster.workers if one.alive]) == workers:
                return
            await asyncio.sleep(0.5)


def logs(directory: Path) -> str:
    paths = [*directory.glob("*.log"), *directory.rglob("logs/*.log")]
    return "\n".join(path.read_text(errors="replace")[-20_000:] for path in sorted(paths))
