"""Models and tokenizers that cannot be used: the error names the field and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.learning.learner import Learner
from services.trainer.learning.lora import adapter_of
from services.trainer.learning.model import (
    check_tokenizer,
    load_adapted,
    load_model,
    load_tokenizer,
    with_dtype,
)
from services.trainer.learning.optimizer import learning_rate
from tests.support.training import make_spec, save_tokenizer, tiny_config
from troupe.checkpoints.adapters import distinct_tensors
from troupe.job import JobSpec, LoraSpec, OptimizerSpec, PolicySpec
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
def test_a_missing_model_directory_is_refused_by_field(tokenizer: Path, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, path=path), 0)
    error = caught.value
    assert (error.kind, error.value) == ("model_not_found", path)
    assert error.field == "policies.solver.model.path"
    assert error.message == "there is no such directory"
    assert error.remedy


def test_an_unreachable_hub_id_is_refused_with_a_remedy(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, path="nobody/nothing"), 0)
    assert caught.value.kind == "model_not_found"
    assert "nobody/nothing" in str(caught.value)


def test_damaged_weights_are_refused(tokenizer: Path, tmp_path: Path) -> None:
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
def test_invalid_configurations_are_refused(tokenizer: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_model("solver", policy(tokenizer, config=config), 0)
    assert caught.value.kind == "model_config_invalid"
    assert caught.value.field == "policies.solver.model.config"


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_tokenizer("solver", policy(tmp_path / "nothing", config=tiny_config()))
    assert caught.value.kind == "tokenizer_not_found"
    assert caught.value.field == "policies.solver.model.tokenizer"
    assert caught.value.message == "there is no such directory"


def test_a_model_without_tokenizer_has_none(tokenizer: Path, tmp_path: Path) -> None:
    # transformers would invent one that encodes every text as no tokens.
    load_model("solver", policy(tokenizer, config=tiny_config()), 0).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="it has a model but no tokenizer"):
        load_tokenizer("solver", policy(tmp_path, path=str(tmp_path)))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
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


def test_learning_rates_follow_their_schedule() -> None:
    flat = OptimizerSpec(lr=1.0)
    assert [learning_rate(flat, k, 4) for k in range(4)] == [1.0] * 4
    warm = OptimizerSpec(lr=1.0, warmup_steps=2, schedule="linear", final_lr_fraction=0.5)
    rates = [learning_rate(warm, k, 5) for k in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.5])
    cosine = OptimizerSpec(lr=1.0, schedule="cosine", final_lr_fraction=0.0)
    rates = [learning_rate(cosine, k, 5) for k in range(5)]
    assert rates == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert learning_rate(cosine, 0, 1) == 1.0


def changed(folder: Path, **values: Any) -> None:
    """Change values in the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change tensors in the folder's checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# name: (tied, change of tensors, change of the configuration, message, remedy)
UNFIT: dict[
    str, tuple[bool, Callable[[dict[str, torch.Tensor]], Any], dict[str, Any], str, str]
] = {
    "no_output_layer": (
        True,
        lambda tensors: None,
        {"tie_word_embeddings": False},
        f"it lacks '{HEAD}', the output layer, and its config.json says that this is not the "
        "embedding",
        "tie_word_embeddings: true",
    ),
    "an_output_layer_of_its_own": (
        False,
        lambda tensors: None,
        {"tie_word_embeddings": True},
        f"its config.json says that the output layer is the embedding (tie_word_embeddings: true), "
        f"but it has '{HEAD}' with other values",
        "tie_word_embeddings: false",
    ),
    "one_missing": (True, lambda tensors: tensors.pop(UP), {}, f"it lacks tensor '{UP}'", "Save"),
    "no_embedding": (True, lambda tensors: tensors.pop(EMBEDDING), {}, f"'{EMBEDDING}'", "Save"),
    "a_layer_missing": (
        True,
        lambda tensors: [tensors.pop(n) for n in list(tensors) if ".layers.1." in n],
        {},
        "it lacks 11 tensors: 'model.layers.1.input_layernorm.weight', ",
        "Save",
    ),
    "fewer_layers_than_claimed": (
        True,
        lambda tensors: None,
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        "lacks",
        "",
    ),
    "more_layers_than_claimed": (
        True,
        lambda tensors: None,
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "the model has no 11 tensors: ",
        "Save",
    ),
    "a_value_head": (
        True,
        lambda tensors: tensors.update({"v_head.summary.weight": torch.zeros(1, 32)}),
        {},
        "the model has no tensor 'v_head.summary.weight'",
        "Save",
    ),
    "another_shape": (
        True,
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(5)}),
        {},
        "'model.norm.weight' is [5] and not [32]",
        "Save",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_that_does_not_fit_its_model_is_refused_by_name(
    tokenizer: Path, tmp_path: Path, kind: str, lora: bool
) -> None:
    tied, change, values, told, advised = UNFIT[kind]
    config = tiny_config(tie_word_embeddings=tied)
    load_model("solver", policy(tokenizer, config=config), 0).save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    changed(tmp_path, **values)
    spec = policy(tokenizer, path=str(tmp_path))
    load = load_model
    if lora:
        spec = spec.model_copy(update={"lora": LoraSpec(rank=2, alpha=4)})
        load = partial(load_adapted, device=torch.device("cpu"))
    with pytest.raises(InvalidArgument) as caught:
        load("solver", spec, 0)
    error = caught.value
    assert (error.kind, error.field) == ("model_mismatch", "policies.solver.model.path")
    assert error.value == str(tmp_path)
    assert told in error.message
    assert advised in (error.remedy or "")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["as_saved", "a_copy_of_the_tied", "other_name", "rotary"])
