"""Transfer between two hosts without shared storage: one finds the states that the other stores."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from pydantic import SecretStr

from services.chassis.app import serve
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from tests.support.waiting import until
from troupe.rpc import Unauthenticated, Unavailable
from troupe.transfer import Choice, KeyNotFound
from troupe.transfer.remote import TransferOwner
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

KEY = "job/solver/weights@1"
WEIGHTS = {"layer": torch.arange(1000.0)}
BY_GRPC = Choice("get", "grpc", "ucx_not_here")


class Directory(orchestrator_grpc.OrchestratorServicer):
    """An orchestrator that returns the given owners."""

    name = "troupe.v1.Orchestrator"

    def __init__(self) -> None:
        self.owners: list[str] = []
        self.asked: list[str] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        orchestrator_grpc.add_OrchestratorServicer_to_server(self, server)

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None: ...

    async def LocateState(
        self, request: orchestrator_pb.LocateStateRequest, context: Any
    ) -> orchestrator_pb.LocateStateResponse:
        self.asked.append(request.key)
        return orchestrator_pb.LocateStateResponse(owners=self.owners)


class Near:
    """An owner in this process, for speed."""

    def __init__(self, owner: TransferOwner) -> None:
        self.address = self.local = owner.address
        self.close = lambda: owner.stop(0)


class House:
    """A directory, and hosts."""

    def __init__(self, root: Path, directory: Directory, orchestrator: str) -> None:
        self.root, self.directory, self.orchestrator = root, directory, orchestrator
        self.stack = AsyncExitStack()

    async def host(self, name: str, **settings: Any) -> HostTransfer:
        """A host that serves; the directory learns of it."""
        host = await self.process(name, **settings)
        self.directory.owners.append(host.address)
        return host

    async def process(self, name: str, **settings: Any) -> HostTransfer:
        """A process of the host `name`."""
        host = self.guest(name, **settings)
        await host.start()
        self.stack.push_async_callback(host.stop)
        return host

    def guest(self, name: str, **settings: Any) -> HostTransfer:
        """A process of the host `name` that starts no owner."""
        (self.root / name).mkdir(exist_ok=True)
        changed = {
            "orchestrator_address": self.orchestrator,
            "transfer_dir": self.root / name,
            "transfer_serve": "on",
            "transfer_ucx": False,
            "token": SecretStr("secret"),
            **settings,
        }
        return HostTransfer(ServiceSettings(**changed), Telemetry())


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    def launch(host: HostTransfer, port: int) -> Near:
        settings = host._settings
        assert host._owner is not None
        socket = host._owner.socket
        return Near(
            TransferOwner(host, port=port, token=settings.token, use_ucx=False, socket=socket)
        )

    monkeypatch.setattr(HostTransfer, "_launch", launch)
    directory = Directory()
    settings = ServiceSettings(token=SecretStr("secret"), drain_seconds=0.2)
    async with serve(directory, settings) as server:
        house = House(tmp_path, directory, server.address)
        async with house.stack:
            yield house


async def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await asyncio.to_thread(call, *args, **kwargs)


async def test_a_key_is_found_wherever_it_is(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    left, right, third = [await house.host(name) for name in ("left", "right", "third")]
    manifest = right.set(KEY, WEIGHTS)
    with caplog.at_level(logging.WARNING):
        tensors, _ = await in_thread(left.get, KEY, expected_checksum=manifest.checksum)
    assert torch.equal(tensors["layer"], WEIGHTS["layer"])
    assert left.counters.moves() == {BY_GRPC: 1}
    # The publisher is gone; hosts that have pulled it serve it.
    await right.stop()
    house.directory.owners.remove(right.address)
    tensors, _ = await in_thread(third.get, KEY, expected_checksum=manifest.checksum)
    assert torch.equal(tensors["layer"], WEIGHTS["layer"])
    with pytest.raises(KeyNotFound):
        await in_thread(third.get, "job/solver/weights@2")


async def test_one_owner_for_two_containers(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a directory, and no loopback."""
    right, _ = [await house.host(name) for name in ("right", "left")]
    right.set(KEY, WEIGHTS)
    monkeypatch.setattr("services.chassis.transfer.host_id", lambda: "another container")
    left = await house.process("left")
    assert left.near_owner(time.monotonic() + 5).startswith("unix:")
    tensors, _ = await in_thread(left.get, KEY)
    assert torch.equal(tensors["layer"], WEIGHTS["layer"])


