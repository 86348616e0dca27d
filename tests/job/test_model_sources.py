"""Valid and invalid contents of a model's section."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.job import ModelSpec, no_directory


@pytest.mark.parametrize("source", ["/no/such", "./no_such", "~/no_such_troupe", "a/b/c"])
def test_a_path_that_can_only_be_local_is_not_looked_up_on_the_hub(source: str) -> None:
    assert no_directory(source)


def test_hub_ids_and_existing_directories_are_not_reported_missing(tmp_path: Path) -> None:
    assert not no_directory("Qwen/Qwen3-0.6B")
    assert not no_directory("gpt2")
    assert not no_directory(str(tmp_path))


def test_a_file_is_not_taken_for_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").touch()
    assert no_directory("model.safetensors")


def test_arguments_reserved_for_troupe_are_refused_in_a_model() -> None:
    given = {"path": "Qwen/Qwen3-0.6B", "chat_template_kwargs": {"enable_thinking": False}}
    assert ModelSpec.model_validate(given).chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match="cannot set `tools`"):
        ModelSpec.model_validate({**given, "chat_template_kwargs": {"tools": []}})
