"""Supervised fine-tuning in the learner: cross-entropy of given tokens, with RL or alone."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.references import TRL, ReferenceUnavailable, reference_python
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.optimizer import learning_rate, learning_rates
from services.trainer.learning.samples import Row, parse_rows
from tests.support.training import make_rollout, make_spec
from tests.trainer.batches import random_rows, response_logprobs
from troupe.job import JobSpec
from troupe.v1 import experience_store_pb2 as store_pb


def learner_of(tokenizer: Path, *, double: bool = True, **sections: Any) -> Learner:
    spec = make_spec(tokenizer, **sections)
    model = load_model("solver", spec.policies["solver"], 0)
    return Learner(model.double() if double else model, spec, "solver", forward_tokens=80)


def given(rows: list[Row]) -> list[Row]:
    """Return the same rows as demonstrations."""
    return [
        replace(
            row,
            demonstration=True,
            reward=0.0,
            group_rewards=(0.0,),
            group=row.sample_id + row.trajectory,
            temperature=1.0,
            behaviour=np.zeros_like(row.behaviour),
        )
        for row in rows
    ]


def gradient(learner: Learner, rows: list[Row], cuts: list[int]) -> torch.Tensor:
    """Return the gradient of a step in micro-batches that begin at `cuts`."""
    learner.discard()
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        learner.accumulate(rows[start:stop])
    learner.complete()
    found = [p.grad for p in learner.model.parameters() if p.grad is not None]
    return torch.cat([one.flatten() for one in found]).clone()


def plain_gradient(model: Any, rows: list[Row]) -> tuple[torch.Tensor, float]:
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if row.response_length:
            total = total - response_logprobs(model, row)[0].sum()
    torch.autograd.backward(total)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found, float(total.detach()) / sum(row.response_length for row in rows)


ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"loss": "gspo", "correction": "sequence_masked", "entropy_coefficient": 0.1},
    {"advantage": "gae"},
    {
        "loss": "tests.support.own_algorithms:ppo",
        "advantage": "tests.support.own_algorithms:fading",
    },
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_is_cross_entropy_whatever_the_algorithm(
    tokenizer: Path, algorithm: dict[str, Any]
) -> None:
    learner = learner_of(tokenizer, algorithm=algorithm)
    rows = given(random_rows(learner.model, 3))
    expected, mean = plain_gradient(learner.model, rows)
    for cuts in ([], [2, 5]):
        found = gradient(learner, rows, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    outcome = learner.apply(0)
    assert outcome.applied, outcome.reason
    assert outcome.metrics["supervised/loss"] == pytest.approx(mean, rel=1e-5)
    assert outcome.metrics["samples"] == len(rows)
    assert not {"reward/mean", "k3_kl", "clip_fraction", "loss/policy"} & set(outcome.metrics)


def test_demonstrations_and_samples_in_one_step_add_up(tokenizer: Path) -> None:
    learner = learner_of(tokenizer)
    played, shown = random_rows(learner.model, 4), given(random_rows(learner.model, 5))
    apart = gradient(learner, played, []) + gradient(learner, shown, [])
    mixed = [row for pair in zip(played, shown, strict=False) for row in pair]
    mixed += [*played, *shown][:0] + played[len(shown) :] + shown[len(played) :]
    found = gradient(learner, mixed, [3])
    torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-6)
    metrics = learner.apply(0).metrics
    assert metrics["samples"] == len(mixed)
    assert {"supervised/loss", "reward/mean", "k3_kl"} <= set(metrics)


def test_the_flag_comes_from_the_store_and_survives_a_suspension(tokenizer: Path) -> None:
    sample = make_rollout("q0", "q0-s0-t0", prompt=[5, 6], response=[7, 8], logprobs=[0.0, 0.0])
    sample.demonstration = True
    (row,) = parse_rows([store_pb.ClaimedSample(sample=sample, group_rewards=[0.0])], 64)
    assert row.demonstration
    one = learner_of(tokenizer, pipeline={"steps": 9, "queries_per_step": 2, "deterministic": True})
    # Its group is not complete: it waits, and is suspended with the step.
    one.accumulate([replace(row, group_rewards=(0.0, 0.0))])
    tensors, values = one.suspended()
    two = learner_of(tokenizer, pipeline={"steps": 9, "queries_per_step": 2, "deterministic": True})
    two.adopt(tensors, values)
    for learner in (one, two):
        assert "supervised/loss" in learner.apply(0).metrics


def test_supervised_steps_have_their_own_schedule(tokenizer: Path) -> None:
    shown = {"tasks": {"source": "nowhere:rows"}, "steps": 4, "lr": 0.5}
    optimizer = {"lr": 0.1, "schedule": "linear", "final_lr_fraction": 0.0}
    learner = learner_of(tokenizer, supervised=shown, optimizer=optimizer)
    rows = given(random_rows(learner.model, 6))
    rates = []
    for version in (0, 3, 4, 9):
        learner.accumulate(rows)
        rates.append(learner.apply(version).metrics["lr"])
    spec = learner._policy.optimizer
    assert rates[:2] == [0.5, 0.0]
    assert rates[2:] == [learning_rate(spec, 0, 6), learning_rate(spec, 5, 6)]


def test_a_policy_without_rows_does_not_begin_with_the_rate_of_those_steps(
    tokenizer: Path,
) -> None:
    """It has made no version when reinforcement learning begins, and other policies have."""
    shown = {"tasks": {"source": "nowhere:rows"}, "steps": 4, "lr": 0.5}
    optimizer = {"lr": 0.1, "schedule": "linear", "final_lr_fraction": 0.0}
    spec = make_spec(tokenizer, supervised=shown, optimizer=optimizer)
    for version in (0, 4):
        rates = [learning_rates(spec, "solver", version, step)["lr"] for step in (3, 4, 9)]
        assert rates == [0.0, 0.1, 0.0]
    # Without such steps, a step that was skipped does not use up its rate.
    plain = make_spec(tokenizer, optimizer=optimizer)
    assert learning_rates(plain, "solver", 3, 5) == learning_rates(plain, "solver", 3, 3)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"steps": 11}, "supervised.steps"),
    ({"agent": "nobody"}, "supervised.agent"),
]


@pytest.mark.parametrize(("changes", "why"), WRONG)
def test_contradictory_supervised_settings_are_refused(
    tokenizer: Path, changes: dict[str, Any], why: str
) -> None:
    shown = {"tasks": {"source": "nowhere:rows"}, "steps": 4, **changes}
    with pytest.raises(ValueError, match=why):
        make_spec(tokenizer, supervised=shown)


def test_a_job_of_demonstrations_alone_needs_no_workflow(tokenizer: Path) -> None:
    shown = {"tasks": {"source": "nowhere:rows"}, "steps": 10}
    values = make_spec(tokenizer, supervised=shown).model_dump()
    values |= {"workflow": None, "tasks": None}
    assert JobSpec.model_validate(values).offline_only
    values["supervised"]["steps"] = 9
    with pytest.raises(ValueError, match="workflow: is missing"):
        JobSpec.model_validate(values)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_losses_equal_those_of_trl(tokenizer: Path, tmp_path: Path) -> None:
    """Six steps of AdamW: every loss to 1e-5, so that the updates are the same, too."""
    try:
        python = reference_python([TRL], tmp_path / "reference")
    except ReferenceUnavailable as error:
        pytest.skip(str(error))
    optimizer = {
        "lr": 1e-2,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    learner = learner_of(tokenizer, double=False, optimizer=optimizer)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(24):
        prompt, response = (
            rng.integers(64, size=3 + number % 5),
            rng.integers(64, size=1 + number % 7),
        )
        ids = np.concatenate([prompt, response]).astype(np.int64)
        zeros = np.zeros(len(response), np.float32)
        row = Row(f"s{number:02d}", ids, len(prompt), zeros, 0.0, (0.0,), 0, demonstration=True)
        rows.append(replace(row, group=row.sample_id))
    learner.model.save_pretrained(tmp_path / "model")
    for one in tokenizer.iterdir():
        (tmp_path / "model" / one.name).write_bytes(one.read_bytes())
    data = [
        {
            "input_ids": row.ids.tolist(),
            "labels": [-100] * row.prompt_length + row.ids[row.prompt_length :].tolist(),
        }
        for row in rows
    ]
    (tmp_path / "rows.json").write_text(json.dumps(data))
    script = Path(__file__).with_name("sft_reference.py")
    command = [python, script, tmp_path / "model", tmp_path / "rows.json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / "out.json").read_text())
    mine = []
    for step in range(6):
        learner.accumulate(rows[4 * step : 4 * step + 2])
        learner.accumulate(rows[4 * step + 2 : 4 * step + 4])
        mine.append(learner.apply(step).metrics["supervised/loss"])
    assert mine == pytest.approx(theirs, rel=1e-5)
