"""Model directories of a trainer's host, copied to a host that lacks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from services.chassis.model_files import ModelFiles, described_model
from services.chassis.settings import ServiceSettings
from services.trainer.server import TrainerService
from tests.support.tiny_team import job
from troupe.job import JobSpec, parse_job
from troupe.rpc import DataLoss, NotFound, Unavailable
from troupe.v1 import orchestrator_pb2, trainer_pb2, trainer_pb2_grpc

# A path that only the other host has: its trainer finds it in a directory of the test.
ELSEWHERE = "/only/on/the/other/host"


class OtherHost(trainer_pb2_grpc.TrainerServicer):
    """The trainer's own answers about a disk that starts at `disk`."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.reads, self.damaged = disk, 0, False

    def _there(self, path: str) -> str:
        return path.replace(ELSEWHERE, str(self.disk))

    async def FindModel(
        self, request: trainer_pb2.FindModelRequest, context: Any
    ) -> trainer_pb2.FindModelResponse:
        request.path = self._there(request.path)
        try:
            return await TrainerService.FindModel(cast(Any, self), request, context)
        except NotFound as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.message)
            raise

    async def ReadModel(
        self, request: trainer_pb2.ReadModelRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.ReadCheckpointResponse]:
        self.reads += 1
        request.path = self._there(request.path)
        async for chunk in TrainerService.ReadModel(cast(Any, self), request, context):
            if self.damaged:
                chunk.data = b"x" + chunk.data[1:]
            yield chunk
            await asyncio.sleep(0.05)


class Directory:
    """What the orchestrator says: where trainers are."""

    def __init__(self, *trainers: str) -> None:
        self.trainers = trainers

    def directory(self, key: str) -> orchestrator_pb2.LocateStateResponse:
        if not self.trainers:
            raise Unavailable("away")
        return orchestrator_pb2.LocateStateResponse(trainers=self.trainers)


@asynccontextmanager
async def serving(host: OtherHost) -> AsyncIterator[str]:
    server = grpc.aio.server()
    trainer_pb2_grpc.add_TrainerServicer_to_server(host, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def here(tmp_path: Path, *trainers: str, **settings: Any) -> ModelFiles:
    values = {"data_dir": tmp_path / "here", "transfer_serve": "on", **settings}
    return ModelFiles(cast(Any, Directory(*trainers)), ServiceSettings(**values))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    for name in ("solver", "checker"):
        folder = tmp_path / "disk" / name
        (folder / "deep").mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"name": "{name}"}}')
        (folder / "deep/weights.safetensors").write_bytes(bytes(range(256)) * 8192)
    (tmp_path / "disk/secrets").mkdir()
    (tmp_path / "disk/secrets/key.pem").write_text("secret")
    return tmp_path / "disk"


def team(**changes: Any) -> JobSpec:
    return parse_job(job(Path(ELSEWHERE), **changes))


async def test_a_model_is_copied_once_and_verified(tmp_path: Path, disk: Path) -> None:
    host = OtherHost(disk)
    async with serving(host) as address:
        # Two workers of this host, and a trainer that is gone.
        models = [here(tmp_path, "127.0.0.1:9", address) for _ in range(2)]
        found = await asyncio.gather(*(one.localized(team()) for one in models))
        assert found[0] == found[1]
        assert host.reads == 2
        for name in ("solver", "checker"):
            path = Path(found[0].policies[name].language_model.path or "")
            assert path.is_relative_to(tmp_path / "here/models")
            assert (path / "config.json").read_text() == f'{{"name": "{name}"}}'
            weights = "deep/weights.safetensors"
            assert (path / weights).read_bytes() == (disk / name / weights).read_bytes()
        # What is here is not asked for, and what has changed is another copy.
        assert await models[0].localized(found[0]) == found[0]
        (disk / "solver/config.json").write_text("{}")
        again = await models[0].localized(team())
        assert again.policies["checker"] == found[0].policies["checker"]
        assert again.policies["solver"] != found[0].policies["solver"]


async def test_tokenizers_and_adapters_are_copied_too(tmp_path: Path, disk: Path) -> None:
    changes: dict[str, Any] = {
        "policies.solver.model.config": {"model_type": "qwen3"},
        "policies.solver.model.path": None,
        "policies.solver.model.tokenizer": f"{ELSEWHERE}/solver",
        "policies.checker.lora": {"path": f"{ELSEWHERE}/checker"},
    }
    async with serving(OtherHost(disk)) as address:
        found = await here(tmp_path, address).localized(team(**changes))
        tokenizer = found.policies["solver"].language_model.tokenizer
        lora = found.policies["checker"].lora
        assert lora is not None
        for path in (tokenizer, lora.path):
            assert Path(path or "").is_relative_to(tmp_path / "here/models")


async def test_what_nobody_has_stays_as_it_is(tmp_path: Path, disk: Path) -> None:
    host = OtherHost(disk)
    async with serving(host) as address:
        missing = team(**{"policies.solver.model.path": f"{ELSEWHERE}/none"})
        missing = missing.model_copy(update={"policies": {"s": missing.policies["solver"]}})
        assert await here(tmp_path, address).localized(missing) == missing
        # No directory of a model is served, whoever asks.
        with pytest.raises(NotFound):
            described_model(str(disk / "secrets"))
        secret = team(**{"policies.solver.model.path": f"{ELSEWHERE}/secrets"})
        found = await here(tmp_path, address).localized(secret)
        assert found.policies["solver"] == secret.policies["solver"]
        # On a single host, and while the orchestrator is away.
        assert await here(tmp_path, address, transfer_serve="off").localized(team()) == team()
        assert await here(tmp_path).localized(team()) == team()


async def test_a_damaged_copy_is_none(tmp_path: Path, disk: Path) -> None:
    host = OtherHost(disk)
    host.damaged = True
    async with serving(host) as address:
        models = here(tmp_path, address)
        with pytest.raises(DataLoss):
            await models.localized(team())
        assert not [p for p in (tmp_path / "here/models").iterdir() if p.is_dir()]
        host.damaged = False
        assert await models.localized(team()) != team()
