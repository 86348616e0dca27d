"""Weights from a trainer's device into an SGLang server: `python -m benchmarks.gpu.weights`.

    python -m benchmarks.gpu.weights [--device cuda|cpu] [--quick] [--python PYTHON]

A trainer service, in this process, holds a model of half a billion parameters on the device; a
server is launched as a job's is (`--python`: what has SGLang; without it the variables of the slow
tests), on the last GPU of the machine. Versions come into it by `ipc`, by `broadcast` (NCCL, which
needs a second GPU; gloo on a CPU) and, for comparison, from host memory (`disk`): seconds of an
update in all and of its pause, medians after the first, whose pause is given too. An update is
verified as in a job; one that took another way than it was to is an error. A way that fails is
null, with the reason among `problems`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal

import torch

from benchmarks.command import finish, run_program, scratch
from benchmarks.gpu.update import TINY
from benchmarks.sglang import HALF_BILLION
from benchmarks.weights import sglang_interpreter
from services.chassis.app import serve
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.sglang.engine import SglangEngine
from services.trainer.server import TrainerService
from services.trainer.settings import TrainerSettings
from troupe.devices import find_devices
from troupe.job import JobSpec
from troupe.rpc import TroupeError, connect, new_id
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

_POLICY: Final = "solver"
_JOB: Final = "weights"
# Until a server is ready; the first start on a GPU compiles kernels.
_START_SECONDS: Final = 600
# One way from its first to its last second: the start, a policy bound, a few updates.
_WAY_SECONDS: Final = 750.0
Device = Literal["cuda", "cpu"]


class WrongWay(Exception):
    """An update took another way than the one that is measured."""


def _say(way: str, text: str) -> None:
    print(f"{way}: {text}", file=sys.stderr, flush=True)


def job_of(config: dict[str, Any], tokenizer: Path, way: str, python: str, cuda: bool) -> JobSpec:
    """A job of one policy that such a server serves."""
    engine = {
        "kind": "sglang",
        "python": python,
        "update": way,
        "max_running": 4,
        "max_context": 64,
        "start_timeout_seconds": _START_SECONDS,
        "launch": ["--mem-fraction-static", "0.3" if cuda else "0.5"],
    }
    model = {"config": config, "tokenizer": str(tokenizer), "dtype": "bfloat16"}
    return JobSpec.model_validate(
        {
            "name": _JOB,
            "workflow": "nowhere:play",
            "tasks": {"source": "nowhere:tasks"},
            "agents": {_POLICY: {"policy": _POLICY}},
            "policies": {_POLICY: {"model": model, "engine": engine}},
            "pipeline": {"steps": 10, "queries_per_step": 1},
        }
    )


def save_tokenizer(directory: Path) -> Path:
    """A tokenizer of a few words, which nothing is asked of."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(directory)
    return directory


async def measure(
    config: dict[str, Any], way: str, python: str, device: Device, rounds: int, place: Path
) -> dict[str, float]:
    """Seconds of updates of one server by `way`."""
    settings = TrainerSettings(
        experience_store_address="127.0.0.1:1",
        orchestrator_address="127.0.0.1:1",
        data_dir=place / "runs",
        transfer_dir=place / "transfer",
        trainer_device=device,
        drain_seconds=1,
    )
    job = job_of(config, save_tokenizer(place / "tokenizer"), way, python, device == "cuda")
    gpus = find_devices() if device == "cuda" else ()
    engine = SglangEngine(
        "bench.0", _POLICY, job.policies[_POLICY], devices=EngineDevices(gpus[-1:])
    )
    transfer = Transfer(place / "transfer")
    found: list[tuple[float, float]] = []
    async with serve(TrainerService, settings) as server, connect(server.address) as channel:
        trainer = trainer_grpc.TrainerStub(channel)
        named: dict[str, Any] = {"job_id": _JOB, "policy": _POLICY}
        bind = trainer_pb.BindRequest(request_id=new_id(), spec_json=job.model_dump_json(), **named)
        _say(way, "binds the policy")
        weights: common_pb.WeightsRef = (await trainer.Bind(bind, timeout=600)).weights
        _say(way, f"starts a server, {_START_SECONDS} s at most")
        began = time.monotonic()
        try:
            await engine.start()
            _say(way, f"the server is ready after {time.monotonic() - began:.0f} s")
            for number in range(rounds + 1):
                await engine.update_weights(weights, transfer)
                update = engine.last_update
                assert update is not None  # one has just succeeded
                if update.way != {"disk": "in_place"}.get(way, way):
                    raise WrongWay(f"weights came by {update.way}, not by {way}: see the warning")
                found.append((update.total_seconds, update.exposed_seconds))
                _say(way, f"update {number + 1} of {rounds + 1}: {update.total_seconds:.2f} s")
                again = trainer_pb.RestartRequest(
                    request_id=new_id(),
                    version=weights.version,
                    checksum=weights.checksum,
                    **named,
                )
                weights = (await trainer.Restart(again, timeout=600)).weights
        finally:
            await engine.stop()
    transfer.close()
    return {
        "gigabytes": weights.num_bytes / 1e9,
        "seconds": statistics.median(total for total, _ in found[1:]),
        "paused_seconds": statistics.median(paused for _, paused in found[1:]),
        "first_paused_seconds": found[0][1],
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--python", default="", help="what has SGLang")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    ways = ["ipc", "disk"]
    if not cuda or torch.cuda.device_count() > 1:
        ways.insert(1, "broadcast")
    found: dict[str, Any] = {"broadcast": None}  # NCCL has one rank per GPU
    problems: dict[str, str] = {}
    config = TINY if options.quick or not cuda else HALF_BILLION
    rounds = 1 if options.quick else 5
    for way in ways:
        with scratch() as place:
            python = options.python or sglang_interpreter(place)
            work = measure(config, way, python, options.device, rounds, place)
            try:
                found[way] = asyncio.run(asyncio.wait_for(work, _WAY_SECONDS))
            except TimeoutError:
                problems[way] = f"took over {_WAY_SECONDS:.0f} s"
            except (WrongWay, TroupeError, RuntimeError, OSError) as error:
                problems[way] = f"{type(error).__name__}: {error}"
        if way in problems:
            found[way] = None
            _say(way, problems[way])
    if not any(found.values()):
        sys.exit("; ".join(f"{way}: {reason}" for way, reason in problems.items()))
    finish({**found, "problems": problems}, quiet=True)


if __name__ == "__main__":
    run_program(main)
