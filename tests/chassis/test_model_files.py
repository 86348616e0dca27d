"""Model directories of another host, copied to those that lack them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from services.chassis import model_files
from services.chassis.model_files import ModelFiles, ModelServer, described_model
from services.chassis.settings import ServiceSettings
from tests.support.tiny_team import job
from troupe.job import JobSpec, parse_job
from troupe.rpc import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

# A path that only the other host has: its trainer finds it in a directory of the test.
ELSEWHERE = "/only/on/the/other/host"


class OtherHost(ModelServer):
    """The real answers of a host whose disk starts at `disk`."""

    def __init__(self, disk: Path, data_dir: Path | None = None) -> None:
        super().__init__(ServiceSettings(data_dir=data_dir or disk / "data"))
        self.disk, self.reads, self.damaged = disk, 0, False

    def _there(self, path: str) -> str:
        return path.replace(ELSEWHERE, str(self.disk))

    async def FindModel(
        self, request: transfer_pb.FindModelRequest, context: Any
    ) -> transfer_pb.FindModelResponse:
        request.path = self._there(request.path)
        try:
            return await super().FindModel(request, context)
        except NotFound as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.message)
            raise

    async def ReadModel(
        self, request: transfer_pb.ReadModelRequest, context: Any
    ) -> AsyncIterator[transfer_pb.ModelChunk]:
        request.path = self._there(request.path)
        try:
            async for chunk in super().ReadModel(request, context):
                self.reads += chunk.path == "config.json"
                if self.damaged:
                    chunk.data = b"x" + chunk.data[1:]
                yield chunk
                await asyncio.sleep(0.05)
        except (NotFound, ResourceExhausted) as error:
            await context.abort(error.code, error.message)


class Directory:
    """An orchestrator that returns the workers' addresses."""

    def __init__(self, *trainers: str) -> None:
        self.trainers = trainers

    async def LocateState(
        self, request: orchestrator_pb.LocateStateRequest, timeout: float
    ) -> orchestrator_pb.LocateStateResponse:
        if not self.trainers:
            raise Unavailable("away")
        return orchestrator_pb.LocateStateResponse(trainers=self.trainers)


@asynccontextmanager
async def serving(host: OtherHost) -> AsyncIterator[str]:
    server = grpc.aio.server()
    transfer_grpc.add_HostModelsServicer_to_server(host, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Here:
    """A process of a host that lacks the models."""

    def __init__(self, data_dir: Path, *trainers: str, **settings: Any) -> None:
        values = {
            "data_dir": data_dir,
            "transfer_serve": "on",
            "orchestrator_address": "127.0.0.1:9",
            **settings,
        }
        self.files = ModelFiles(ServiceSettings(**values))
        self._directory = cast(Any, Directory(*trainers))

    async def localized(self, spec: JobSpec) -> JobSpec:
        return await self.files.localized(spec, self._directory)


def here(tmp_path: Path, *trainers: str, **settings: Any) -> Here:
    return Here(tmp_path / "here", *trainers, **settings)


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
        # Models on this host are not requested, and a changed model becomes another copy.
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


async def test_a_model_that_no_host_has_is_refused_with_the_hosts_named(
    tmp_path: Path, disk: Path
) -> None:
    async with serving(OtherHost(disk)) as address:
        # Only directories of models are served.
        with pytest.raises(NotFound):
            described_model(str(disk / "secrets"))
        for name in ("none", "secrets"):
            missing = team(**{"policies.checker.model.path": f"{ELSEWHERE}/{name}"})
            with pytest.raises(InvalidArgument) as caught:
                await here(tmp_path, address).localized(missing)
            assert caught.value.kind == "model_not_found"
            assert caught.value.field == "policies.checker.model.path"
            assert address in caught.value.message
            assert "no answer from 127.0.0.1:9" in caught.value.message
            assert "the last is the head" in (caught.value.remedy or "")
        # On a single host, and while the orchestrator is unreachable, loading reports the error.
        assert await here(tmp_path, address, transfer_serve="off").localized(team()) == team()
        assert await here(tmp_path).localized(team()) == team()


async def test_a_model_that_only_the_head_has_is_copied_from_there(
    tmp_path: Path, disk: Path
) -> None:
    (tmp_path / "bare").mkdir()
    async with serving(OtherHost(disk)) as head, serving(OtherHost(tmp_path / "bare")) as trainer:
        found = await here(tmp_path, trainer, orchestrator_address=head).localized(team())
        for policy in found.policies.values():
            path = Path(policy.language_model.path or "")
            assert path.is_relative_to(tmp_path / "here/models")


async def test_many_hosts_copy_from_each_other(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host with the original serves one at a time here: the others wait, or take a copy."""
    monkeypatch.setattr(model_files, "_READERS", 1)
    monkeypatch.setattr(model_files, "_BUSY_SECONDS", 0.05)
    (tmp_path / "bare").mkdir()
    copies = [OtherHost(tmp_path / "bare", tmp_path / f"n{i}") for i in range(4)]
    original = OtherHost(disk)
    async with AsyncExitStack() as running:
        there = [await running.enter_async_context(serving(one)) for one in (original, *copies)]
        hosts = [Here(tmp_path / f"n{i}", *there, advertise_address=there[i + 1]) for i in range(4)]
        # The leftovers of a killed process.
        left = (
            tmp_path / "n0/models" / f".{described_model(str(disk / 'solver')).digest[:32]}.1.tmp"
        )
        left.mkdir(parents=True)
        found = await asyncio.gather(*(one.localized(team()) for one in hosts))
    assert not left.exists()
    for number, spec in enumerate(found):
        path = Path(spec.policies["solver"].language_model.path or "")
        assert path.is_relative_to(tmp_path / f"n{number}/models")
        weights = "deep/weights.safetensors"
        assert (path / weights).read_bytes() == (disk / "solver" / weights).read_bytes()
    assert original.reads < sum(one.reads for one in (original, *copies)) == 8


async def test_a_model_that_changes_meanwhile_is_not_taken_for_the_other(disk: Path) -> None:
    server = ModelServer(ServiceSettings(data_dir=disk / "data"))
    before = described_model(str(disk / "solver")).digest
    (disk / "solver/config.json").write_text("{}")
    for digest in (before, "../solver", ""):
        request = transfer_pb.ReadModelRequest(path=str(disk / "solver"), digest=digest)
        with pytest.raises(NotFound) as caught:
            await anext(server.ReadModel(request, None))
        assert caught.value.kind == "model_changed"


async def test_a_damaged_copy_of_a_model_is_refused(tmp_path: Path, disk: Path) -> None:
    host = OtherHost(disk)
    host.damaged = True
    async with serving(host) as address:
        models = here(tmp_path, address)
        with pytest.raises(DataLoss):
            await models.localized(team())
        assert not [p for p in (tmp_path / "here/models").iterdir() if p.is_dir()]
        host.damaged = False
        assert await models.localized(team()) != team()


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody-here/model", "a\0b", "", "~"])
def test_a_path_of_any_kind_is_answered_with_a_typed_error(path: str) -> None:
    with pytest.raises(NotFound):
        described_model(path)
