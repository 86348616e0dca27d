"""Defaults that depend on the checkpoint, and the README's own job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig
from typer.testing import CliRunner

from tests.support.readme import ROOT, readme_job
from troupe.client.cli.app import app
from troupe.job import ModelSpec, PolicySpec, parse_job
from troupe.job.compatibility import incompatible

SGLANG = {"kind": "sglang"}
PATH = {"path": "some/model"}
CONFIG = {"config": {"model_type": "qwen3"}, "tokenizer": "none"}


def configuration(**values: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model("qwen3", **values)
    return config


@pytest.mark.parametrize(
    ("model", "engine", "dtype"),
    [
        (PATH, SGLANG, "auto"),
        (PATH, {}, "float32"),
        (CONFIG, SGLANG, "float32"),
        ({**PATH, "dtype": "auto"}, {}, "auto"),
        ({**PATH, "dtype": "float32"}, SGLANG, "float32"),
        ({**PATH, "dtype": "bfloat16"}, {}, "bfloat16"),
    ],
)
def test_dtype_defaults_to_the_checkpoints_where_a_gpu_serves(
    model: dict[str, Any], engine: dict[str, Any], dtype: str
) -> None:
    policy = PolicySpec.model_validate({"model": model, "engine": engine})
    assert policy.language_model.dtype == dtype
    again = PolicySpec.model_validate_json(policy.model_dump_json())
    assert again == policy


@pytest.mark.parametrize(
    ("asked", "own", "found"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("auto", None, "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_a_model_is_resolved_by_its_configuration(asked: str, own: Any, found: str) -> None:
    model = ModelSpec.model_validate({"path": "some/model", "dtype": asked})
    assert model.resolved(configuration(dtype=own)).weight_dtype == found


def test_a_resumed_job_cannot_change_its_dtype_with_its_engines() -> None:
    text = readme_job()
    changed = text.replace("engine: {kind: sglang, python: ~/sglang/bin/python}", "engine: {}", 1)
    assert changed != text
    [found] = incompatible(parse_job(text), parse_job(changed), steps_done=0)
    assert found.path == "policies.big.model.dtype"
    kept = changed.replace("Qwen3-4B}", "Qwen3-4B, dtype: auto}")
    assert not incompatible(parse_job(text), parse_job(kept), steps_done=0)


def test_the_job_of_the_readme_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(readme_job())
    result = CliRunner().invoke(app, ["job", "validate", str(path)])
    assert result.exit_code == 0, result.output


def test_the_readmes_job_names_all_that_the_page_on_gpus_asks_for() -> None:
    """SGLang needs the interpreter of its own environment, and the README shows scores."""
    spec = parse_job(readme_job())
    page = (ROOT / "docs/gpus.md").read_text("utf-8")
    for policy in spec.policies.values():
        assert policy.engine.kind == "sglang"
        assert policy.engine.python is not None
        assert f"python: {policy.engine.python}" in page
    assert spec.evaluation.queries
