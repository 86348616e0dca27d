"""Gradients, steps, skipped steps, precision, the reference model."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import Row
from tests.support.training import VOCABULARY, make_spec, score
from troupe.algorithms.advantages import group_advantages


def make_rows(model: Any, count: int, seed: int, *, noise: float = 0.0) -> list[Row]:
    """Return `count` answers to a few prompts, scored by `model` (plus noise)."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(VOCABULARY, size=rng.integers(1, 9)) for _ in range(3)]
    rewards = rng.integers(0, 3, size=count).astype(float)
    rows = []
    for index in range(count):
        prompt = prompts[index % 3]
        ids = np.concatenate([prompt, rng.integers(VOCABULARY, size=rng.integers(1, 7))])
        behaviour = score(model, ids.tolist(), len(prompt))
        behaviour = behaviour + noise * rng.standard_normal(len(behaviour)).astype(np.float32)
        group = tuple(rewards[index % 3 :: 3].tolist())
        rows.append(Row(f"s{index:03}", ids, len(prompt), behaviour, rewards[index], group, 0))
    return rows


def make_learner(tokenizer: Path, *, algorithm: dict[str, Any] | None = None, **kw: Any) -> Learner:
    optimizer = kw.pop("optimizer", None)
    spec = make_spec(tokenizer, algorithm=algorithm or {}, optimizer=optimizer)
    model = load_model("solver", spec.policies["solver"], 0)
    return Learner(model, spec, "solver", **kw)


def gradient(learner: Learner) -> torch.Tensor:
    grads = [p.grad for p in learner.model.parameters()]
    return torch.cat([torch.empty(0), *(g.flatten() for g in grads if g is not None)])


@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 99),
    budget=st.sampled_from([8, 64, 4096]),
    share=st.booleans(),
    skip=st.booleans(),
    normalize=st.sampled_from(["token", "sequence"]),
)
def test_micro_batches_equal_one_plain_batch(
    tokenizer: Path,
    count: int,
    seed: int,
    budget: int,
    share: bool,
    skip: bool,
    normalize: str,
) -> None:
    """Any split, order and layout accumulates the gradient of the textbook loss."""
    learner = make_learner(
        tokenizer,
        algorithm={"normalize": normalize},
        forward_tokens=budget,
        share_prefixes=share,
        skip_zero_advantages=skip,
    )
    rows = make_rows(learner.model, count, seed, noise=0.3)
    advantages = group_advantages([r.reward for r in rows], [r.group_rewards for r in rows])

    total = torch.zeros(())
    tokens = sum(r.response_length for r in rows)
    for row, advantage in zip(rows, advantages.tolist(), strict=True):
        ids = torch.from_numpy(row.ids)
        logits = learner.model(ids[None]).logits[0, row.prompt_length - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[row.prompt_length :, None])[:, 0]
        ratio = torch.exp(logp - torch.from_numpy(row.behaviour))
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if normalize == "token":
            total = total + loss.sum() / tokens
        else:
            total = total + loss.mean() / len(rows)
    torch.autograd.backward(total)
    expected = gradient(learner)
    learner.discard()

    order = random.Random(seed).sample(rows, len(rows))
    while order:
        size = random.Random(seed + len(order)).randint(1, 5)
        learner.accumulate(order[:size])
        order = order[size:]
    found = gradient(learner) / (tokens if normalize == "token" else len(rows))
    if found.numel():  # else every advantage is zero
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    applied = learner.apply(0)
    assert applied.applied
    norm = expected.norm().item()
    assert applied.metrics["grad_norm"] == pytest.approx(norm, rel=1e-3, abs=1e-6)
    if not skip:
        assert applied.metrics["loss/policy"] == pytest.approx(total.item(), rel=1e-3, abs=1e-6)


def test_a_step_equals_adamws(tokenizer: Path) -> None:
    """Weights after two steps equal torch's AdamW on the clipped mean gradient."""
    optimizer = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.05}
    learner = make_learner(tokenizer, optimizer=optimizer, share_prefixes=False)
    spec = make_spec(tokenizer)
    plain = load_model("solver", spec.policies["solver"], 0)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim <= 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(2):
        rows = make_rows(plain, 9, step)
        advantages = group_advantages([r.reward for r in rows], [r.group_rewards for r in rows])
        loss = torch.zeros(())
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            ids = torch.from_numpy(row.ids)
            logits = plain(ids[None]).logits[0, row.prompt_length - 1 : -1]
            logp = torch.log_softmax(logits, -1).gather(1, ids[row.prompt_length :, None])
            loss = loss - advantage * logp.sum()
        adamw.zero_grad()
        torch.autograd.backward(loss / sum(r.response_length for r in rows))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        adamw.step()
        learner.accumulate(rows)
        assert learner.apply(step).metrics["grad_norm"] > 0.05
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(learner.weights()[name], parameter.data, rtol=1e-3, atol=2e-4)


