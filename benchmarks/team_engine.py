"""A team on one engine: adapters of several policies over one base, served in the same passes.

    OMP_NUM_THREADS=1 python -m benchmarks.team_engine [--quick] [--json] [--half] [--only embedded]

`embedded`: SmolLM2-135M's shape with random weights (`--quick`: a tiny model), in float32, or in
bfloat16 (`--half`); adapters of rank 8 on all linear layers. The last line is one JSON object with
an object per part:

- `memory_over_one_base`: by number of roles, the proportional set size (PSS) of the process that
  serves them, as a ratio of one that serves the bare base, each in a process of its own, after
  equally many turns. `adapter_mib`: what a further role adds.
- `tokens_over_one_policy`, `per_cpu_second`: by number of roles, tokens per second, and per CPU
  second of the process, of all roles together, as ratios of one policy's with as many turns;
  medians of rounds, in which all alternate. `one_policy`: its tokens per CPU second.
- `adapter_over_bare`: one policy's tokens per CPU second with an adapter, divided by the figure of
  the bare base with as many turns. An adapter that is merged into a copy of the base costs nothing
  per token. `merge_cpu_seconds`, `update_cpu_seconds`: of making and verifying that copy, and of
  loading an adapter next to the base.
- `updates` under turns of four roles; `first_token_ms`: from the publication of an adapter to the
  end of its first turn of one token. `wrong_versions`: turns that name several versions or an old
  one, or whose log-probs differ from the merged weights of the version that they name;
  `lost_turns`: turns that failed. Both must be 0.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import psutil
import torch
from rich.console import Console
from transformers import AutoConfig

from benchmarks.command import finish, options_of, progress, run_program, scratch
from services.rollout.engines.base import ServingEngine
from services.rollout.engines.factory import make_host
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.weights import adopt, skeleton
from troupe.checkpoints.adapters import (
    AdapterContent,
    base_key,
    distinct_tensors,
    linear_layers,
    merged,
)
from troupe.client.cli.options import make_table
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
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# A version's log-probs may be off by rounding: merged weights are another order of sums.
_OFF: Final = {"float32": 2e-3, "bfloat16": 0.3}
_DEADLINE: Final = 3600.0


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement. `turns`: at once, of all roles together."""

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    turns: int
    prompt_tokens: int
    response_tokens: int
    rounds: int
    updates: int


FULL: Final = Plan(SMOLLM2, "float32", 24, 32, 24, 3, 50)
QUICK: Final = Plan(TINY, "float32", 12, 16, 12, 2, 6)


