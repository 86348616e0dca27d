"""A job whose services do not share disk or memory: weights and states move between hosts."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.e2e.hosts import TOKEN, Hosts, apart, may_separate
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient, AsyncJobHandle
from troupe.client.records.jobs import Job
from troupe.rpc import ClientSettings, Unauthenticated
from troupe.transfer.remote import Peer

pytestmark = pytest.mark.slow

POLICIES = ("checker", "solver")
DETERMINISTIC = {
    "algorithm.group_by": "turn",
    "pipeline.mode": "sync",
    "pipeline.steps": 3,
    "pipeline.deterministic": True,
}


@pytest.fixture
def hosts(tmp_path: Path, empty_redis: str) -> Iterator[Hosts]:
    """A cluster without workers."""
    with apart(tmp_path / "hosts", empty_redis) as hosts:
        yield hosts


def client(hosts: Hosts) -> AsyncClient:
    return AsyncClient(hosts.orchestrator, TOKEN)


async def end(handle: AsyncJobHandle, hosts: Hosts) -> Job:
    record = await handle.wait(timeout=300)
    logs = "\n".join(hosts.log(name)[-3000:] for name in hosts._environments)
    assert record.state == "succeeded", f"{record}\n{logs}"
    return record


async def reached(handle: AsyncJobHandle, good: Callable[[Job], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            record = await handle.info()
            assert not record.state.ended, record
            if good(record):
                return
            await asyncio.sleep(0.05)


def frontier(data: Path, job_id: str, version: int) -> list[dict[str, Any]]:
    """Checksums of weights, moments and generators of all policies."""
    found = []
    for policy in POLICIES:
        (path,) = (data / job_id / "state" / policy).glob(f"v{version}-*/state.json")
        values = json.loads(path.read_text())
        found.append({part: values[part] for part in ("weights", "optimizer", "random")})
    return found


def moved(text: str, **labels: str) -> float:
    """Return the number of states that a service moved in this way, from its metrics."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith("troupe_transfer_moves_total{") and all(
            f'{name}="{value}"' in line for name, value in labels.items()
        ):
            total += float(line.rsplit(" ", 1)[1])
    return total


async def published(hosts: Hosts, handle: AsyncJobHandle, version: int) -> str:
    """Wait until a trainer publishes `version` of a policy: its name, at that very moment."""
    places = {"trainer-0": hosts.host("right"), "trainer-1": hosts.host("far")}
    async with asyncio.timeout(PATIENCE):
        while True:
            for name, place in places.items():
                for policy in POLICIES:
                    if (place.transfer / handle.id / policy / f"weights@{version}").exists():
                        return name
            await asyncio.sleep(0.002)


async def test_two_hosts_learn_the_same_bits_as_one(
    hosts: Hosts, models: Path, tmp_path: Path, empty_redis: str
) -> None:
    hosts.start("rollout-0", "left")
    hosts.start("trainer-0", "right")
    async with client(hosts) as troupe:
        handle = await troupe.submit(job(models, **DETERMINISTIC))
        record = await end(handle, hosts)
        assert record.versions == dict.fromkeys(POLICIES, 3)
        assert not (await handle.audit()).violations
        checkpoints = {c.policy: Path(c.path) for c in await handle.checkpoints()}
    ours = frontier(hosts.host("right").data, handle.id, 3)
    assert not (hosts.host("left").data / handle.id / "state").exists()
    # A job's results for users are on the orchestrator's host.
    for policy in POLICIES:
        assert checkpoints[policy].is_relative_to(hosts.host("home").data)
        theirs = hosts.host("right").data / handle.id / "checkpoints" / policy / "v3"
        assert {p.name: p.read_bytes() for p in checkpoints[policy].iterdir()} == {
            p.name: p.read_bytes() for p in theirs.iterdir()
        }

    rows = [json.loads(s) for s in (hosts.host("home").data / handle.id / "metrics.jsonl").open()]
    steps = [row for row in rows if "step/seconds" in row]
    for row in steps:
        for policy in POLICIES:
            assert row[f"{policy}/weights/transfer_seconds"] > 0
            assert row[f"{policy}/weights/exposed_seconds"] > 0
    text = hosts.metrics("rollout-0")
    # Versions 0 to 3 of both, each once; through UCX where it is there, and else not silently.
    assert moved(text, action="get", transport="ucx") + moved(text, transport="grpc") == 8
    if moved(text, transport="grpc"):
        assert "through gRPC" in hosts.log("rollout-0")
    assert re.search(r"troupe_rollout_weight_transfer_seconds_total\{.*\} [0-9.e-]*[1-9]", text)

    with apart(tmp_path / "one", empty_redis) as one:
        one.start("rollout-0", "home")
        one.start("trainer-0", "home")
        async with client(one) as troupe:
            handle = await troupe.submit(job(models, **DETERMINISTIC))
            await end(handle, one)
        assert moved(one.metrics("rollout-0"), transport="grpc") == 0
        assert moved(one.metrics("rollout-0"), transport="ucx") == 0
        assert frontier(one.host("home").data, handle.id, 3) == ours


