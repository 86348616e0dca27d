"""The time in which an engine cannot serve while it loads a new version of another process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.transfer.measure import TCP
from benchmarks.transfer.processes import line, other, tell
from services.rollout.engines.embedded.engine import EmbeddedEngine
from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.transfer.remote import Peer, lane
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

POLICY = "policy"


def config(hidden: int, layers: int) -> dict[str, Any]:
    """Return the configuration of a Qwen3 of this size."""
    return {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": hidden // 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def model(hidden: int, layers: int, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version."""
    torch.manual_seed(version)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(hidden, layers)))
    return dict(made.state_dict())


def exposed(hidden: int, layers: int, rounds: int, directory: Path) -> tuple[float, float, int]:
    """Return the seconds in which a continuously loaded embedded engine could not serve, the
    seconds of the version's transfer, and its bytes. The best of `rounds`."""
    return asyncio.run(_exposed(hidden, layers, rounds, directory))


async def _exposed(
    hidden: int, layers: int, rounds: int, directory: Path
) -> tuple[float, float, int]:
    spec = PolicySpec(
        model=ModelSpec(config=config(hidden, layers), tokenizer="unused"),
        engine=EngineSpec.model_validate({"max_running": 8, "max_context": 512}),
    )
    use_ucx = not lane.missing()
    arguments = (directory / "trainer", hidden, layers, int(use_ucx))
    with other("publish", *arguments, env=TCP if use_ucx else None) as trainer:
        transfer = Transfer(directory / "rollout", peers=[Peer(line(trainer), use_ucx=use_ucx)])
        engine = EmbeddedEngine("e0", POLICY, spec)
        found = []
        num_bytes = 0
        serving: asyncio.Task[None] | None = None
        for version in range(rounds + 3):
            tell(trainer, version)
            checksum = await asyncio.to_thread(line, trainer)
            key = f"benchmark/{POLICY}/weights@{version}"
            ref = common_pb.WeightsRef(
                job_id="benchmark", policy=POLICY, version=version, key=key, checksum=checksum
            )
            begin = time.perf_counter()
            manifest, _ = await asyncio.to_thread(
                transfer.fetch, key, expected_checksum=checksum, timeout=120.0
            )
            moved = time.perf_counter() - begin
            num_bytes = manifest.num_bytes
            if version == 0:
                await engine.start()
                await engine.update_weights(ref, transfer)
                serving = asyncio.create_task(_serve(engine))
                continue
            found.append((await engine.update_weights(ref, transfer), moved))
            if serving is not None and serving.done():
                serving.result()
        if serving is not None:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        await engine.stop()
        # The first two versions use fresh files.
        return (*min(found[2:], key=lambda pair: pair[0] / pair[1]), num_bytes)


async def _serve(engine: EmbeddedEngine) -> None:
    """Generate turns endlessly, like a rollout."""
    number = 0
    while True:
        number += 1
        sampling = Sampling(max_new_tokens=32, seed=number)
        await engine.generate(f"r{number}", [1, 2, 3], sampling, deadline_seconds=120)
