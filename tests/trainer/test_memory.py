"""The memory model against what torch's tracker finds in real steps of real learners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sglang import HALF_BILLION
from tests.support.ports import free_port
from tests.trainer.peak import case
from tests.trainer.stage import TrainingStage
from troupe.job import JobSpec
from troupe.job.sizing import read_shape, setup_of
from troupe.scheduling.memory import ModelShape, RankMemory, TrainingSetup, rank_memory

# The model is at most this far below the truth, and at most that far above.
BELOW, ERROR = 0.01, 0.1
# For a model of a real size, the prediction is within this, above or below.
REAL_ERROR = 0.1
# Of ranks that divide experts: the model has room for a load that is not even.
UNEVEN = 1.35
SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
ONE_DEVICE = {
    "bfloat16": case(),
    "checkpointing": case(trainer={"activation_checkpointing": True}),
    "half-checkpointed": case(trainer={"activation_checkpointing": 2}),
    "float32": case(dtype="float32"),
    "lora": case(lora={"rank": 8}),
    "critic-and-reference": case(algorithm={"advantage": "gae", "kl_coefficient": 0.1}),
    "exact": case(pipeline={"deterministic": True}),
    "untied": case(config={"tie_word_embeddings": False, "vocab_size": 4096}),
    "llama": case(config={"model_type": "llama"}),
    "wide": case(config={"num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 2}),
    "mixture": case(
        config={
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        }
    ),
}


def predicted(values: dict[str, Any]) -> RankMemory:
    spec = JobSpec.model_validate(values)
    shape = read_shape(spec.policies["solver"].language_model)
    assert shape is not None
    return rank_memory(shape, setup_of(spec, "solver", shape, device="cpu"))


def compare(name: str, measured: dict[str, int], model: RankMemory) -> None:
    off = model.total / measured["Total"] - 1
    print(f"{name}: predicted {model.total:,}, measured {measured['Total']:,}, {off:+.1%}")
    print(f"  {model.parts}\n  {measured}")
    assert -BELOW <= off <= ERROR


def peak_alone(values: dict[str, Any], directory: Path) -> dict[str, int]:
    """Return the peak of a learner on one device, in a separate process."""
    path = directory / "case.json"
    path.write_text(json.dumps(values))
    command = [sys.executable, "-m", "tests.trainer.peak", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_step_needs_the_predicted_memory(tmp_path: Path) -> None:
    """Total, weights, gradients and moments of one micro-batch and its step."""
    values = ONE_DEVICE["checkpointing"]
    measured, model = peak_alone(values, tmp_path), predicted(values)
    compare("checkpointing", measured, model)
    assert measured["Parameter"] == model.weights
    assert measured["Gradient"] == model.gradients
    assert measured["Optstate"] == pytest.approx(model.moments, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ONE_DEVICE) - {"checkpointing"}))
def test_every_way_to_train_needs_the_predicted_memory(name: str, tmp_path: Path) -> None:
    """Adapters, critics, references, exact sums, other types, shapes and mixtures."""
    compare(name, peak_alone(ONE_DEVICE[name], tmp_path), predicted(ONE_DEVICE[name]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("config", "tokens", "length"),
    [(SMOLLM2_135M, 1024, 512), (HALF_BILLION, 512, 256)],
    ids=["SmolLM2-135M", "Qwen2.5-0.5B"],
)
def test_a_model_of_real_size_needs_the_predicted_memory(
    config: dict[str, Any], tokens: int, length: int, tmp_path: Path
) -> None:
    """A step in float32 on a CPU: its fused norms, and the attention of rows of
    more than 128 tokens. Dimensions are those of published models, weights are random. That of
    0.5 B needs 11 GB."""
    model = {"config": config, "tokenizer": "/nowhere", "dtype": "float32"}
    trainer = {"kernels": "auto", "forward_tokens": tokens}
    values = case(model=model, trainer=trainer, length=length)
    measured, found = peak_alone(values, tmp_path), predicted(values)
    print(f"{found.total / measured['Total'] - 1:+.1%}\n  {found.parts}\n  {measured}")
    assert abs(found.total / measured["Total"] - 1) <= REAL_ERROR


def peak_of_rank(values: dict[str, Any], directory: Path) -> dict[str, int]:
    """Return the peak of the first of two gloo ranks, each in a separate process."""
    path = directory / "case.json"
    path.write_text(json.dumps(values))
    port, ranks = free_port(), []
    for rank in range(2):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in (where | meet).items()}
        command = [sys.executable, "-m", "tests.trainer.peak", str(path)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found: dict[str, int] = json.loads(outputs[0].splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rank_of_a_gang_needs_the_predicted_memory(dtype: str, tmp_path: Path) -> None:
    """One of two gloo ranks, with FSDP's shards and gathered layers."""
    values = case(dtype=dtype, trainer={"gang": 2}, config={"hidden_size": 128})
    compare(f"gang, {dtype}", peak_of_rank(values, tmp_path), predicted(values))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_rank_with_some_of_the_experts_needs_at_most_the_predicted_memory(
    checkpointing: bool, tmp_path: Path
) -> None:
    """With some room, as the load of experts may be uneven."""
    mixture = {"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 96}
    values = case(
        dtype="float32",
        config={"hidden_size": 128, "num_experts_per_tok": 2} | mixture,
        trainer={"gang": 2, "expert_parallel": 2, "activation_checkpointing": checkpointing},
    )
    measured, model = peak_of_rank(values, tmp_path), predicted(values)
    print(f"{model.total / measured['Total'] - 1:+.1%}\n  {model.parts}\n  {measured}")
    assert measured["Total"] <= model.total <= UNEVEN * measured["Total"]
    values["policies"]["solver"]["trainer"]["expert_parallel"] = 1
    assert predicted(values).gathered > 2 * model.gathered


QWEN3_4B = ModelShape(
    parameters=4_022_468_096,
    embedding=388_956_160,
    output=0,
    layers=36,
    layer=100_930_816,
    hidden=2560,
    intermediate=9728,
    vocabulary=151_936,
    heads=32,
    kv_heads=8,
    head_dim=128,
    head_norms=True,
)


@given(
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(1, 16),
    st.integers(256, 32_768),
    st.booleans(),
    st.booleans(),
)
def test_more_ranks_need_less_and_more_tokens_more(
    ranks: int, more: int, tokens: int, half: bool, checkpointing: bool
) -> None:
    """The state of a rank is its share, and no part is negative."""

    def needed(count: int, size: int) -> RankMemory:
        how = {"half": half, "checkpointing": checkpointing}
        return rank_memory(QWEN3_4B, TrainingSetup(ranks=count, tokens=size, **how))

    some, fewer, longer = (
        needed(ranks, tokens),
        needed(ranks + more, tokens),
        needed(ranks, 2 * tokens),
    )
    assert fewer.state < some.state
    assert some.total < longer.total
    assert some.state == -(-QWEN3_4B.parameters * 4 // ranks) * 4
    assert all(size >= 0 for size in some.parts.values())
    assert sum(some.parts.values()) == some.total


async def test_a_worker_reports_the_inputs_of_its_memory_prediction(stage: TrainingStage) -> None:
    trainer = await stage.trainer(trainer_forward_tokens=4096, trainer_memory_bytes=8 << 30)
    said = trainer.worker.heartbeat().trainer
    assert (said.device, said.memory_bytes, said.forward_tokens) == ("cpu", 8 << 30, 4096)
