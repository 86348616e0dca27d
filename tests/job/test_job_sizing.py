"""The shape of a model from its configuration, compared with the model itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts import sizing
from services.trainer.learning.model import shape_of_model
from tests.support.architectures import ARCHITECTURES, MIXTURE
from tests.support.training import make_spec
from troupe.job import JobSpec
from troupe.job.sections.policy import ModelSpec
from troupe.job.sizing import SOLD, read_shape, setup_of, shape_of_config
from troupe.scheduling.memory import TrainingSetup, rank_memory
from troupe.twin.costs import model_config

KINDS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
SMALL = ARCHITECTURES["qwen3"] | {"head_dim": 8}


def skeleton(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def variants() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind in KINDS:
        own = SMALL | {"model_type": kind}
        if kind in ("mixtral", "qwen3_moe"):
            own = own | {"num_local_experts": 4, "num_experts_per_tok": 2}
        found.append(own | {"tie_word_embeddings": True, "attention_bias": True})
        # A file that leaves everything but the number of layers to transformers' defaults.
        found.append({"model_type": kind, "num_hidden_layers": 1})
    found.append(SMALL | {"model_type": "llama", "mlp_bias": True})
    found.append(MIXTURE | {"mlp_only_layers": [0], "num_hidden_layers": 3})
    return found


@pytest.mark.parametrize("config", variants(), ids=lambda one: f"{one['model_type']}-{len(one)}")
def test_parameters_counted_from_a_configuration_equal_the_models(config: dict[str, Any]) -> None:
    """Total, embedding, output layer, largest layer and adaptable layers are equal."""
    counted, exact = shape_of_config(config), shape_of_model(skeleton(config))
    assert counted is not None
    for field in ("parameters", "embedding", "output", "layers", "layer", "hidden", "vocabulary"):
        assert getattr(counted, field) == getattr(exact, field), field
    for field in ("heads", "kv_heads", "head_dim", "intermediate", "experts", "active_experts"):
        assert getattr(counted, field) == getattr(exact, field), field
    assert counted.positions == exact.positions or "max_position_embeddings" not in config
    assert dict(counted.linears) == dict(exact.linears)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"qwen3_next", "qwen3_5_moe"}))
def test_every_architecture_has_a_shape(name: str) -> None:
    """Architectures without a rule are counted from the model's skeleton."""
    model = skeleton(ARCHITECTURES[name])
    shape = shape_of_model(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers * shape.layer <= shape.parameters * 2
    assert shape.vocabulary == 96


def test_a_configuration_is_read_from_the_models_directory_or_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own configuration, a directory, or the hub's cache; otherwise it is unknown."""
    inline = ModelSpec(config=SMALL, tokenizer="t")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMALL))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shape = read_shape(inline)
    assert shape is not None
    for source in (str(tmp_path), "some/model"):
        assert read_shape(ModelSpec(path=source)) == shape
    assert read_shape(ModelSpec(path="some/model", revision="abc")) == shape
    assert read_shape(ModelSpec(path="some/model", revision="other")) is None
    assert read_shape(ModelSpec(path="some/other")) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "qwen3", "hidden_size": "x"}'])
def test_an_invalid_configuration_has_no_shape(tmp_path: Path, text: str) -> None:
    """Files that are not a configuration are left to the trainer, which reports the fault."""
    (tmp_path / "config.json").write_text(text)
    assert read_shape(ModelSpec(path=str(tmp_path))) is None
    assert shape_of_config({"model_type": "qwen3", "num_attention_heads": 0}) is None


def test_the_setup_of_a_policy_follows_from_the_job() -> None:
    """Critic, reference, exact sums, adapter and gang come from the job."""
    shape = shape_of_config(SMALL)
    assert shape is not None
    plain = make_spec(Path("/nowhere"))
    setup = setup_of(plain, "solver", shape, device="cuda")
    assert (setup.ranks, setup.adapter, setup.reference, setup.critic) == (1, 0, False, False)
    values = plain.model_dump(mode="json")
    for wish, expected in ((True, (True, 0)), (1, (True, 1)), (9, (True, 0)), (False, (False, 0))):
        values["policies"]["solver"]["trainer"]["activation_checkpointing"] = wish
        own = setup_of(type(plain).model_validate(values), "solver", shape, device="cuda")
        assert (own.checkpointing, own.kept_layers) == expected
    values["algorithm"] |= {"advantage": "gae", "kl_coefficient": 0.1}
    values["policies"]["solver"]["lora"] = {"rank": 4, "target_modules": ["q_proj"]}
    rich = setup_of(type(plain).model_validate(values), "solver", shape, device="cuda")
    assert (rich.reference, rich.critic) == (True, True)
    assert rich.adapter == 4 * 2 * (32 + 32)