async def test_processes_without_an_owner_use_that_of_their_host(house: House) -> None:
    """As the ranks of a gang store and read parts of a state: holders are all that they know."""
    for name in ("left", "right"):
        await house.host(name)
    left, right = house.guest("left"), house.guest("right")
    manifest = right.set(KEY, WEIGHTS)
    left.hint(KEY, right.holders)
    tensors, _ = await in_thread(left.get, KEY, expected_checksum=manifest.checksum)
    assert torch.equal(tensors["layer"], WEIGHTS["layer"])
    assert left.counters.moves() == {BY_GRPC: 1}
    for guest in (left, right):
        await guest.stop()


async def test_a_hint_serves_while_the_directory_is_away(house: House) -> None:
    right = await house.host("right")
    left = await house.process("left", orchestrator_address="127.0.0.1:1")
    right.set(KEY, WEIGHTS)
    with pytest.raises(Unavailable) as caught:
        left.locate(KEY)
    assert caught.value.kind == "directory_away"
    left.hint(KEY, right.holders)
    manifest, choice = await in_thread(left.fetch, KEY)
    assert choice == BY_GRPC
    assert manifest.key == KEY
    assert not house.directory.asked


async def test_another_attempt_at_a_version_does_not_hide_the_right_one(house: House) -> None:
    wrong, right, left = [await house.host(name) for name in ("wrong", "right", "left")]
    wrong.set(KEY, {"layer": torch.zeros(3)})
    manifest = right.set(KEY, WEIGHTS)
    found, _ = await in_thread(left.fetch, KEY, expected_checksum=manifest.checksum)
    assert found.checksum == manifest.checksum


async def test_processes_of_a_host_share_an_owner_and_what_it_fetched(house: House) -> None:
    right, first = [await house.host(name) for name in ("right", "left")]
    second = await house.process("left")
    assert second.address == first.address
    right.set(KEY, WEIGHTS)
    await in_thread(second.fetch, KEY)
    assert (await in_thread(first.fetch, KEY))[1].transport not in ("grpc", "ucx")
    await first.stop()
    # The other one takes over.
    await until(lambda: second._owner._process is not None)  # type: ignore[union-attr]
    assert second.address == first.address, "at the same port"
    right.set("job/solver/weights@2", WEIGHTS)
    assert (await in_thread(second.fetch, "job/solver/weights@2"))[1] == BY_GRPC


async def test_values_of_samples_are_dropped_where_they_are(house: House) -> None:
    trainer, rollout = [await house.host(name) for name in ("trainer", "rollout")]
    keys = [f"job/columns/q_0_t{number}/images" for number in range(2)]
    for key in keys:
        rollout.set(key, {"value": torch.ones(10)})
    rollout.set(KEY, WEIGHTS)
    value = (await in_thread(trainer.get, keys[0]))[0]["value"]
    await in_thread(trainer.drop, keys)
    assert rollout.keys() == [KEY]
    assert trainer.keys() == []
    assert value.sum() == 10, "who has it mapped keeps it"


async def test_a_wrong_token_gets_nothing(house: House) -> None:
    right = await house.host("right")
    right.set(KEY, WEIGHTS)
    stranger = await house.process("stranger", token=SecretStr("guessed"))
    stranger.hint(KEY, right.holders)
    with pytest.raises(Unauthenticated, match="token"):
        await in_thread(stranger.fetch, KEY)
    assert not stranger.keys()


async def test_a_host_that_keeps_to_itself_has_no_owner(house: House, tmp_path: Path) -> None:
    alone = await house.process("alone", transfer_serve="auto")
    assert (alone.address, alone.holders) == ("", [])
    assert not list((tmp_path / "alone").iterdir())
    with pytest.raises(KeyNotFound):
        alone.get(KEY)
    alone.drop(["job/columns/q_0_t0/images"])
