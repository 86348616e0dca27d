"""Trained weights into an inference server: `python -m benchmarks.gpu.weights --way WAY`.

    python -m benchmarks.gpu.weights --way ipc|broadcast|in_place [--device cuda|cpu] [--quick]

A trainer service, in this process, trains a policy of half a billion parameters on the device, fed
by a real store; an SGLang server is launched as a job's is (`--python`: what has SGLang; without it
the variables of the slow tests). Each version goes into it by one way: `ipc` (on the trainer's
GPU), `broadcast` (NCCL, which needs a second GPU; gloo on a CPU), or read in place from host
memory. Seconds of an update in all and of its pause are medians after the first, whose pause is
given too. Where there is no SGLang, the embedded engine takes the server's place for `in_place`.

Proved after every update, in addition to the engine's own proof: turns are of the new version, and
their log-probs equal a plain forward pass's in float32 over the published weights
(`mismatch`: mean of exp(d) - 1 - d over tokens, d the difference of both; `of_former_version`: by
the weights before, which a step with a large learning rate has changed).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import AutoConfig

from benchmarks.command import finish, progress, run_program, scratch
from benchmarks.experience_store.servers import Stub, started
from benchmarks.gpu.update import TINY
from benchmarks.sglang import HALF_BILLION
from benchmarks.weights import find_sglang, sglang_interpreter
from benchmarks.workloads.fed_policy import POLICY, FedPolicy, spec_of
from services.chassis.app import serve
from services.rollout.engines.base import ServingEngine
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.weights import skeleton
from services.trainer.server import TrainerService
from services.trainer.settings import TrainerSettings
from troupe.devices import find_devices
from troupe.job import JobSpec
from troupe.rpc import TroupeError, connect
from troupe.transfer import Transfer
from troupe.v1 import trainer_pb2_grpc as trainer_grpc
from troupe.workflow.backend import Sampling

WAYS: Final = ("in_place", "ipc", "broadcast")
# Until a server is ready; the first start on a GPU compiles kernels.
_START_SECONDS: Final = 600
_TURN_SECONDS: Final = 120.0
_TURNS: Final = 8
_PROMPT_TOKENS: Final = 16
_ANSWER_TOKENS: Final = 32
# Tokens of a training step.
_STEP_TOKENS: Final = 512
# A step moves every weight by about this, a twentieth of its size, and all of them to one end.
_LEARNING_RATE: Final = 1e-3
# The most by which bfloat16 and kernels make a server's log-probs differ, as k3 per token; the
# version before must differ by some times more.
_MOST_MISMATCH: Final = 0.05
_TIMES_MORE: Final = 5
Device = Literal["cuda", "cpu"]


class WrongWeights(Exception):
    """An update took another way than it was to, or its turns show other weights."""


@dataclass(frozen=True)
class Update:
    """One update, and what turns after it showed."""

    total_seconds: float
    paused_seconds: float
    mismatch: float
    of_former_version: float | None


def job_of(config: dict[str, Any], tokenizer: Path, way: str, python: str, cuda: bool) -> JobSpec:
    """Return a job of one policy that such a server serves; `python`: "" for an embedded engine."""
    engine: dict[str, Any] = {"max_running": 4, "max_context": 64}
    if python:
        engine |= {
            "kind": "sglang",
            "python": python,
            "update": {"in_place": "disk"}.get(way, way),
            "start_timeout_seconds": _START_SECONDS,
            "launch": ["--mem-fraction-static", "0.3" if cuda else "0.5"],
        }
    model = {"config": config, "tokenizer": str(tokenizer), "dtype": "bfloat16"}
    return spec_of(
        "weights", {"model": model, "engine": engine, "optimizer": {"lr": _LEARNING_RATE}}
    )


def save_tokenizer(directory: Path) -> Path:
    """Save a tokenizer of a few words, which nothing is asked of."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(directory)
    return directory


