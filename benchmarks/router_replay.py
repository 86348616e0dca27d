"""Router replay (`algorithm.router_replay`): its reduction of the mismatch between engine and
trainer.

    OMP_NUM_THREADS=1 python -m benchmarks.router_replay [--quick] [--json]

A mixture of random weights: the embedded engine serves it in bfloat16, the trainer computes the
same weights in float32. If two experts are nearly equal, rounding routes a token to another one,
and its log-prob comes from another function. `k3_kl` is the trainer's metric over the same replies,
without and with replay. The last line is one JSON object: both, their ratio, the share of tokens
and layers whose experts differ, the seconds of a step without and with replay, the bytes of a
sample of 32,768 tokens of a model with 48 layers and 8 of 128 experts per token.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.command import finish, options_of, run_program, scratch
from benchmarks.workloads.one_policy import job_of_one
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from troupe.client.cli.options import make_table
from troupe.job import JobSpec
from troupe.mixtures import RecordedRoutes, Routers, RoutingShape
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

CONFIG: Final[dict[str, Any]] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
    "max_position_embeddings": 512,
}
_PROMPT: Final = 16
_STEPS: Final = 3
# Qwen3-30B-A3B.
_LARGE: Final = RoutingShape(layers=48, top_k=8, experts=128)
_LONG: Final = 32_768


def main(arguments: list[str] | None = None) -> None:
    """Generate, compute a step both ways, print the table and the JSON object."""
    options = options_of(__doc__, arguments)
    console = Console(stderr=options.json)
    prompts, tokens = (4, 16) if options.quick else (16, 64)
    with scratch() as directory:
        found = measure(directory, prompts=prompts, tokens=tokens)
    table = make_table(["router replay", "k3_kl", "s per step"], [], "bf16 engine, fp32 trainer")
    for name in ("without", "with"):
        table.add_row(name, f"{found[f'k3_kl_{name}']:.2e}", f"{found[f'seconds_{name}']:.2f}")
    console.print(table)
    finish(found, quiet=options.json)


def job(tokenizer: Path, dtype: str, *, replays: bool = False) -> JobSpec:
    """Return the mixture as a job whose engines compute in `dtype`."""
    return job_of_one(
        "router-replay",
        {
            "model": {"config": CONFIG, "tokenizer": str(tokenizer), "dtype": dtype},
            "engine": {"max_context": 512, "max_running": 32},
        },
        pipeline={"steps": 1, "queries_per_step": 2},
        algorithm={"router_replay": replays, "entropy_coefficient": 1e-3},
    )


def measure(directory: Path, *, prompts: int, tokens: int) -> dict[str, float]:
    """Return the figures for `prompts` replies of `tokens` tokens each."""
    tokenizer = save_tokenizer(directory / "tokenizer")
    served = job(tokenizer, "bfloat16")
    model = load_model("solver", served.policies["solver"], 0)
    # Trainer and engine have the same weights: only their computation differs.
    model.load_state_dict({n: t.bfloat16().float() for n, t in model.state_dict().items()})
    rows = asyncio.run(generated(served, model, directory, prompts, tokens))
    found: dict[str, float] = {"differing_routes": differing(model, rows)}
    for name, replays in (("without", False), ("with", True)):
        spec = job(tokenizer, "float32", replays=replays)
        learner = Learner(model, spec, "solver")
        own = rows if replays else [replace(row, routes=None) for row in rows]
        seconds = []
        for _ in range(_STEPS):
            learner.discard()
            started = time.perf_counter()
            learner.accumulate(own)
            seconds.append(time.perf_counter() - started)
        found[f"k3_kl_{name}"] = learner._step.sums.tokens.metrics()["k3_kl"]
        found[f"seconds_{name}"] = statistics.median(seconds)
    found["k3_kl_ratio"] = found["k3_kl_without"] / found["k3_kl_with"]
    indices = np.zeros((_LONG - 1, _LARGE.layers, _LARGE.top_k), np.int16)
    found["bytes_of_32k_tokens"] = float(_LARGE.compact(indices).nbytes)
    return found


async def generated(
    spec: JobSpec, model: Any, directory: Path, prompts: int, tokens: int
) -> list[Row]:
    """Return replies of an engine as rows of the trainer, with the experts that it used."""
    learner = Learner(model, spec, "solver")
    transfer = Transfer(directory / "transfer")
    key = "job/solver/weights@0"
    checksum = transfer.set(key, learner.published()).checksum
    ref = common_pb.WeightsRef(policy="solver", version=0, key=key, checksum=checksum)
    engine = EmbeddedEngine("e0", "solver", spec.policies["solver"], routed_experts=True)
    await engine.start()
    await engine.update_weights(ref, transfer)
    rng = np.random.default_rng(0)
    starts = rng.integers(CONFIG["vocab_size"], size=(prompts, _PROMPT))
    turns = await asyncio.gather(
        *(
            engine.generate(
                f"r{number}",
                start.tolist(),
                Sampling(max_new_tokens=tokens, seed=number),
                deadline_seconds=600,
            )
            for number, start in enumerate(starts)
        )
    )
    await engine.stop()
    return [
        Row(
            sample_id=f"s{number:04}",
            ids=np.concatenate([start, turn.token_ids]).astype(np.int64),
            prompt_length=_PROMPT,
            behaviour=np.array(turn.logprobs, np.float32),
            reward=float(number % 2),
            group_rewards=(0.0, 1.0),
            version=0,
            group=f"g{number // 2}",
            routes=turn.routed_experts,
        )
        for number, (start, turn) in enumerate(zip(starts, turns, strict=True))
    ]


@torch.no_grad()
def differing(model: Any, rows: list[Row]) -> float:
    """Return the share of (token, layer) pairs with a different set of experts in the trainer."""
    routers = Routers.of(model)
    assert routers is not None
    counts = np.zeros(2)
    for row in rows:
        recorded = RecordedRoutes(routers.shape, {})
        with routers.passing(recorded):
            model(torch.from_numpy(row.ids[None, :-1]), use_cache=False)
        assert row.routes is not None
        same = np.sort(recorded.compact(), -1) == np.sort(row.routes, -1)
        counts += (np.sum(~same.all(-1)), same.shape[0] * same.shape[1])
    return float(counts[0] / counts[1])


def save_tokenizer(directory: Path) -> Path:
    """Save a tokenizer of the mixture's vocabulary."""
    vocabulary = {chr(0x4E00 + index): index for index in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=chr(0x4E00))
    fast.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    run_program(main)
