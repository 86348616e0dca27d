"""Models and tokenizers that cannot be used: the error names the field and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.optimizer import learning_rate
from services.trainer.policy_model import check_tokenizer, load_model, load_tokenizer
from tests.support.training import make_spec, save_tokenizer, tiny_config
from troupe.job import OptimizerSpec, PolicySpec
from troupe.rpc import InvalidArgument
from troupe.transfer import checksum_of


def policy(tokenizer: Path, **model: Any) -> PolicySpec:
    source = {"tokenizer": str(tokenizer), **model}
    return make_spec(tokenizer, model=source).policies["solver"]


def test_random_weights_follow_seed_and_name(tokenizer: Path) -> None:
    spec = policy(tokenizer, config=tiny_config())
    state = torch.get_rng_state()

    def checksum(name: str, seed: int) -> str:
        return checksum_of(dict(load_model(name, spec, seed).named_parameters()))

    assert checksum("a", 1) == checksum("a", 1)
    assert len({checksum("a", 1), checksum("b", 1), checksum("a", 2)}) == 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./missing"])
def test_a_missing_directory(tokenizer: Path, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, path=path), 0)
    error = caught.value
    assert (error.kind, error.value) == ("model_not_found", path)
    assert error.field == "policies.solver.model.path"
    assert error.message == "there is no such directory"
    assert error.remedy


def test_an_unreachable_hub_id(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, path="nobody/nothing"), 0)
    assert caught.value.kind == "model_not_found"
    assert "nobody/nothing" in str(caught.value)


def test_damaged_weights(tokenizer: Path, tmp_path: Path) -> None:
    model = load_model("solver", policy(tokenizer, config=tiny_config()), 0)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, path=str(tmp_path)), 0)
    assert caught.value.kind == "model_unreadable"


@pytest.mark.parametrize(
    "config",
    [{"model_type": "no_such_type"}, {"hidden_size": 32}, tiny_config(num_attention_heads="two")],
)
def test_bad_configurations(tokenizer: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, config=config), 0)
    assert caught.value.kind == "model_config_invalid"
    assert caught.value.field == "policies.solver.model.config"


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_tokenizer("solver", policy(tmp_path / "nothing", config=tiny_config()))
    assert caught.value.kind == "tokenizer_not_found"
    assert caught.value.field == "policies.solver.model.tokenizer"
    assert caught.value.message == "there is no such directory"


def test_a_model_without_tokenizer_has_none(tokenizer: Path, tmp_path: Path) -> None:
    # transformers would make one up that encodes every text as nothing.
    load_model("solver", policy(tokenizer, config=tiny_config()), 0).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="there is a model, but no tokenizer"):
        load_tokenizer("solver", policy(tmp_path, path=str(tmp_path)))


def test_a_tokenizer_that_does_not_match(tmp_path: Path) -> None:
    large = save_tokenizer(tmp_path, size=80)
    spec = policy(large, config=tiny_config())
    model, tokenizer = load_model("solver", spec, 0), load_tokenizer("solver", spec)
    with pytest.raises(InvalidArgument) as caught:
        check_tokenizer("solver", spec, tokenizer, model)
    error = caught.value
    assert (error.kind, error.field) == (
        "tokenizer_mismatch",
        "policies.solver.model.tokenizer",
    )
    assert "64 embeddings" in error.message
    assert "79" in error.message


def test_learning_rates() -> None:
    flat = OptimizerSpec(lr=1.0)
    assert [learning_rate(flat, k, 4) for k in range(4)] == [1.0] * 4
    warm = OptimizerSpec(lr=1.0, warmup_steps=2, schedule="linear", final_lr_fraction=0.5)
    rates = [learning_rate(warm, k, 5) for k in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.5])
    cosine = OptimizerSpec(lr=1.0, schedule="cosine", final_lr_fraction=0.0)
    rates = [learning_rate(cosine, k, 5) for k in range(5)]
    assert rates == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert learning_rate(cosine, 0, 1) == 1.0