def test_memory_follows_how_long_sequences_are_cut() -> None:
    """Sequences longer than a pass keep keys and values; ranks that divide a pass hold parts."""
    shape = shape_of_config({**sizing.MODELS["Qwen3-4B"], "max_position_embeddings": 131_072})
    assert shape is not None
    plain = make_spec(Path("/nowhere")).model_dump(mode="json")
    solver = plain["policies"]["solver"]
    solver["engine"] |= {"kind": "sglang", "max_context": 65_536}
    solver["trainer"]["gang"] = 4
    solver["model"]["dtype"] = "bfloat16"

    def setup(**trainer: Any) -> TrainingSetup:
        solver["trainer"] |= trainer
        return setup_of(
            JobSpec.model_validate(plain), "solver", shape, device="cuda", memory=80_000_000_000
        )

    cut = setup(forward_tokens=8192)
    assert (cut.tokens, cut.slices, cut.history) == (8192, 1, 65_536 - 8192)
    divided = setup(context_parallel=4)
    assert (divided.tokens, divided.slices, divided.history) == (8192, 4, 65_536 - 4 * 8192)
    roomy = setup(forward_tokens=32_768)
    assert (roomy.tokens, roomy.history) == (32_768, 0)
    # 147 KB of keys and values a token, and their gradients in float32 (docs/training.md).
    each = (
        rank_memory(shape, cut).activations
        - rank_memory(shape, replace(cut, history=0)).activations
    )
    assert each == cut.history * (147_456 + 294_912)
    solver["lora"] = {"rank": 4, "dropout": 0.1}
    assert setup(forward_tokens=8192, context_parallel=1).tokens == 65_536, "dropout is not cut"


def test_the_sizing_page_shows_what_the_memory_model_computes() -> None:
    """docs/sizing.md equals the output of `python -m scripts.sizing`, for the models in it."""
    assert sizing.PAGE.read_text(encoding="utf-8") == sizing.page()
    assert sizing.TRAINING.read_text(encoding="utf-8") == sizing.training_page()
    sizes = {"0.6B": 0.596, "4B": 4.022, "8B": 8.191, "14B": 14.768, "32B": 32.762}
    sizes["30B-A3B"] = 30.532
    for name, config in sizing.MODELS.items():
        shape = shape_of_config(config)
        assert shape is not None
        # From the models' cards, in billions.
        assert shape.parameters / 1e9 == pytest.approx(sizes[name.removeprefix("Qwen3-")], abs=1e-3)


@pytest.mark.parametrize(
    ("model", "tokens", "ranks", "others", "checkpointed"),
    [
        ("Qwen3-0.6B", 4096, 1, 0, False),
        ("Qwen3-0.6B", 16_384, 1, 0, False),
        ("Qwen3-0.6B", 32_768, 1, 0, True),
        ("Qwen3-0.6B", 16_384, 1, 2, False),
        ("Qwen3-0.6B", 16_384, 1, 3, True),  # their states share the device
        ("Qwen3-4B", 2048, 1, 0, True),  # its state alone is 60 GiB
        ("Qwen3-4B", 16_384, 1, 0, True),
        ("Qwen3-4B", 4096, 2, 0, False),
        ("Qwen3-4B", 8192, 2, 0, True),
        ("Qwen3-14B", 2048, 1, 0, True),
        ("Qwen3-14B", 2048, 8, 0, False),
        ("Qwen3-14B", 4096, 8, 0, True),
    ],
)
def test_activations_are_kept_where_the_step_fits_with_them(
    model: str, tokens: int, ranks: int, others: int, checkpointed: bool
) -> None:
    """On a device of 80 GB, as its driver reports it; the job's own setting overrides."""
    memory = int(79.2 * (1 << 30))

    def setup(wish: bool | str, memory: int = memory, **changes: Any) -> TrainingSetup:
        trainer = {"forward_tokens": tokens, "gang": ranks, "activation_checkpointing": wish}
        source = {"config": model_config(model), "tokenizer": "/nowhere", "dtype": "bfloat16"}
        values = make_spec(Path("/nowhere"), model=source).model_dump(mode="json")
        policies = values["policies"]
        policies["solver"] |= {"trainer": trainer}
        policies["solver"]["engine"]["max_context"] = 1024
        for i in range(others):
            policies[f"other{i}"] = policies["solver"]
            values["agents"][f"other{i}"] = {"policy": f"other{i}"}
        values["pipeline"] |= changes
        spec = JobSpec.model_validate(values)
        shape = read_shape(spec.policies["solver"].language_model)
        assert shape is not None
        return setup_of(spec, "solver", shape, device="cuda", memory=memory)

    assert setup("auto").checkpointing is checkpointed
    assert setup("auto", memory=0).checkpointing  # unknown: the device's default
    for wish in (True, False):
        assert setup(wish).checkpointing is wish