async def test_hosts_with_networks_of_their_own(
    models: Path, tmp_path: Path, empty_redis: str
) -> None:
    """Three namespaces; owners are killed again and again; large values are found and freed."""
    if not may_separate():
        pytest.skip("only root may make network namespaces")
    with apart(tmp_path / "hosts", empty_redis, network=True) as hosts:
        for number, place in enumerate(("left", "middle")):
            hosts.start(f"rollout-{number}", place)
        hosts.start("trainer-0", "right")
        over = {"pipeline.steps": 5, "workflow": "tests.support.tiny_team:annotated"}
        async with client(hosts) as troupe:
            handle = await troupe.submit(job(models, **over))
            for step in range(1, 4):
                await reached(handle, lambda record, step=step: record.step >= step)
                for name in ("trainer-0", "rollout-0"):
                    hosts.owner(name).kill()
            record = await end(handle, hosts)
            assert record.versions == dict.fromkeys(POLICIES, 5)
            assert not (await handle.audit()).violations
        for name in ("rollout-0", "rollout-1"):
            assert moved(hosts.metrics(name), action="get", transport="grpc") or moved(
                hosts.metrics(name), action="get", transport="ucx"
            )
        # Values deleted while their owner is away stay, so this is not checked here:
        # test_host_transfer checks the deletion on every host.


async def test_a_host_that_is_lost_after_publishing_is_survived_by_a_copy(
    hosts: Hosts, models: Path
) -> None:
    hosts.start("rollout-0", "left")
    copies = {"TROUPE_TRAINER_STATE_REPLICAS": "1"}
    hosts.start("trainer-0", "right", **copies)
    hosts.start("trainer-1", "far", **copies)
    async with client(hosts) as troupe:
        handle = await troupe.submit(job(models, **{"pipeline.steps": 8}))
        victim = await published(hosts, handle, version=3)
        hosts.kill(victim)
        record = await end(handle, hosts)
        assert record.versions == dict.fromkeys(POLICIES, 8)
        audit = await handle.audit()
        assert not audit.violations, audit


async def test_a_state_is_fetched_from_the_disk_of_a_trainer_that_is_back(
    hosts: Hosts, models: Path
) -> None:
    hosts.start("rollout-0", "left")
    hosts.start("trainer-0", "right")
    hosts.start("trainer-1", "far")
    async with client(hosts) as troupe:
        handle = await troupe.submit(job(models, **{"pipeline.steps": 8}))
        victim = await published(hosts, handle, version=3)
        other = "trainer-1" if victim == "trainer-0" else "trainer-0"
        hosts.kill(victim)
        await asyncio.sleep(3)  # how long the worker is away; any time will do
        hosts.restart(victim)
        record = await end(handle, hosts)
        assert record.versions == dict.fromkeys(POLICIES, 8)
        assert not (await handle.audit()).violations
    assert "state fetched" in hosts.log(other)


async def test_a_state_that_is_lost_is_said_to_be_lost(hosts: Hosts, models: Path) -> None:
    hosts.start("rollout-0", "left")
    hosts.start("trainer-0", "right")
    async with client(hosts) as troupe:
        handle = await troupe.submit(job(models, **{"pipeline.steps": 50}))
        await reached(handle, lambda record: record.step >= 2)
        hosts.kill("trainer-0")
        hosts.start("trainer-1", "far", TROUPE_TRAINER_STATE_WAIT_SECONDS="2")
        record = await handle.wait(timeout=300)
        assert record.state == "failed", record
        assert record.problem is not None
        assert record.problem.kind == "state_not_found"
        assert "optimizer" in record.problem.message
        assert "TROUPE_TRAINER_STATE_REPLICAS" in (record.problem.remedy or "")


async def test_values_of_a_host_that_is_lost_for_good_are_dropped_and_the_step_goes_on(
    hosts: Hosts, models: Path
) -> None:
    """The host's memory goes with it, in the middle of a step, before anything of it is trained."""
    for number, place in enumerate(("left", "middle")):
        hosts.start(f"rollout-{number}", place)
    hosts.start("trainer-0", "right", TROUPE_TRAINER_VALUE_WAIT_SECONDS="1")
    over = {
        "workflow": "tests.support.referring_team:play",
        "algorithm.kl_coefficient": 0.01,
        "pipeline.mode": "sync",
        "pipeline.steps": 2,
    }
    async with client(hosts) as troupe:
        handle = await troupe.submit(job(models, **over))
        lost = hosts.host("left").transfer
        await reached(handle, lambda record: record.state == "running")
        # Only appended rows: values of others would never be requested.
        async with asyncio.timeout(PATIENCE):
            while not await _rows_with_values_in(lost, handle):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        hosts.kill("rollout-0")
        shutil.rmtree(lost)
        lost.mkdir()
        record = await end(handle, hosts)
        assert record.versions == dict.fromkeys(POLICIES, 2)
        audit = await handle.audit()
        assert not audit.violations, audit
        dropped = {one.policy: one.drop_reasons.get("value_gone", 0) for one in audit.policies}
        assert sum(dropped.values()) > 0, audit
        for one in audit.policies:
            assert (one.lost, one.duplicated, one.live) == (0, 0, 0)
            assert one.trained + one.dropped == one.appended
        told = [str(event) async for event in handle.watch()]
        assert any("no host has their values" in text for text in told)


def test_a_wrong_token_reads_nothing(hosts: Hosts) -> None:
    hosts.start("trainer-0", "right")
    place = next((hosts.host("right").transfer).glob(".owner-*"))
    address = json.loads(place.read_text())["address"]
    for token in (None, SecretStr("guessed")):
        peer = Peer(address, ClientSettings(token=token), use_ucx=False)
        with pytest.raises(Unauthenticated):
            peer.delete(["job/state"])
        peer.close()
    peer = Peer(address, ClientSettings(token=SecretStr(TOKEN)), use_ucx=False)
    assert peer.delete(["job/state"]) == 0
    peer.close()


async def _rows_with_values_in(directory: Path, handle: AsyncJobHandle) -> list[str]:
    """Return the rows with a value in a host's `directory`."""
    rows = [row for policy in POLICIES async for row in handle.samples(policy)]
    refs = {row.id: row.columns.get("reference_logprobs", {}).get("ref", "") for row in rows}
    return [row for row, ref in refs.items() if ref and (directory / ref).exists()]