def test_a_skipped_step_changes_nothing(tokenizer: Path) -> None:
    learner = make_learner(tokenizer)
    good = make_rows(learner.model, 6, 0)
    learner.accumulate(good)
    assert learner.apply(0).applied
    weights = {n: t.clone() for n, t in learner.weights().items()}
    moments = {n: t.clone() for n, t in learner.moments().items()}
    bad = make_rows(learner.model, 6, 1)
    bad[2].behaviour[0] = np.nan
    learner.accumulate(good[:3])
    learner.accumulate(bad)
    learner.accumulate(good[3:])
    skipped = learner.apply(1)
    assert not skipped.applied
    assert "s002" in skipped.reason
    assert skipped.metrics["samples"] == 12
    assert "grad_norm" not in skipped.metrics
    # An exploding ratio makes the gradient infinite although every input is finite.
    wild = make_rows(learner.model, 6, 2)
    for row in wild:
        row.behaviour[:] = -85.0
    with torch.no_grad():
        saved = learner.model.lm_head.weight.clone()
        learner.model.lm_head.weight.mul_(1e30)
    learner.accumulate(wild)
    assert not learner.apply(1).applied
    with torch.no_grad():
        learner.model.lm_head.weight.copy_(saved)
    assert all(torch.equal(t, weights[n]) for n, t in learner.weights().items())
    assert all(torch.equal(t, moments[n]) for n, t in learner.moments().items())
    learner.accumulate(good)
    assert learner.apply(1).applied