@pytest.mark.parametrize(
    ("others", "lora", "checkpointed"),
    [(0, True, False), (3, True, False), (3, False, True)],
    ids=["alone", "adapters over one base", "of other bases"],
)
def test_the_base_that_adapters_share_counts_once_beside_a_step(
    others: int, lora: bool, checkpointed: bool
) -> None:
    source = {"config": model_config("Qwen3-8B"), "tokenizer": "/nowhere", "dtype": "bfloat16"}
    values = make_spec(Path("/nowhere"), model=source).model_dump(mode="json")
    policies = values["policies"]
    policies["solver"] |= {"lora": {"rank": 16}}
    policies["solver"]["trainer"]["forward_tokens"] = 2048
    policies["solver"]["engine"]["max_context"] = 1024
    for i in range(others):
        own = {"model": source if lora else source | {"path": "/other", "config": None}}
        policies[f"other{i}"] = policies["solver"] | own
        values["agents"][f"other{i}"] = {"policy": f"other{i}"}
    spec = JobSpec.model_validate(values)
    shape = read_shape(spec.policies["solver"].language_model)
    assert shape is not None
    setup = setup_of(spec, "solver", shape, device="cuda", memory=79 << 30)
    assert setup.checkpointing is checkpointed


@pytest.mark.parametrize(
    ("model", "gang", "hosts", "others", "shard", "replicas"),
    [
        ("Qwen3-8B", 16, 2, 0, "auto", 2),
        ("Qwen3-8B", 16, 2, 0, "gang", 1),
        ("Qwen3-8B", 8, 1, 0, "host", 1),
        ("Qwen3-8B", 16, 2, 3, "auto", 1),  # their states share the devices
        ("Qwen3-32B", 16, 2, 0, "auto", 1),  # 61 GiB of state on each of 8 devices
        ("Qwen3-32B", 16, 2, 0, "host", 2),
        ("Qwen3-0.6B", 4, 4, 0, "auto", 4),
    ],
)
def test_hosts_hold_all_weights_where_the_step_fits_with_them(
    model: str, gang: int, hosts: int, others: int, shard: str, replicas: int
) -> None:
    """On devices of 80 GB, whose memory must be known and not shared with engines."""

    def setup(memory: int = 79 << 30, **changes: Any) -> TrainingSetup:
        source = {"config": model_config(model), "tokenizer": "/nowhere", "dtype": "bfloat16"}
        values = make_spec(Path("/nowhere"), model=source).model_dump(mode="json")
        policies = values["policies"]
        policies["solver"]["trainer"] |= {"gang": gang, "shard": shard}
        policies["solver"]["engine"]["max_context"] = 1024
        for i in range(others):
            policies[f"other{i}"] = policies["solver"]
            values["agents"][f"other{i}"] = {"policy": f"other{i}"}
        values["pipeline"] |= changes
        spec = JobSpec.model_validate(values)
        shape = read_shape(spec.policies["solver"].language_model)
        assert shape is not None
        return setup_of(spec, "solver", shape, device="cuda", memory=memory, hosts=hosts)

    found = setup()
    assert (found.ranks, found.replicas) == (gang // replicas, replicas)
    if shard == "auto":
        assert setup(memory=0).replicas == 1
        assert setup(mode="sync", colocate=True).replicas == 1


@pytest.mark.parametrize(
    ("gang", "parallel", "shard", "replicas", "expert_ranks"),
    [
        (16, 16, "auto", 1, 16),  # a host's 8 ranks cannot divide by 16
        (16, 8, "auto", 2, 8),
        (12, "auto", "auto", 2, 2),  # 128 experts over a host's 6 ranks
        (12, "auto", "gang", 1, 4),
    ],
)
def test_hosts_hold_all_weights_only_where_their_ranks_can_divide_the_experts(
    gang: int, parallel: int | str, shard: str, replicas: int, expert_ranks: int
) -> None:
    source = {"config": model_config("Qwen3-30B-A3B"), "tokenizer": "/nowhere", "dtype": "bfloat16"}
    values = make_spec(Path("/nowhere"), model=source).model_dump(mode="json")
    values["policies"]["solver"]["trainer"] |= {
        "gang": gang,
        "expert_parallel": parallel,
        "shard": shard,
    }
    spec = JobSpec.model_validate(values)
    shape = read_shape(spec.policies["solver"].language_model)
    assert shape is not None
    found = setup_of(spec, "solver", shape, device="cuda", memory=1 << 40, hosts=2)
    assert (found.replicas, found.expert_ranks) == (replicas, expert_ranks)


def test_a_mixture_fits_with_divided_experts_where_it_does_not_with_gathered_ones() -> None:
    """All weights of Qwen3-30B-A3B on eight devices of 80 GB (docs/training.md)."""
    shape = shape_of_config(model_config("Qwen3-30B-A3B"))
    assert shape is not None
    gathered, divided = (
        rank_memory(shape, TrainingSetup(ranks=8, expert_ranks=n)).total / (1 << 30) for n in (1, 8)
    )
    assert (round(gathered, 1), round(divided, 1)) == (82.5, 76.7)
    assert divided < SOLD * 80 < gathered