class EmbeddedTeam:
    """A model in this process, with the bare base and so many roles on it."""

    def __init__(self, plan: Plan, roles: int, place: Path, base: str) -> None:
        """`place`: where `publish_base` has published the weights of checksum `base`."""
        self.plan = plan
        self.transfer = Transfer(place)
        self._base = base
        self.names = [f"role{number}" for number in range(roles)]
        model = ModelSpec(config=plan.config, dtype=plan.dtype, tokenizer="none")
        context = plan.prompt_tokens + plan.response_tokens + 8
        engine = EngineSpec(max_running=plan.turns, max_context=context)
        frozen = PolicySpec(model=model, engine=engine, trainable=False)
        lora = LoraSpec(rank=RANK, alpha=2 * RANK, target_modules="all-linear")
        adapted = PolicySpec(model=model, engine=engine, lora=lora)
        specs = {BARE: frozen, **dict.fromkeys(self.names, adapted)}
        host = make_host(f"{JOB}.team.0", specs, threads=torch.get_num_threads())
        self.engines: dict[str, ServingEngine] = {
            name: host.engine(f"{JOB}.{name}.0", name) for name in specs
        }
        self._count = 0
        empty = skeleton(AutoConfig.for_model(**plan.config), plan.dtype, BARE)
        self.layers, _ = linear_layers(empty, "all-linear")

    async def start(self) -> None:
        for name, engine in self.engines.items():
            await engine.start()
            await engine.update_weights(self.published(name, 0), self.transfer)

    async def stop(self) -> None:
        for engine in self.engines.values():
            await engine.stop()

    def published(self, name: str, version: int) -> common_pb.WeightsRef:
        """Publish a version of a policy and name it."""
        if name == BARE:
            key, checksum, size = base_key(JOB, self._base), self._base, 0
        else:
            key = f"{JOB}/{name}/weights@{version}"
            manifest = self.transfer.set(key, self.adapter(name, version).to_tensors())
            checksum, size = manifest.checksum, manifest.num_bytes
            self.transfer.delete(f"{JOB}/{name}/weights@{version - 2}")
        return common_pb.WeightsRef(
            job_id=JOB, policy=name, version=version, key=key, checksum=checksum, num_bytes=size
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
        return AdapterContent(self._base, RANK, 2.0 * RANK, targets, tensors=tensors)

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

    async def together(self, names: Sequence[str], seed: int) -> tuple[int, float, float]:
        """Draw all turns, by the policies `names` in turn; return tokens, seconds, CPU seconds."""
        rng = random.Random(seed)
        plan = self.plan
        prompts = [self.prompt(rng) for _ in range(plan.turns)]
        began, cpu = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(
            *(
                self.turn(names[number % len(names)], prompt, plan.response_tokens, seed=number)
                for number, prompt in enumerate(prompts)
            )
        )
        tokens = sum(len(answer.token_ids) for answer in answers)
        return tokens, time.perf_counter() - began, time.process_time() - cpu


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


def memory(plan: Plan, roles: int, place: Path, base: str) -> float:
    """Return the PSS in MiB of this process, which serves the bare base and so many roles."""
    torch.set_num_threads(1)

    async def measured() -> float:
        team = EmbeddedTeam(plan, roles, place, base)
        await team.start()
        await team.together(team.names or [BARE], 0)
        gc.collect()
        pss = psutil.Process().memory_full_info().pss / 2**20
        await team.stop()
        return float(pss)

    return asyncio.run(measured())


def apart(call: Callable[..., T], *args: Any) -> T:
    """Return the result of a call in a process of its own, which ends with it."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(call, *args).result()


async def rates(team: EmbeddedTeam) -> dict[str, list[tuple[float, float]]]:
    """Return tokens per second and per CPU second of each round: of the bare base, of one policy,
    of as many roles."""
    names = {"bare": [BARE], "1": team.names[:1]}
    names |= {str(roles): team.names[:roles] for roles in ROLES}
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in names}
    await team.together(team.names, 1)  # warm-up
    for number in range(team.plan.rounds):
        for case in [*names][:: -1 if number % 2 else 1]:
            tokens, seconds, cpu = await team.together(names[case], 100 + number)
            found[case].append((tokens / seconds, tokens / cpu))
        said = ", ".join(f"{case} {rounds[-1][1]:.1f}" for case, rounds in found.items())
        progress(f"round {number + 1} of {team.plan.rounds}: tokens per CPU second: {said}")
    return found


def over(rounds: Mapping[str, list[tuple[float, float]]], case: str, base: str, of: int) -> float:
    """Return the median of the rounds' ratios of a rate: per second (0), per CPU second (1)."""
    pairs = zip(rounds[case], rounds[base], strict=True)
    return round(statistics.median(one[of] / other[of] for one, other in pairs), 3)


async def updates(team: EmbeddedTeam) -> dict[str, Any]:
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
            else:
                answers.append((name, version, answer))

    players = [asyncio.create_task(player(number)) for number in range(4)]
    first, cpu = [], []
    for number in range(team.plan.updates):
        name, version = names[number % len(names)], 1 + number // len(names)
        began = time.perf_counter()
        ref = await asyncio.to_thread(team.published, name, version)
        worked = time.process_time()
        await team.engines[name].update_weights(ref, team.transfer)
        cpu.append(time.process_time() - worked)
        one = await team.turn(name, prompts[name], 1, seed=0)
        first.append(1000 * (time.perf_counter() - began))
        answers.append((name, version, one))
    ended.set()
    await asyncio.gather(*players)
    return {
        "updates": team.plan.updates,
        "first_token_ms": round(statistics.median(first), 1),
        "turns_during_updates": len(answers),
        "wrong_versions": wrong(team, prompts, answers),
        "lost_turns": lost,
    }


def wrong(
    team: EmbeddedTeam,
    prompts: Mapping[str, list[int]],
    answers: Sequence[tuple[str, int, EngineResponse]],
) -> int:
    """Return the number of answers that name several versions, or one older than at their start, or
    that differ from the merged weights of the version that they name."""
    base, _ = team.transfer.get(base_key(JOB, team._base))
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


async def merging(team: EmbeddedTeam) -> dict[str, float]:
    """Return the CPU seconds of merging an adapter into a copy of the base and of loading it."""
    base, _ = team.transfer.get(base_key(JOB, team._base))
    name = team.names[-1]
    content = team.adapter(name, 1)
    began = time.process_time()
    checksum_of(merged(base, content))
    merge = time.process_time() - began
    ref = team.published(name, 1)
    began = time.process_time()
    await team.engines[name].update_weights(ref, team.transfer)
    load = time.process_time() - began
    return {"merge_cpu_seconds": round(merge, 3), "update_cpu_seconds": round(load, 3)}


async def speed(plan: Plan, place: Path, base: str) -> dict[str, Any]:
    """Return the figures of the embedded engine that are no memory."""
    team = EmbeddedTeam(plan, max(ROLES), place, base)
    await team.start()
    try:
        rounds = await rates(team)
        return {
            "tokens_over_one_policy": {str(k): over(rounds, str(k), "1", 0) for k in ROLES},
            "per_cpu_second": {str(k): over(rounds, str(k), "1", 1) for k in ROLES},
            "one_policy": round(statistics.median(cpu for _, cpu in rounds["1"]), 1),
            "adapter_over_bare": over(rounds, "1", "bare", 1),
            **await merging(team),
            **await updates(team),
        }
    finally:
        await team.stop()


def embedded(plan: Plan) -> dict[str, Any]:
    """Return the figures of the embedded engine."""
    with scratch() as place:
        # A page that this process maps, too, would count half.
        base = apart(publish_base, plan, place)
        held = {}
        for roles in (0, *ROLES):
            held[roles] = apart(memory, plan, roles, place, base)
            progress(f"{roles} roles: {held[roles]:.0f} MiB")
        return {
            "dtype": plan.dtype,
            "turns": plan.turns,
            "memory_over_one_base": {str(k): round(held[k] / held[0], 3) for k in ROLES},
            "memory_mib": {str(roles): round(mib) for roles, mib in held.items()},
            "adapter_mib": round((held[max(ROLES)] - held[0]) / max(ROLES), 1),
            **asyncio.run(speed(plan, place, base)),
        }


PARTS: Final[dict[str, Callable[[Plan], dict[str, Any]]]] = {"embedded": embedded}


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, None, parts=tuple(PARTS), flags={"half": "serve the base in bfloat16"}
    )
    torch.set_num_threads(1)
    plan = QUICK if options.quick else FULL
    if options.half:
        plan = replace(plan, dtype="bfloat16")
    found = {name: part(plan) for name, part in PARTS.items() if options.only in (None, name)}
    if not options.json:
        for name, figures in found.items():
            table = make_table(["figure"], ["value"], f"A team on one engine: {name}")
            for figure, value in figures.items():
                table.add_row(figure, str(value))
            Console().print(table)
    finish({"quick": options.quick, **found}, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
