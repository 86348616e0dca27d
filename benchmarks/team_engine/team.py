"""A team over one base on one engine of any kind, its turns, its updates, and the processes behind
them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import psutil
import torch
from transformers import AutoConfig

from benchmarks.command import progress
from services.rollout.engines.base import ServingEngine
from services.rollout.engines.factory import make_host
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.servers.verification import LocalProofs
from services.rollout.engines.weights import adopt, skeleton
from troupe.checkpoints.adapters import (
    AdapterContent,
    base_key,
    distinct_tensors,
    linear_layers,
    merged,
)
from troupe.job import EngineSpec, LoraSpec, ModelSpec, PolicySpec
from troupe.transfer import Transfer, checksum_of
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

T = TypeVar("T")
ROLES: Final = (2, 4, 6)
RANK: Final = 8
# Of the bare base, which is frozen.
BARE: Final = "bare"
JOB: Final = "bench"
# SmolLM2-135M's architecture.
SMOLLM2: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    # Random weights must not end a response.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY: Final = SMOLLM2 | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    # vLLM's kernels for CPUs have no small heads.
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# A version's log-probs may be off by rounding: merged weights are another order of sums.
_OFF: Final = {"float32": 2e-3, "bfloat16": 0.3}
_DEADLINE: Final = 3600.0


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement. `turns`: at once, of all roles together. `roles`: numbers of
    roles on one server."""

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    turns: int
    prompt_tokens: int
    response_tokens: int
    rounds: int
    updates: int
    roles: tuple[int, ...] = ROLES


FULL: Final = Plan(SMOLLM2, "float32", 24, 32, 24, 3, 50)
QUICK: Final = Plan(TINY, "float32", 12, 16, 12, 2, 6, roles=(2,))


@dataclass(frozen=True)
class Placed:
    """An engine under test: `kind` as in a job, the server's interpreter and further arguments."""

    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    python: str | None = None
    launch: tuple[str, ...] = ()


EMBEDDED: Final = Placed()


class Team:
    """A model in this process, or a server of it, with the bare base and so many roles on it."""

    def __init__(
        self, plan: Plan, roles: int, place: Path, base: str, placed: Placed = EMBEDDED
    ) -> None:
        """`place`: where `publish_base` has published the weights of checksum `base`."""
        self.plan = plan
        self.transfer = Transfer(place)
        self.base = base
        self.names = [f"role{number}" for number in range(roles)]
        model = ModelSpec(config=plan.config, dtype=plan.dtype, tokenizer="none")
        context = plan.prompt_tokens + plan.response_tokens + 8
        engine = EngineSpec(
            kind=placed.kind,
            python=placed.python,
            launch=list(placed.launch),
            max_running=plan.turns,
            max_context=context,
            start_timeout_seconds=_DEADLINE,
        )
        # A server computes in processes of its own.
        self._elsewhere = placed.kind != "embedded"
        frozen = PolicySpec(model=model, engine=engine, trainable=False)
        lora = LoraSpec(rank=RANK, alpha=2 * RANK, target_modules="all-linear")
        adapted = PolicySpec(model=model, engine=engine, lora=lora)
        specs = {BARE: frozen, **dict.fromkeys(self.names, adapted)}
        host = make_host(f"{JOB}.team.0", specs, threads=torch.get_num_threads())
        self.engines: dict[str, ServingEngine] = {
            name: host.engine(f"{JOB}.{name}.0", name) for name in specs
        }
        self._count = 0
        self._local = LocalProofs(AutoConfig.for_model(**plan.config))
        # Of adapters, by role and version: servers are asked for them.
        self._proofs: dict[tuple[str, int], common_pb.WeightsProof] = {}
        empty = skeleton(AutoConfig.for_model(**plan.config), plan.dtype, BARE)
        self.layers, _ = linear_layers(empty, "all-linear")

    async def start(self) -> None:
        for name, engine in self.engines.items():
            await engine.start()
            await self.prove(name, 0)
            await engine.update_weights(self.published(name, 0), self.transfer)

    async def stop(self) -> None:
        for engine in self.engines.values():
            await engine.stop()

    async def prove(self, name: str, version: int) -> None:
        """Compute the proof of an adapter, which its trainer computes, if it is needed."""
        if self._elsewhere and name != BARE:
            base, _ = self.transfer.get(base_key(JOB, self.base))
            proof = await self._local.of(base, self.base, self.adapter(name, version))
            self._proofs[name, version] = proof.to_message()

    def published(self, name: str, version: int) -> common_pb.WeightsRef:
        """Publish a version of a policy and name it."""
        if name == BARE:
            key, checksum, size = base_key(JOB, self.base), self.base, 0
        else:
            key = f"{JOB}/{name}/weights@{version}"
            manifest = self.transfer.set(key, self.adapter(name, version).to_tensors())
            checksum, size = manifest.checksum, manifest.num_bytes
            self.transfer.delete(f"{JOB}/{name}/weights@{version - 2}")
        return common_pb.WeightsRef(
            job_id=JOB,
            policy=name,
            version=version,
            key=key,
            checksum=checksum,
            num_bytes=size,
            proof=self._proofs.get((name, version)),
        )

    def adapter(self, name: str, version: int) -> AdapterContent:
        """The adapter of a role in a version, random."""
        generator = torch.Generator().manual_seed(self.names.index(name) * 10_000 + version)
        tensors = {}
        for layer, (inputs, outputs) in self.layers.items():
            stem = f"base_model.model.{layer}"
            tensors[f"{stem}.lora_A.weight"] = _normal(generator, RANK, inputs) * inputs**-0.5
            tensors[f"{stem}.lora_B.weight"] = _normal(generator, outputs, RANK) * 0.05
        targets = tuple(sorted({layer.rpartition(".")[2] for layer in self.layers}))
        return AdapterContent(self.base, RANK, 2.0 * RANK, targets, tensors=tensors)

    def prompt(self, rng: random.Random) -> list[int]:
        """A prompt that no other has a prefix of."""
        size = self.plan.config["vocab_size"]
        return [rng.randrange(size) for _ in range(self.plan.prompt_tokens)]

    async def turn(self, name: str, prompt: list[int], tokens: int, **how: Any) -> EngineResponse:
        self._count += 1
        sampling = Sampling(max_new_tokens=tokens, **how)
        return await self.engines[name].generate(
            f"t{self._count}", prompt, sampling, deadline_seconds=_DEADLINE
        )

    def processes(self) -> list[psutil.Process]:
        """The process that computes: this one, or a server's."""
        me = psutil.Process()
        return me.children(recursive=True) if self._elsewhere else [me]

    def cpu_seconds(self) -> float:
        """CPU seconds of `processes` so far."""
        times = [process.cpu_times() for process in self.processes()]
        return float(sum(one.user + one.system for one in times))

    def mebibytes(self) -> float:
        """Proportional set size (PSS) of `processes`, in MiB."""
        gc.collect()
        return float(sum(one.memory_full_info().pss for one in self.processes()) / 2**20)

    async def together(
        self, names: Sequence[str], seed: int, turns: int | None = None
    ) -> tuple[int, float, float]:
        """Draw all turns, or so many, by the policies `names` in turn; return tokens, seconds, CPU
        seconds."""
        rng = random.Random(seed)
        plan = self.plan
        prompts = [self.prompt(rng) for _ in range(turns or plan.turns)]
        began, cpu = time.perf_counter(), self.cpu_seconds()
        answers = await asyncio.gather(
            *(
                self.turn(names[number % len(names)], prompt, plan.response_tokens, seed=number)
                for number, prompt in enumerate(prompts)
            )
        )
        tokens = sum(len(answer.token_ids) for answer in answers)
        return tokens, time.perf_counter() - began, self.cpu_seconds() - cpu


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def publish_base(plan: Plan, place: Path) -> str:
    """Publish random weights of the base below `place`; return their checksum."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    model = skeleton(AutoConfig.for_model(**plan.config), plan.dtype, BARE)
    for name, tensor in distinct_tensors(model).items():
        drawn = _normal(generator, *tensor.shape) * 0.02
        tensors[name] = (drawn + 1.0 if "norm" in name else drawn).to(tensor.dtype)
    checksum = checksum_of(tensors)
    Transfer(place).set(base_key(JOB, checksum), tensors)
    return checksum


def apart(call: Callable[..., T], *args: Any) -> T:
    """Return the result of a call in a process of its own, which ends with it."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(call, *args).result()


