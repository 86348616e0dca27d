"""The embedded engine's computation on another device than the CPU. torch's `meta` device stands
for a GPU: operations check shapes, types and that their tensors are on one device, and compute
nothing. (Fake CUDA tensors cannot be indexed by a CPU build of torch.)"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from services.rollout.engines.embedded import engine as embedded
from services.rollout.engines.embedded.adapters import RowAdapter, RowSpan
from services.rollout.engines.embedded.attention import RaggedCache
from services.rollout.engines.embedded.batcher import SlotBatcher, default_room
from services.rollout.engines.embedded.cache import LEAST_TURNS, SlotRun
from services.rollout.engines.embedded.host import torch_device
from services.rollout.engines.embedded.sampling import draw
from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.requests import Draw, ScoreRequest
from services.rollout.engines.weights import adopt, skeleton
from tests.rollout.engines.models import CONFIG, VOCABULARY, make_model
from troupe.checkpoints.adapters import linear_layers
from troupe.v1 import common_pb2 as common_pb

GPU = torch.device("meta")
# What reading the numbers of a tensor there raises.
_NO_DATA = "meta tensor"
# Prompts of 5 and 9 tokens, and turns that draw: neighbours, and one apart from them.
RUNS = [
    SlotRun(0, 7, 1, 0),
    SlotRun(1, 3, 1, 1),
    SlotRun(4, 70, 1, 2),
    SlotRun(2, 0, 5, 3),
    SlotRun(3, 2, 9, 8),
]
TOKENS = sum(run.tokens for run in RUNS)
ROWS = [Draw(1.0, 0, 1.0, 3, 0), Draw(0.0, 0, 1.0, 4, 1), Draw(0.7, 5, 0.9, 5, 2)]


def on_gpu(dtype: str) -> PreTrainedModel:
    model = skeleton(AutoConfig.for_model(**CONFIG), dtype, "solver")
    return model.to(GPU)


def pass_of(batcher: SlotBatcher, size: int) -> torch.Tensor:
    """The logits of a pass; it is planned with real numbers."""
    batcher._cache.plan(RUNS, size)
    return batcher._logits([1] * size, [0, 1, 2])


def made(model: PreTrainedModel, context: int, *, deterministic: bool = False) -> SlotBatcher:
    return SlotBatcher(
        model,
        max_running=8,
        max_context=context,
        exited=lambda why: None,
        deterministic=deterministic,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [128, 1024])
def test_a_pass_over_slots_stays_on_the_gpu(dtype: str, context: int) -> None:
    batcher = made(on_gpu(dtype), context)
    logits = pass_of(batcher, TOKENS)
    assert logits.device.type == "meta"
    assert logits.shape == (3, VOCABULARY)
    assert all(one.device.type == "meta" for one in batcher._cache.keys)


def test_a_pass_of_one_shape_stays_on_the_gpu() -> None:
    batcher = made(on_gpu("float32"), 128, deterministic=True)
    logits = pass_of(batcher, TOKENS + 6)
    assert logits.device.type == "meta"


def test_tokens_are_drawn_where_the_logits_are() -> None:
    logits = torch.zeros(len(ROWS), VOCABULARY, dtype=torch.bfloat16, device=GPU)
    # What is left is to read the tokens, which fake ones do not have.
    with pytest.raises((NotImplementedError, RuntimeError), match=_NO_DATA):
        draw(logits, ROWS)


def test_continuations_are_scored_where_the_model_is() -> None:
    asked = [ScoreRequest((1, 2, 3), (4, 5)), ScoreRequest((1, 2), (3, 4, 5))]
    model = on_gpu("float32")
    with pytest.raises((NotImplementedError, RuntimeError), match=_NO_DATA):
        embedded.continuation_logprobs(model, asked, 0.7)


def test_published_weights_are_copied_to_the_gpu() -> None:
    published = dict(make_model(0).state_dict())
    model = on_gpu("float32")
    assert adopt(published, model, common_pb.WeightsRef(version=1)) == []
    assert {one.device.type for one in model.state_dict().values()} == {"meta"}


def test_an_adapter_on_the_gpu_is_computed_next_to_its_base() -> None:
    model = on_gpu("bfloat16")
    layers, _ = linear_layers(model, "all-linear")
    pairs = {
        name: (torch.zeros(inputs, 4, device=GPU), torch.zeros(4, outputs, device=GPU))
        for name, (inputs, outputs) in layers.items()
    }
    batcher = made(model, 128)
    batcher.adapt(layers)
    with batcher._adapted.passing([RowSpan(TOKENS - 3, RowAdapter(pairs, 2.0)), RowSpan(3, None)]):
        assert pass_of(batcher, TOKENS).device.type == "meta"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 40 GiB free, by what torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 << 30, 80 << 30))


def test_where_engines_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(EngineStartFailed, match="sees no GPU") as info:
        torch_device("cuda")
    assert info.value.field == "TROUPE_ROLLOUT_DEVICE"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch_device("auto") == torch.device("cuda", 0)
    assert torch_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("gpu")
def test_a_gpu_has_room_for_more_keys_and_values() -> None:
    wide = {**CONFIG, "hidden_size": 512, "head_dim": 64, "num_hidden_layers": 16}
    small = skeleton(AutoConfig.for_model(**wide), "bfloat16", "solver")
    large = skeleton(AutoConfig.for_model(**wide), "bfloat16", "solver").to(GPU)
    assert default_room(small, 64) == 2048
    assert default_room(large, 64) == 4096
    # All memory is committed at once: turns wait where it has no slots for them.
    counts = [
        RaggedCache(large.config, torch.bfloat16, running=64, max_context=context, device=GPU).count
        for context in (4096, 1 << 16, 1 << 20)
    ]
    assert counts == [4 * 64, 20, LEAST_TURNS]
