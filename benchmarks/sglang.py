"""SGLang behind Troupe's router and engine, against the same SGLang server called directly.

    python -m benchmarks.sglang --device cuda [--python PYTHON] [--updates N] [--quick] [--json]

One server of a 0.5B-class Qwen2.5 architecture with random weights made here (`--quick`: a tiny
model), launched like a job's engine. Bare HTTP requests alternate with turns through the policy's
router, at the same concurrency and with the same prompts, lengths and log-probs. Then weights are
updated repeatedly under continuous turns. `--python`: an interpreter with SGLang, or a script that
takes its arguments (`-m sglang.launch_server ...`, `-c ...`). The last line is one JSON object:

- `ratio_vs_bare`: response tokens/s through Troupe over bare, medians; `troupe_tokens_per_second`,
  `bare_tokens_per_second`.
- `updates`, `exposed_ms_p50`, `exposed_ms_p99`: times in which the engine could not serve, as it
  reports them; `update_ms_p50`: from the announcement of published weights to serving them,
  verified.
- `failed_turns`, `wrong_versions`: failed turns during the updates, and tokens of a version that
  was not in service during their turn. Both must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.command import finish, run_program
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.weights import skeleton
from services.rollout.serving.policy import ServedPolicy
from services.rollout.serving.router import StickyRoute
from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling
from troupe.workflow.languages import Language

POLICY = "solver"
# Qwen2.5-0.5B's architecture.
HALF_BILLION: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    # Random weights must not end a response.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY = HALF_BILLION | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement. `turns`: per round and way; `concurrency`: of them at once."""

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    concurrency: int
    turns: int
    rounds: int
    prompt_tokens: int
    response_tokens: int
    updates: int


FULL = Plan(HALF_BILLION, "bfloat16", 128, 512, 3, 256, 256, 100)
ON_CPU = Plan(HALF_BILLION, "float32", 8, 16, 3, 64, 32, 10)
QUICK = Plan(TINY, "float32", 8, 24, 2, 16, 24, 4)