async def updates(team: Team) -> dict[str, Any]:
    """Update roles under turns of all of them, and compare every turn with merged weights."""
    rng = random.Random(7)
    names = team.names[:4]
    prompts = {name: team.prompt(rng) for name in names}
    tokens = max(4, team.plan.response_tokens // 4)
    answers: list[tuple[str, int, EngineResponse]] = []
    lost = 0
    ended = asyncio.Event()

    async def player(number: int) -> None:
        nonlocal lost
        while not ended.is_set():
            name = names[number % len(names)]
            version = team.engines[name].version or 0
            try:
                answer = await team.turn(name, prompts[name], tokens, seed=number)
            except Exception as error:
                progress(f"a turn failed: {error}")
                lost += 1
                await asyncio.sleep(1)  # it may fail at once, again and again
            else:
                answers.append((name, version, answer))

    first = []
    async with asyncio.TaskGroup() as players:  # a failed update ends them
        for number in range(4):
            players.create_task(player(number))
        for number in range(team.plan.updates):
            name, version = names[number % len(names)], 1 + number // len(names)
            await team.prove(name, version)
            began = time.perf_counter()
            ref = await asyncio.to_thread(team.published, name, version)
            await team.engines[name].update_weights(ref, team.transfer)
            one = await team.turn(name, prompts[name], 1, seed=0)
            first.append(1000 * (time.perf_counter() - began))
            answers.append((name, version, one))
        ended.set()
    return {
        "updates": team.plan.updates,
        "first_token_ms": round(statistics.median(first), 1),
        "turns_during_updates": len(answers),
        "wrong_versions": wrong(team, prompts, answers),
        "lost_turns": lost,
    }


def wrong(
    team: Team,
    prompts: Mapping[str, list[int]],
    answers: Sequence[tuple[str, int, EngineResponse]],
) -> int:
    """Return the number of answers that name several versions, or one older than at their start, or
    that differ from the merged weights of the version that they name."""
    base, _ = team.transfer.get(base_key(JOB, team.base))
    model = skeleton(AutoConfig.for_model(**team.plan.config), team.plan.dtype, BARE)
    by_version: dict[tuple[str, int], list[EngineResponse]] = {}
    found = 0
    for name, oldest, answer in answers:
        versions = [span.version for span in answer.versions]
        if len(versions) != 1 or versions[0] < oldest:
            found += 1
        else:
            by_version.setdefault((name, versions[0]), []).append(answer)
    for (name, version), some in by_version.items():
        tensors = merged(base, team.adapter(name, version))
        adopt(tensors, model, common_pb.WeightsRef(version=version))
        for ids in {tuple(answer.token_ids) for answer in some}:
            rows = torch.tensor([prompts[name] + list(ids)])
            with torch.inference_mode():
                logits = model(rows).logits[0, len(prompts[name]) - 1 : -1].float()
            table = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            for answer in some:
                if tuple(answer.token_ids) == ids:
                    off = (table - torch.tensor(answer.logprobs)).abs().max().item()
                    found += off > _OFF[team.plan.dtype]
    return found
