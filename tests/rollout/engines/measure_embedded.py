"""Throughput of the embedded engine on the shape of an RL step: short answers to shared prompts.

    OMP_NUM_THREADS=1 python -m tests.rollout.engines.measure_embedded [small|middle|large] ...

Without and with `deterministic`, in turn.
Groups of 8 equal prompts of 40-100 tokens, answers of 1-16 tokens, 256 turns in flight.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout.engines.embedded.engine import EmbeddedEngine
from troupe.disks import Scratch
from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

TURNS: Final = 768
IN_FLIGHT: Final = 256
GROUP: Final = 8
# hidden size, layers, heads, key-value heads, head size, intermediate size
SIZES: Final = {
    "small": (64, 3, 4, 2, 16, 160),
    "middle": (128, 4, 4, 2, 32, 320),
    "large": (160, 5, 5, 5, 32, 400),
}


def config_of(size: str) -> dict[str, Any]:
    hidden, layers, heads, kv_heads, head, inner = SIZES[size]
    return {
        "model_type": "qwen3",
        "vocab_size": 100,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": inner,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def workload(seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    turns: list[tuple[list[int], int]] = []
    while len(turns) < TURNS:
        prompt = [rng.randrange(100) for _ in range(rng.randint(40, 100))]
        turns += [(prompt, rng.randint(1, 16)) for _ in range(GROUP)]
    return turns


async def measure(size: str, deterministic: bool) -> dict[str, Any]:
    config = config_of(size)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    spec = PolicySpec(
        model=ModelSpec(config=config, tokenizer="unused"),
        engine=EngineSpec(max_running=IN_FLIGHT, max_context=256),
    )
    engine = EmbeddedEngine("e", "p", spec, deterministic=deterministic)
    await engine.start()
    best: dict[str, Any] = {}
    with Scratch("troupe-bench-") as directory:
        transfer = Transfer(directory)
        manifest = transfer.set("j/p/weights@0", model.state_dict())
        ref = common_pb.WeightsRef(version=0, key="j/p/weights@0", checksum=manifest.checksum)
        await engine.update_weights(ref, transfer)
        for repeat in range(3):
            turns = workload(repeat)
            room = asyncio.Semaphore(IN_FLIGHT)

            async def ask(
                name: str, prompt: list[int], n: int, room: asyncio.Semaphore = room
            ) -> tuple[int, int]:
                async with room:
                    params = Sampling(max_new_tokens=n)
                    answer = await engine.generate(name, prompt, params, deadline_seconds=120)
                return len(answer.token_ids), answer.cached_tokens

            wall, cpu = time.perf_counter(), time.process_time()
            counts = await asyncio.gather(*(ask(f"{i}", *t) for i, t in enumerate(turns)))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            prompt_tokens = sum(len(p) for p, _ in turns)
            tokens = sum(n for n, _ in counts)
            result = {
                "size": size,
                "deterministic": deterministic,
                "parameters": sum(p.numel() for p in model.parameters()),
                "turns": TURNS,
                "prompt_tokens": prompt_tokens,
                "tokens": tokens,
                "wall_seconds": round(wall, 2),
                "cpu_seconds": round(cpu, 2),
                "tokens_per_cpu_second": round(tokens / cpu),
                "prompt_tokens_per_cpu_second": round(prompt_tokens / cpu),
                "cached": round(sum(c for _, c in counts) / prompt_tokens, 2),
            }
            if not best or cpu < best["cpu_seconds"]:
                best = result
    await engine.stop()
    return best


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or list(SIZES):
        for deterministic in (False, True):
            print(json.dumps(asyncio.run(measure(chosen, deterministic))))