def test_a_step_that_overflows_weights_is_refused(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is finite; without the check engines would get the infinite weights."""
    learner = make_learner(tokenizer)
    learner.accumulate(make_rows(learner.model, 6, 0))
    assert learner.apply(0).applied
    weights = {n: t.clone() for n, t in learner.weights().items()}
    moments = {n: t.clone() for n, t in learner.moments().items()}
    with monkeypatch.context() as absurd:
        absurd.setattr("services.trainer.learning.optimizer.learning_rate", lambda *_: 1e30)
        learner.accumulate(make_rows(learner.model, 6, 1))
        refused = learner.apply(1)
    assert (refused.applied, refused.moved) == (False, True)
    assert refused.reason == "the norm of the weights is inf after the step"
    learner.restore(weights, moments)
    learner.accumulate(make_rows(learner.model, 6, 1))
    assert learner.apply(1).applied


def test_the_ratio_is_one_at_the_temperature_of_the_draw(tokenizer: Path) -> None:
    learner = make_learner(tokenizer)
    rows = []
    for row, temperature in zip(make_rows(learner.model, 4, 0), (0.5, 1.0, 0.7, 2.0), strict=True):
        ids = torch.from_numpy(row.ids)[None]
        with torch.no_grad():
            logits = learner.model(input_ids=ids).logits[0, row.prompt_length - 1 : -1]
        drawn = ids[0, row.prompt_length :, None]
        behaviour = torch.log_softmax(logits / temperature, -1).gather(1, drawn)[:, 0].numpy()
        group = (row.reward, row.reward + 1.0)
        rows.append(replace(row, behaviour=behaviour, temperature=temperature, group_rewards=group))
    learner.accumulate(rows)
    metrics = learner.apply(0).metrics
    assert metrics["importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_nothing_to_learn_is_a_step_of_size_zero(tokenizer: Path) -> None:
    learner = make_learner(tokenizer)
    before = {n: t.clone() for n, t in learner.weights().items()}
    rows = [
        Row(r.sample_id, r.ids, r.prompt_length, r.behaviour, 1.0, (1.0, 1.0), 0)
        for r in make_rows(learner.model, 4, 0)
    ]
    learner.accumulate(rows)
    applied = learner.apply(0)
    assert applied.applied
    assert applied.metrics["grad_norm"] == 0.0
    assert applied.metrics["advantage/zero_fraction"] == 1.0
    assert all(torch.equal(t, before[n]) for n, t in learner.weights().items())


def test_responses_without_tokens_make_no_step(tokenizer: Path) -> None:
    learner = make_learner(tokenizer)
    row = make_rows(learner.model, 1, 0)[0]
    empty = Row("x", row.ids[:3], 3, np.zeros(0, np.float32), 1.0, (1.0, 0.0), 0)
    learner.accumulate([empty])
    applied = learner.apply(0)
    assert (applied.applied, applied.reason) == (False, "no sample has a response token")


def test_the_divergence_is_measured_from_the_first_version(tokenizer: Path) -> None:
    algorithm = {"kl_coefficient": 10.0, "entropy_coefficient": 0.01}
    learner = make_learner(tokenizer, algorithm=algorithm)
    assert learner.needs_reference
    learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
    first = {n: t.clone() for n, t in learner.weights().items()}
    divergence = []
    for step in range(4):
        learner.accumulate(make_rows(learner.model, 12, step))
        divergence.append(learner.apply(step).metrics["kl"])
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert all(value > 0 for value in divergence[1:])
    free = make_learner(tokenizer)
    for step in range(4):
        free.accumulate(make_rows(free.model, 12, step))
        free.apply(step)

    def distance(learner: Learner) -> float:
        moved = [(t - first[n]).norm() for n, t in learner.weights().items()]
        return float(torch.stack(moved).sum())

    assert distance(learner) < distance(free)


def test_bfloat16_is_published_and_float32_is_stepped(tokenizer: Path) -> None:
    spec = make_spec(tokenizer, optimizer={"lr": 1e-6})
    values = spec.model_dump()
    values["policies"]["solver"]["model"]["dtype"] = "bfloat16"
    spec = type(spec).model_validate(values)
    learner = Learner(load_model("solver", spec.policies["solver"], 0), spec, "solver")
    before = {n: t.clone() for n, t in learner.weights().items()}
    rows = make_rows(learner.model, 8, 0)
    learner.accumulate(rows)
    applied = learner.apply(0)
    assert applied.metrics["k3_kl"] < 1e-2
    assert {t.dtype for t in learner.published().values()} == {torch.bfloat16}
    assert {t.dtype for t in learner.weights().values()} == {torch.float32}
    # A step far below bfloat16's resolution is not lost.
    assert any(not torch.equal(t, before[n]) for n, t in learner.weights().items())


def test_restore_is_bitwise(tokenizer: Path) -> None:
    one, two = make_learner(tokenizer), make_learner(tokenizer)
    for step in range(2):
        one.accumulate(make_rows(one.model, 6, step))
        one.apply(step)
    two.accumulate(make_rows(two.model, 6, 7))  # is forgotten
    copies = [{n: t.clone() for n, t in part.items()} for part in (one.weights(), one.moments())]
    two.restore(*copies)
    rows = make_rows(one.model, 6, 9)
    for learner in (one, two):
        learner.accumulate(rows)
        learner.apply(2)
    assert all(torch.equal(t, two.weights()[n]) for n, t in one.weights().items())


def test_a_stopped_step_ends_soon(tokenizer: Path) -> None:
    learner = make_learner(tokenizer)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        learner.accumulate(make_rows(learner.model, 6, 0), stop)
    learner.discard()


def _rae(tokenizer: Path) -> Learner:
    return make_learner(tokenizer, algorithm={"advantage": "rae", "rae_decay": 0.5})


def test_a_roles_baseline_comes_from_earlier_steps_and_moves_with_the_state(
    tokenizer: Path,
) -> None:
    one, two = _rae(tokenizer), _rae(tokenizer)
    rows = [replace(r, agent=f"a{i % 2}") for i, r in enumerate(make_rows(one.model, 6, 0))]
    one.accumulate(rows[:2])
    one.discard()  # leaves no trace
    for row in rows:
        one.accumulate([row])
    metrics = one.apply(0).metrics
    assert metrics["baseline/a0"] == metrics["baseline/a1"] == 0.0
    assert metrics["advantage/abs_mean"] == pytest.approx(sum(r.reward for r in rows) / 6)
    # 1 - 0.5^3 of the way from zero to the mean of three.
    expected = {
        agent: 0.875 * sum(r.reward for r in rows if r.agent == agent) / 3 for agent in ("a0", "a1")
    }
    state = {name: t.clone() for name, t in one.moments().items()}
    two.restore({n: t.clone() for n, t in one.weights().items()}, state)
    for learner in (one, two):
        learner.accumulate(rows)
        metrics = learner.apply(1).metrics
        assert metrics["baseline/a0"] == pytest.approx(expected["a0"])
        assert metrics["baseline/a1"] == pytest.approx(expected["a1"])
    assert all(torch.equal(t, two.moments()[n]) for n, t in one.moments().items())
    two.restore(two.weights(), {})
    assert not two.moments()


def test_a_skipped_step_moves_no_baseline(tokenizer: Path) -> None:
    learner = _rae(tokenizer)
    bad = make_rows(learner.model, 4, 1)
    bad[2].behaviour[0] = np.nan
    learner.accumulate(bad)
    assert not learner.apply(0).applied
    assert not learner.moments()


def test_rows_that_wait_for_the_whole_step_can_be_stopped(tokenizer: Path) -> None:
    spec = make_spec(
        tokenizer,
        algorithm={"advantage": "reinforce_plus_plus"},
        pipeline={"mode": "sync", "steps": 10, "queries_per_step": 2, "micro_batch_samples": 2},
    )
    learner = Learner(load_model("solver", spec.policies["solver"], 0), spec, "solver")
    rows = make_rows(learner.model, 6, 0)
    learner.accumulate(rows[:4])
    assert gradient(learner).numel() == 0
    learner.accumulate(rows[4:])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        learner.complete(stop)
    learner.discard()
    learner.accumulate(rows)
    learner.complete()
    assert gradient(learner).norm() > 0
    assert learner.apply(0).metrics["samples"] == 6