def test_equivalent_checkpoints_with_other_tensors_are_read(
    tokenizer: Path, tmp_path: Path, tied: bool, kind: str
) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    made = load_model("solver", policy(tokenizer, config=config), 0)
    made.save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kind == "a_copy_of_the_tied" and tied:
            tensors[HEAD] = tensors[EMBEDDING].clone()
        elif kind == "other_name" and tied:
            tensors[HEAD] = tensors.pop(EMBEDDING)
        elif kind == "rotary":  # older releases saved values that follow from the configuration
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewritten(tmp_path, change)
    read = load_model("solver", policy(tokenizer, path=str(tmp_path)), 0)
    assert checksum_of(distinct_tensors(read)) == checksum_of(distinct_tensors(made))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "qwen3_moe", "phi3", "gpt_neox"])
def test_checkpoints_of_save_pretrained_are_read_for_every_architecture(
    tokenizer: Path, tmp_path: Path, name: str
) -> None:
    sizes: dict[str, Any] = {
        "model_type": name,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    sizes |= {
        "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
        "qwen3_moe": {"num_experts": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 1},
        "phi3": {"pad_token_id": 0},
    }.get(name, {})
    made = load_model("solver", policy(tokenizer, config=sizes), 0)
    made.save_pretrained(tmp_path)
    read = load_model("solver", policy(tokenizer, path=str(tmp_path)), 0)
    assert checksum_of(distinct_tensors(read)) == checksum_of(distinct_tensors(made))


def test_an_adapter_that_does_not_fit_its_model_is_refused_by_name(
    tokenizer: Path, tmp_path: Path
) -> None:
    lora = LoraSpec(rank=2, alpha=4)
    spec = policy(tokenizer, config=tiny_config()).model_copy(update={"lora": lora})
    content = adapter_of(load_adapted("solver", spec, 0, torch.device("cpu"))).content(
        torch.float32
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(content.peft_config()))
    first, *_, last = sorted(content.tensors)
    for told, tensors in {
        f"it lacks tensor '{first}'": {n: t for n, t in content.tensors.items() if n != first},
        "the model has no tensor 'base_model.model.lm_head.lora_A.weight'": {
            **content.tensors,
            "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 32),
        },
        f"'{last}' is [2, 7] and not [2, 32]": {**content.tensors, last: torch.zeros(2, 7)},
    }.items():
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors"
        )
        begun = spec.model_copy(update={"lora": LoraSpec(rank=2, alpha=4, path=str(tmp_path))})
        with pytest.raises(InvalidArgument) as caught:
            load_adapted("solver", begun, 0, torch.device("cpu"))
        assert caught.value.kind == "adapter_unusable"
        if "[2, 7]" not in told:
            assert told in caught.value.message
        else:
            assert "is [2, 7] and not [" in caught.value.message


@pytest.mark.parametrize(
    ("own", "engine", "found"),
    [
        (torch.bfloat16, {"kind": "sglang"}, torch.bfloat16),
        (torch.float16, {"kind": "sglang"}, torch.bfloat16),
        (torch.float32, {"kind": "sglang"}, torch.float32),
        (torch.bfloat16, {}, torch.float32),
    ],
)
def test_weights_are_published_in_the_type_of_the_checkpoint(
    tokenizer: Path, tmp_path: Path, own: torch.dtype, engine: dict[str, Any], found: torch.dtype
) -> None:
    load_model("solver", policy(tokenizer, config=tiny_config()), 0).to(own).save_pretrained(
        tmp_path
    )
    spec = make_spec(tokenizer, model={"path": str(tmp_path), "tokenizer": str(tokenizer)})
    values = spec.model_dump()
    values["policies"]["solver"]["model"]["dtype"] = None
    values["policies"]["solver"]["engine"] = engine
    decided = with_dtype("solver", JobSpec.model_validate(values))
    learner = Learner(load_model("solver", decided.policies["solver"], 0), decided, "solver")
    assert {tensor.dtype for tensor in learner.published().values()} == {found}
    assert {tensor.dtype for tensor in learner.weights().values()} == {torch.float32}