class ProvenUpdates:
    """Brings one engine to the versions of a policy in training, and proves each."""

    def __init__(
        self, job: JobSpec, engine: ServingEngine, way: str, transfer: Transfer, device: Device
    ) -> None:
        """`way`: as the engine reports it."""
        spec = job.policies[POLICY]
        assert spec.model is not None
        self._config: dict[str, Any] = dict(spec.model.config or {})
        self._engine, self._way, self._transfer = engine, way, transfer
        self._device = torch.device(device)
        self._former: dict[str, torch.Tensor] = {}
        self._turns = 0

    async def run(self, policy: FedPolicy, rounds: int) -> list[Update]:
        """Start the engine; bring it to the first version and to those of `rounds` + 1 steps."""
        await policy.bind()
        progress(f"starts the engine, {_START_SECONDS} s at most")
        began = time.monotonic()
        try:
            await self._engine.start()
            progress(f"the engine is ready after {time.monotonic() - began:.0f} s")
            updates = [await self._update(policy)]
            first = policy.weights.version
            for step in range(first, first + rounds + 1):
                await policy.play(step, _STEP_TOKENS)
                await policy.train(step)
                updates.append(await self._update(policy))
        finally:
            await self._engine.stop()
        return updates

    async def _update(self, policy: FedPolicy) -> Update:
        ref, engine = policy.weights, self._engine
        await engine.update_weights(ref, self._transfer)
        report = engine.last_update
        assert report is not None  # one has just succeeded
        if report.way != self._way:
            raise WrongWeights(f"they came by {report.way}, not by {self._way}: see the warning")
        prompts, answers = await self._play()
        for answer in answers:
            if {span.version for span in answer.versions} != {ref.version}:
                raise WrongWeights(f"a turn names {answer.versions}, not version {ref.version}")
        published, _ = await asyncio.to_thread(
            self._transfer.get, ref.key, expected_checksum=ref.checksum
        )
        found = await asyncio.to_thread(self._mismatch, published, prompts, answers)
        former = None
        if self._former:
            former = await asyncio.to_thread(self._mismatch, self._former, prompts, answers)
        self._former = {name: tensor.clone() for name, tensor in published.items()}
        progress(
            f"version {ref.version}: {report.total_seconds:.2f} s, paused "
            f"{report.exposed_seconds:.3f} s, mismatch {found:.1e}"
            + (f", by the version before {former:.1e}" if former is not None else "")
        )
        if not found <= _MOST_MISMATCH:
            raise WrongWeights(f"log-probs of turns differ from version {ref.version}: {found:.3g}")
        if former is not None and not former > _TIMES_MORE * found:
            raise WrongWeights(
                f"turns fit the version before ({former:.3g}) as well as theirs ({found:.3g})"
            )
        return Update(report.total_seconds, report.exposed_seconds, found, former)

    async def _play(self) -> tuple[list[list[int]], list[EngineResponse]]:
        """Return prompts of random tokens, and the engine's answers to all of them at once."""
        generator = torch.Generator().manual_seed(self._turns)
        prompts = torch.randint(3, 100, (_TURNS, _PROMPT_TOKENS), generator=generator).tolist()
        names = [f"turn-{self._turns + number}" for number in range(_TURNS)]
        self._turns += _TURNS
        sampling = Sampling(max_new_tokens=_ANSWER_TOKENS)
        answers = await asyncio.gather(
            *(
                self._engine.generate(name, prompt, sampling, deadline_seconds=_TURN_SECONDS)
                for name, prompt in zip(names, prompts, strict=True)
            )
        )
        return prompts, answers

    def _mismatch(
        self,
        weights: Mapping[str, torch.Tensor],
        prompts: Sequence[Sequence[int]],
        answers: Sequence[EngineResponse],
    ) -> float:
        """Return the mean k3 of answers' log-probs under `weights`, computed in float32."""
        model = skeleton(AutoConfig.for_model(**self._config), "float32", POLICY)
        tensors = dict(weights)
        if self._config.get("tie_word_embeddings"):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict(tensors)
        model.to(self._device)
        differences = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([[*prompt, *answer.token_ids]], device=self._device)
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            table = torch.log_softmax(logits, dim=-1)
            chosen = table.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            differences.append(chosen.double().cpu() - torch.tensor(answer.logprobs).double())
        difference = torch.cat(differences)
        return float((difference.exp() - 1 - difference).mean())


async def measure(
    config: dict[str, Any], way: str, python: str, device: Device, rounds: int, place: Path
) -> dict[str, Any]:
    """Return seconds of updates of one engine by `way`, and their proofs."""
    cuda = device == "cuda"
    with started(place) as servers:
        settings = TrainerSettings(
            experience_store_address=servers.address,
            orchestrator_address="127.0.0.1:1",
            data_dir=place / "runs",
            transfer_dir=place / "transfer",
            trainer_device=device,
            drain_seconds=1,
        )
        job = job_of(config, save_tokenizer(place / "tokenizer"), way, python, cuda)
        spec = job.policies[POLICY]
        gpus = find_devices() if cuda else ()
        # A server opens handles of memory of GPUs that it sees: the trainer's is the first.
        devices = EngineDevices(gpus[:1] if way == "ipc" else gpus[-1:])
        engine: ServingEngine
        if python:
            engine = SglangEngine("bench.0", POLICY, spec, devices=devices)
        else:
            engine = EmbeddedEngine("bench.0", POLICY, spec, device=device, devices=devices)
            way = "copied" if cuda else "mapped"
        transfer = Transfer(place / "transfer")
        try:
            async with (
                serve(TrainerService, settings) as server,
                connect(server.address) as to_trainer,
                connect(servers.address) as to_store,
            ):
                trainer = trainer_grpc.TrainerStub(to_trainer)
                policy = FedPolicy(job, trainer, Stub(to_store))
                updates = await ProvenUpdates(job, engine, way, transfer, device).run(
                    policy, rounds
                )
                num_bytes = policy.weights.num_bytes
        finally:
            transfer.close()
    return {
        "engine": engine.kind,
        "way": way,
        "gigabytes": num_bytes / 1e9,
        "updates": len(updates),
        "seconds": statistics.median(one.total_seconds for one in updates[1:]),
        "paused_seconds": statistics.median(one.paused_seconds for one in updates[1:]),
        "first_paused_seconds": updates[0].paused_seconds,
        "mismatch": max(one.mismatch for one in updates),
        "of_former_version": min(
            one.of_former_version for one in updates if one.of_former_version is not None
        ),
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--python", default="", help="what has SGLang")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    config = TINY if options.quick or not cuda else HALF_BILLION
    with scratch() as place:
        python = options.python or find_sglang(place)
        if options.way != "in_place":
            python = python or sglang_interpreter(place)
        rounds = 1 if options.quick else 5
        try:
            found = asyncio.run(measure(config, options.way, python, options.device, rounds, place))
        except (WrongWeights, TroupeError, RuntimeError, OSError) as error:
            found = {"problems": {options.way: f"{type(error).__name__}: {error}"}}
    finish(found, quiet=True)


if __name__ == "__main__":
    run_program(main)
