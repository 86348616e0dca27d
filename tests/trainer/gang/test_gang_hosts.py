"""A host of a gang without the job's model and code gets both, like the lead."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.chassis.settings import ServiceSettings
from services.trainer.gang.gang import Gangs, free_port
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.model import load_model
from services.trainer.settings import TrainerSettings
from services.trainer.specifications import HostSpecification
from tests.chassis.test_model_files import ELSEWHERE, OtherHost
from tests.support.training import save_tokenizer
from tests.support.waiting import PATIENCE, until
from tests.trainer.gang.test_gang import PLAIN, alone, assert_close, gang_spec, rows_of
from troupe.functions.shipped import open_shipped
from troupe.functions.sources import digest
from troupe.job import JobSpec
from troupe.rpc import DataLoss, InvalidArgument, NotFound
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

CODE = [
    reward_pb.SourceFile(
        path="team_losses.py",
        content=b"import team_weights\n\n\n"
        b"def doubled(tokens):\n"
        b"    return -team_weights.WEIGHT * tokens.logprobs * tokens.advantages\n",
    ),
    reward_pb.SourceFile(path="team_weights.py", content=b"WEIGHT = 2.0\n"),
]


class Head(orchestrator_grpc.OrchestratorServicer):
    """The orchestrator's part: it knows no worker, and has the submitted code."""

    def __init__(self) -> None:
        self.files = CODE

    async def LocateState(
        self, request: orchestrator_pb.LocateStateRequest, context: Any
    ) -> orchestrator_pb.LocateStateResponse:
        return orchestrator_pb.LocateStateResponse()

    async def ReadCode(
        self, request: orchestrator_pb.ReadCodeRequest, context: Any
    ) -> orchestrator_pb.ReadCodeResponse:
        if not self.files:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such code")
        return orchestrator_pb.ReadCodeResponse(files=self.files)


@asynccontextmanager
async def serving(head: Head, disk: Path) -> AsyncIterator[str]:
    """Serve the head, the only host whose disk has the model."""
    server = grpc.aio.server()
    orchestrator_grpc.add_OrchestratorServicer_to_server(head, server)
    transfer_grpc.add_HostModelsServicer_to_server(OtherHost(disk), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return the head's model with its tokenizer."""
    tokenizer = save_tokenizer(tmp_path / "disk/solver")
    own = gang_spec(tokenizer).policies["solver"]
    load_model("solver", own, 3).save_pretrained(tokenizer)
    return tmp_path / "disk"


@pytest.fixture
def submitted(disk: Path) -> JobSpec:
    """Return a submitted job, with a path and a function that no host of trainers has."""
    return gang_spec(
        disk / "solver",
        model={"path": f"{ELSEWHERE}/solver"},
        algorithm={"loss": "team_losses:doubled"},
        code={"include": ["team_losses.py", "team_weights.py"], "sha256": digest(CODE)},
    )


async def read(settings: ServiceSettings, spec_json: str) -> Any:
    """Return the files that a host of a gang finds."""
    host = HostSpecification(settings, "solver", spec_json)
    await until(lambda: host.found() is not None)
    return host.found()


async def test_a_host_reads_model_and_code_of_a_job(
    tmp_path: Path, disk: Path, submitted: JobSpec
) -> None:
    head = Head()
    async with serving(head, disk) as address:
        settings = ServiceSettings(
            orchestrator_address=address, transfer_serve="on", data_dir=tmp_path / "n1"
        )
        spec_json, folder = await read(settings, submitted.model_dump_json())
        spec = JobSpec.model_validate_json(spec_json)
        copy = Path(spec.policies["solver"].language_model.path or "")
        assert copy.is_relative_to(tmp_path / "n1/models")
        weights = "model.safetensors"
        assert (copy / weights).read_bytes() == (disk / "solver" / weights).read_bytes()
        assert sorted(name for name in os.listdir(folder) if name.endswith(".py")) == [
            "team_losses.py",
            "team_weights.py",
        ]
        # Errors are the same as when it is loaded.
        values = submitted.model_dump()
        values["policies"]["solver"]["model"]["path"] = f"{ELSEWHERE}/none"
        missing = await read(settings, JobSpec.model_validate(values).model_dump_json())
        assert isinstance(missing, InvalidArgument)
        assert (missing.kind, missing.field) == ("model_not_found", "policies.solver.model.path")
        values = submitted.model_dump()
        values["code"]["sha256"] = "0" * 64
        damaged = await read(settings, JobSpec.model_validate(values).model_dump_json())
        assert isinstance(damaged, DataLoss)


def follower(directory: Path, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The second host of a gang."""
    environment = {f"TROUPE_{name.upper()}": str(value) for name, value in given.items()}
    others = {"TROUPE_GANG_NODE": "1", "TROUPE_DATA_DIR": str(directory)}
    command = [sys.executable, "-m", "services.trainer.gang"]
    return subprocess.Popen(command, env={**os.environ, **environment, **others})


@pytest.mark.slow
async def test_a_gang_trains_where_one_host_had_neither_model_nor_code(
    tmp_path: Path, disk: Path, submitted: JobSpec
) -> None:
    head = Head()
    async with serving(head, disk) as address:
        given: dict[str, Any] = {
            "orchestrator_address": address,
            "transfer_serve": "on",
            "gang_endpoint": f"127.0.0.1:{free_port('127.0.0.1')}",
            "gang_ranks": 1,
            "gang_nodes": 2,
            "gang_timeout_seconds": 60.0,
        }
        other = follower(tmp_path / "n1", given)
        settings = TrainerSettings(**given, trainer_device="cpu", data_dir=tmp_path / "n0")
        gangs = Gangs(settings)
        try:
            spec_json, folder = await read(settings, submitted.model_dump_json())
            open_shipped(digest(CODE), Path(folder))
            spec = JobSpec.model_validate_json(spec_json)
            await asyncio.to_thread(_check, gangs, spec, submitted, head)
            (copy,) = (one for one in (tmp_path / "n1/models").iterdir() if one.is_dir())
            assert (copy / "model.safetensors").is_file()
        finally:
            await asyncio.to_thread(gangs.close)
            other.terminate()
            assert await asyncio.to_thread(other.wait, PATIENCE) == 0


def _check(gangs: Gangs, spec: JobSpec, submitted: JobSpec, head: Head) -> None:
    def together(submitted: JobSpec) -> GangLearner:
        options = {"double": True, **PLAIN}
        json = submitted.model_dump_json()
        return GangLearner(gangs, "job/solver", spec, "solver", options, submitted=json)

    # A file that the other host lacks is an error of the job; the ranks continue.
    head.files = []
    with pytest.raises(NotFound):
        together(submitted)
    head.files = CODE
    values = submitted.model_dump()
    values["policies"]["solver"]["model"]["path"] = f"{ELSEWHERE}/none"
    with pytest.raises(InvalidArgument) as missing:
        together(JobSpec.model_validate(values))
    assert missing.value.kind == "model_not_found"
    assert missing.value.field == "policies.solver.model.path"

    gang, one = together(submitted), alone(spec)
    rows = rows_of(spec, 6, 0)
    for learner in (gang, one):
        learner.accumulate(rows)
        assert learner.apply(0).applied
    assert_close(gang, one)
