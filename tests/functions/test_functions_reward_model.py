"""The reward `reward_model`: scores of a real sequence classification model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from tests.support.tiny_team import make_model
from troupe.functions.library import reward_model as library
from troupe.functions.library.reward_model import RewardModelError, reward_model

ASKED = [{"role": "user", "content": "abc"}]


def save(directory: Path, outputs: int = 1) -> Path:
    """A random reward model with the tokenizer of the tiny team."""
    make_model(directory)
    torch.manual_seed(3)
    config = Qwen3Config.from_pretrained(directory)
    config.num_labels, config.initializer_range = outputs, 0.5
    Qwen3ForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("rm")))


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"agent": agent, "turn": n, "messages": ASKED, "response": text, "tokens": 1}
        for n, (agent, text) in enumerate(said)
    ]


def plain(path: str, text: str, last: int = 0) -> float:
    """The score, computed by hand."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    whole = [*ASKED, {"role": "assistant", "content": text}]
    shown = tokenizer.apply_chat_template(whole, tokenize=False)
    ids = tokenizer(shown, add_special_tokens=False)["input_ids"][-last:]
    net = Qwen3ForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        hidden = net.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return float(net.score(hidden)[0])


def test_the_reply_is_scored_after_what_was_asked(model: str) -> None:
    spoken = turns(("writer", "aaa"), ("critic", "bd"))
    found = reward_model({}, spoken, {}, model=model)
    assert found == pytest.approx(plain(model, "bd"), rel=1e-5)
    named = reward_model({}, spoken, {}, model=model, agent="writer", weight=-2.0)
    assert isinstance(named, dict)
    assert list(named) == ["writer"]
    assert named["writer"] == pytest.approx(-2 * plain(model, "aaa"), rel=1e-5)
    squashed = reward_model({}, spoken, {}, model=model, squash=True)
    assert squashed == pytest.approx(1 / (1 + math.exp(-plain(model, "bd"))), rel=1e-5)
    short = reward_model({}, spoken, {}, model=model, max_tokens=3)
    assert short == pytest.approx(plain(model, "bd", 3), rel=1e-5)
    assert short != pytest.approx(found, rel=1e-3)


def test_a_reward_model_is_loaded_once(model: str) -> None:
    library.scorer.cache_clear()
    for text in ("a", "b", "c"):
        reward_model({}, turns(("writer", text)), {}, model=model)
    assert library.scorer.cache_info().misses == 1


def test_a_reward_model_that_cannot_score_says_why(model: str, tmp_path: Path) -> None:
    def refused(kind: str, path: str, agent: str = "") -> str:
        with pytest.raises(RewardModelError) as error:
            reward_model({}, turns(("writer", "a")), {}, model=path, agent=agent)
        assert error.value.kind == kind
        return str(error.value)

    assert "nowhere" in refused("no_model", str(tmp_path / "nowhere"))
    assert "has 3 outputs" in refused("wrong_head", str(save(tmp_path / "three", 3)))
    assert "'judge' has no reply" in refused("no_reply", model, "judge")
    bare = save(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    assert "chat template" in refused("no_template", str(bare))