class Bench:
    """One server as a policy's only engine, and two alternating versions of weights."""

    def __init__(self, plan: Plan, python: str, place: Path, launch: list[str]) -> None:
        self.plan = plan
        engine = EngineSpec(
            kind="sglang",
            python=python,
            max_running=plan.concurrency,
            max_context=plan.prompt_tokens + plan.response_tokens + 8,
            start_timeout_seconds=900,
            launch=launch,
        )
        # The tokenizer is never loaded: inputs and outputs are token ids.
        model = ModelSpec(config=plan.config, dtype=plan.dtype, tokenizer="none")
        spec = PolicySpec(model=model, engine=engine)
        self.transfer = Transfer(place / "transfer")
        self._weights = [self._random(seed) for seed in (0, 1)]
        self.engine = SglangEngine("bench.0", POLICY, spec)
        self.policy = ServedPolicy(
            POLICY, cast(Language, None), [self.engine], self.transfer, engine, self.publish(0)
        )

    def _random(self, seed: int) -> dict[str, torch.Tensor]:
        model = skeleton(AutoConfig.for_model(**self.plan.config), self.plan.dtype, POLICY)
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.02
            tensors[name] = (drawn + 1.0 if "norm" in name else drawn).to(tensor.dtype)
        if self.plan.config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        return tensors

    def publish(self, version: int) -> common_pb.WeightsRef:
        """Set the version's weights; the one before the last is forgotten."""
        key = f"bench/{POLICY}/weights@{version}"
        manifest = self.transfer.set(key, self._weights[version % 2])
        self.transfer.delete(f"bench/{POLICY}/weights@{version - 2}")
        return common_pb.WeightsRef(
            job_id="bench",
            policy=POLICY,
            version=version,
            key=key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
        )

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the prompts of one round, without common prefixes, so that none is cached."""
        rng = random.Random(seed)
        plan = self.plan
        return [
            [rng.randrange(plan.config["vocab_size"]) for _ in range(plan.prompt_tokens)]
            for _ in range(plan.turns)
        ]

    async def turn(self, name: str, prompt: list[int]) -> EngineResponse:
        """Generate one turn, like a trajectory."""
        sampling = Sampling(max_new_tokens=self.plan.response_tokens)
        return await self.policy.router.generate(
            name, prompt, sampling, route=StickyRoute(), deadline_seconds=600
        )

    async def through_troupe(self, seed: int) -> float:
        """Return response tokens per second through Troupe."""

        async def one(number: int, prompt: list[int]) -> int:
            return len((await self.turn(f"t{seed}-{number}", prompt)).token_ids)

        return await self._rate(one, seed)

    async def bare(self, seed: int) -> float:
        """Return response tokens per second of plain requests."""
        sampling = {"max_new_tokens": self.plan.response_tokens, "temperature": 1.0}
        url = self.engine.url
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:

            async def one(number: int, prompt: list[int]) -> int:
                body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
                answer = (await http.post("/generate", json=body)).raise_for_status().json()
                return len(answer["meta_info"]["output_token_logprobs"])

            return await self._rate(one, seed)

    async def _rate(self, one: Any, seed: int) -> float:
        gate = asyncio.Semaphore(self.plan.concurrency)

        async def held(number: int, prompt: list[int]) -> int:
            async with gate:
                return int(await one(number, prompt))

        prompts = self.prompts(seed)
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(held(n, p) for n, p in enumerate(prompts))))
        return tokens / (time.perf_counter() - began)

    async def updates(self, progress: Console) -> dict[str, float]:
        """Update weights under continuous turns."""
        rng = random.Random(99)
        ended = asyncio.Event()
        failed = wrong = turns = 0

        async def player(number: int) -> None:
            nonlocal failed, wrong, turns
            count = 0
            while not ended.is_set():
                vocabulary = self.plan.config["vocab_size"]
                prompt = [rng.randrange(vocabulary) for _ in range(self.plan.prompt_tokens)]
                # A version is announced before the server has it, and serves until the next one.
                first = self.engine.version or 0
                try:
                    answer = await self.turn(f"u{number}-{count}", prompt)
                except Exception as error:
                    progress.print(f"a turn failed: {error}")
                    failed += 1
                else:
                    last = self.policy.weights.version
                    for span in answer.versions:
                        if not first <= span.version <= last:
                            wrong += span.end - span.start
                count += 1
                turns += 1

        players = [asyncio.create_task(player(n)) for n in range(self.plan.concurrency)]
        exposed, whole = [], []
        for version in range(1, self.plan.updates + 1):
            await asyncio.sleep(0.2)
            ref = await asyncio.to_thread(self.publish, version)
            began = time.perf_counter()
            exposed.append(1000 * await self.policy.update(ref))
            whole.append(1000 * (time.perf_counter() - began))
            if version % 10 == 0:
                progress.print(
                    f"update {version} of {self.plan.updates}: exposed {exposed[-1]:.0f} ms "
                    f"of {whole[-1]:.0f} ms"
                )
        ended.set()
        await asyncio.gather(*players)
        return {
            "updates": len(exposed),
            "exposed_ms_p50": round(statistics.median(exposed), 1),
            "exposed_ms_p99": round(sorted(exposed)[int(0.99 * (len(exposed) - 1))], 1),
            "update_ms_p50": round(statistics.median(whole), 1),
            "turns_during_updates": turns,
            "failed_turns": failed,
            "wrong_versions": wrong,
        }


async def run(plan: Plan, python: str, launch: list[str], progress: Console) -> dict[str, float]:
    """Return the figures of the module's docstring."""
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as directory:
        bench = Bench(plan, python, Path(directory), launch)
        progress.print("launching SGLang and loading the first weights")
        await bench.policy.bring_up()
        try:
            await bench.bare(0)  # warm-up: compilation and allocation
            rates: dict[str, list[float]] = {"bare": [], "troupe": []}
            for number in range(1, plan.rounds + 1):
                rates["bare"].append(await bench.bare(2 * number))
                rates["troupe"].append(await bench.through_troupe(2 * number + 1))
                last = ", ".join(f"{way} {rates[way][-1]:.0f}" for way in rates)
                progress.print(f"round {number} of {plan.rounds}: {last} tokens/s")
            bare, troupe = (statistics.median(rates[way]) for way in ("bare", "troupe"))
            return {
                "ratio_vs_bare": round(troupe / bare, 3),
                "troupe_tokens_per_second": round(troupe, 1),
                "bare_tokens_per_second": round(bare, 1),
                "concurrency": plan.concurrency,
                **await bench.updates(progress),
            }
        finally:
            await bench.policy.release("the benchmark is over")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with SGLang")
    parser.add_argument("--updates", type=int, help="number of weight updates under turns")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few turns")
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--launch", nargs="*", default=[], help="further arguments of the server")
    options = parser.parse_args()
    if options.device == "cuda" and not options.quick and not torch.cuda.is_available():
        # This torch may be a CPU build: the server's torch decides.
        print("this process sees no CUDA device; the server may", file=sys.stderr)
    plan = QUICK if options.quick else FULL if options.device == "cuda" else ON_CPU
    if options.updates is not None:
        if options.updates < 1:
            parser.error(f"--updates is {options.updates}; give 1 or more")
        plan = replace(plan, updates=options.updates)
    progress = Console(stderr=True, quiet=options.json)
    figures = asyncio.run(run(plan, options.python, options.launch, progress))
    if not options.json:
        table = Table("figure", "value", title=f"SGLang on {options.device}")
        for name, value in figures.items():
            table.add_row(name, str(value))
        Console().print(table)
    finish({"device": options.device, "quick": options.quick, **figures}, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
