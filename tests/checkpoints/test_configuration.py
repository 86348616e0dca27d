"""Numbers in models' configurations that transformers takes and no model can work with."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from services.trainer.learning.model import load_model
from tests.support.tiny_team import make_model
from troupe.checkpoints.configuration import BadConfiguration, check_configuration, token_ids
from troupe.job import ModelSpec, PolicySpec
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.workflow.languages import load_language

HUGE = (10**12, 10**30, 1e308)
NOT_FINITE = (math.nan, math.inf, -math.inf)
NO_NUMBER = ("abc", True, {}, [None])
BAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings"),
        (*NOT_FINITE, *HUGE, *NO_NUMBER, 0, -1, 1.5),
    ),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), (*NOT_FINITE, 1e308, *NO_NUMBER, -1.0)),
    "rope_theta": (*NOT_FINITE, 10**30, 1e308, *NO_NUMBER, 0, -1, None),
    "attention_dropout": (*NOT_FINITE, *HUGE, *NO_NUMBER, -1, 1.5),
    "eos_token_id": (*NOT_FINITE, *HUGE, *NO_NUMBER, -1, 16, 1.5, [1, 10**12], ["x"]),
    "pad_token_id": (*NOT_FINITE, *HUGE, "abc", 1.5),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    make_model(folder)
    return folder


def changed(model: Path, tmp_path: Path, file: str, field: str, value: Any) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    config = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    section = config["rope_parameters"] if field == "rope_theta" else config
    section[field] = value
    (folder / file).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD.items() for value in values]
)
def test_a_number_that_no_model_can_have_is_refused_by_its_name(
    model: Path, tmp_path: Path, field: str, value: Any
) -> None:
    folder = str(changed(model, tmp_path, "config.json", field, value))
    with pytest.raises((InvalidArgument, FailedPrecondition), match=field) as caught:
        load_language(ModelSpec(path=folder), "policies.solver.model")
    assert caught.value.field == "policies.solver.model.path"
    assert caught.value.remedy
    if field != "eos_token_id":
        with pytest.raises(InvalidArgument, match=field) as caught:
            load_model("solver", PolicySpec(model=ModelSpec(path=folder)), 0)
        assert caught.value.field == "policies.solver.model.path"


@pytest.mark.parametrize("value", BAD["eos_token_id"])
def test_an_end_token_outside_the_vocabulary_is_refused(
    model: Path, tmp_path: Path, value: Any
) -> None:
    folder = changed(model, tmp_path, "generation_config.json", "eos_token_id", value)
    with pytest.raises(InvalidArgument, match=r"generation_config\.eos_token_id") as caught:
        load_language(ModelSpec(path=str(folder)), "model")
    assert "generation_config.json" in (caught.value.remedy or "")


@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_count_that_transformers_would_list_is_refused_before_it_does(
    model: Path, tmp_path: Path, name: str, inside: bool
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (config.setdefault("text_config", {}) if inside else config)[name] = 10**12
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"config": config, "tokenizer": str(model)}
    for source in (ModelSpec(path=str(folder)), ModelSpec.model_validate(tokenizer)):
        with pytest.raises(InvalidArgument, match=rf"{name} = 10+ is more than 100,000"):
            load_language(source, "policies.solver.model")
        with pytest.raises(InvalidArgument, match=rf"{name} = 10+ is more than 100,000"):
            load_model("solver", PolicySpec(model=source), 0)


@pytest.mark.parametrize("text", ["[]", "[1]", "5", '"x"', "null"])
def test_generation_settings_that_are_no_object_are_refused(
    model: Path, tmp_path: Path, text: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(InvalidArgument, match="generation_config") as caught:
        load_language(ModelSpec(path=str(folder)), "model")
    assert "generation_config.json" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    "usual",
    [
        *({"attention_dropout": 0.1}, {"sliding_window": None}, {"bos_token_id": -1}),
        *({"eos_token_id": [1, 2]}, {"pad_token_id": None}, {"head_dim": 64}),
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    ],
)
def test_usual_values_are_accepted(usual: dict[str, Any]) -> None:
    check_configuration(AutoConfig.for_model("qwen3", **usual))


def test_infinity_is_a_limit_of_mamba() -> None:
    check_configuration(AutoConfig.for_model("mamba2", time_step_limit=(0.0, math.inf)))
    with pytest.raises(BadConfiguration, match="initializer_range = nan"):
        check_configuration(AutoConfig.for_model("mamba2", initializer_range=math.nan))


def test_ids_are_tokens_of_the_vocabulary_if_that_is_known() -> None:
    assert token_ids("eos", None, 10) == ()
    assert token_ids("eos", 9, 10) == (9,)
    assert token_ids("eos", [1, 2], None) == (1, 2)
    with pytest.raises(BadConfiguration, match=r"eos = 10 is not a token id of 0 \.\. 9"):
        token_ids("eos", 10, 10)
