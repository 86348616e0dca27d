"""Joint pairs of several policies: trainers that exchange sums learn what one trainer would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.experience_store.claims import added_up
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from tests.support.training import VOCABULARY, make_spec
from tests.trainer.batches import response_logprobs
from tests.trainer.learning.test_preferences import LOSSES, TASKS, Loss, moved
from troupe.job import JobSpec
from troupe.v1 import experience_store_pb2 as store_pb

POLICIES = ("checker", "writer")
BETA = 0.4


def spec_of(tokenizer: Path, loss: Loss = "dpo", **sections: Any) -> JobSpec:
    pairs = {"tasks": TASKS, "steps": 10, "loss": loss, "beta": BETA, "joint": True}
    return make_spec(tokenizer, policies=POLICIES, **{"preferences": pairs, **sections})


def learner_of(spec: JobSpec, policy: str) -> Learner:
    """Return the learner of a policy, with weights of its own, in float64."""
    model = load_model(policy, spec.policies[policy], POLICIES.index(policy))
    return Learner(model.double(), spec, policy, forward_tokens=80)


def rows_of(seed: int, teams: Sequence[Sequence[str]]) -> dict[str, list[Row]]:
    """Return the replies of each policy to joint pairs, one pair for each of `teams`."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[Row]] = {policy: [] for policy in POLICIES}
    for number, team in enumerate(teams):
        turn = 0
        for policy in team:
            prompt = rng.integers(VOCABULARY, size=rng.integers(1, 7))
            for reward in (1.0, 0.0):
                response = rng.integers(VOCABULARY, size=rng.integers(1, 9))
                row = Row(
                    sample_id=f"q{number:02d}_{turn}_t{number:02d}",
                    ids=np.concatenate([prompt, response]).astype(np.int64),
                    prompt_length=len(prompt),
                    behaviour=np.zeros(len(response), np.float32),
                    reward=reward,
                    group_rewards=(0.0, 1.0),
                    version=0,
                    group=f"q{number:02d}\tq{number:02d}/*/pair",
                    agent=policy,
                    trajectory=f"t{number:02d}",
                    turn=turn,
                    demonstration=True,
                    preference=True,
                    joint_policies=len(team),
                )
                found[policy].append(row)
                turn += 1
    return found


def joint_loss(
    models: Mapping[str, Any],
    references: Mapping[str, Any],
    rows: Mapping[str, Sequence[Row]],
    loss: Loss,
) -> torch.Tensor:
    """Return the mean loss of all pairs, differentiable in the weights of all models."""
    losses = []
    for pair in sorted({row.group for some in rows.values() for row in some}):
        sides = []
        for reward in (1.0, 0.0):
            ratio, tokens = torch.zeros((), dtype=torch.float64), 0
            for policy, some in rows.items():
                for row in some:
                    if (row.group, row.reward) == (pair, reward):
                        before = response_logprobs(references[policy], row)[0].sum().detach()
                        ratio = ratio + response_logprobs(models[policy], row)[0].sum() - before
                        tokens += row.response_length
            sides.append(ratio / tokens if loss == "ipo" else ratio)
        margin = sides[0] - sides[1]
        if loss == "ipo":
            losses.append((margin - 1 / (2 * BETA)).square())
        else:
            losses.append(-torch.nn.functional.logsigmoid(BETA * margin))
    return torch.stack(losses).mean()


def exchange(learners: Mapping[str, Learner]) -> store_pb.PairSums:
    """Exchange the sums as trainers do by the store."""
    given = [learners[policy].pair_sums().SerializeToString() for policy in sorted(learners)]
    sums = added_up(given)
    for learner in learners.values():
        learner.join_pairs(sums)
    return sums


def gradient(learner: Learner) -> torch.Tensor:
    learner.complete()
    found = [p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]
    return torch.cat(found) / learner._step.sums.normalizer


TEAMS = [POLICIES, POLICIES, ("writer",), POLICIES, ("checker",)]


@pytest.mark.parametrize("loss", LOSSES)
def test_policies_apart_have_the_gradient_of_one_loss_over_both_models(
    tokenizer: Path, loss: Loss
) -> None:
    spec = spec_of(tokenizer, loss)
    learners = {policy: learner_of(spec, policy) for policy in POLICIES}
    references = {policy: moved(learner) for policy, learner in learners.items()}
    rows = rows_of(0, TEAMS)
    mean = joint_loss({p: one.model for p, one in learners.items()}, references, rows, loss)
    torch.autograd.backward(mean)
    expected = {}
    for policy, learner in learners.items():
        named = [p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]
        expected[policy] = torch.cat(named)
        learner.model.zero_grad()
    # Also cut between the sides of a pair.
    for cuts in ([], [1, 4], [3]):
        for policy, learner in learners.items():
            learner.discard()
            for start, stop in zip([0, *cuts], [*cuts, len(rows[policy])], strict=True):
                learner.accumulate(rows[policy][start:stop])
        sums = exchange(learners)
        assert len(sums.pairs) == len(TEAMS)
        for policy, learner in learners.items():
            torch.testing.assert_close(gradient(learner), expected[policy], rtol=1e-5, atol=1e-7)
    for policy, learner in learners.items():
        outcome = learner.apply(0)
        assert outcome.applied, outcome.reason
        assert outcome.metrics["grad_norm"] == pytest.approx(float(expected[policy].norm()))
        assert outcome.metrics["samples"] == len(rows[policy])


def test_metrics_are_those_of_the_joint_margin(tokenizer: Path) -> None:
    spec = spec_of(tokenizer)
    learners = {policy: learner_of(spec, policy) for policy in POLICIES}
    references = {policy: moved(learner) for policy, learner in learners.items()}
    rows = rows_of(1, [POLICIES] * 4)
    models = {policy: learner.model for policy, learner in learners.items()}
    mean = joint_loss(models, references, rows, "dpo").item()
    for policy, learner in learners.items():
        learner.accumulate(rows[policy])
    exchange(learners)
    found = [learner.apply(0).metrics for learner in learners.values()]
    for one in found:
        assert one["preference/loss"] == pytest.approx(mean, rel=1e-6)
    names = ("loss", "accuracy", "chosen_reward", "rejected_reward", "margin")
    for name in names:
        assert found[0][f"preference/{name}"] == found[1][f"preference/{name}"]


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_apart_equal_the_steps_of_one_optimizer_over_both_models(
    tokenizer: Path, loss: Loss
) -> None:
    """Three steps of AdamW: each computes its margins under its own weights."""
    optimizer = {"lr": 1e-3, "eps": 1e-4, "schedule": "constant", "max_grad_norm": 1e9}
    spec = spec_of(tokenizer, loss, optimizer=optimizer)
    learners = {policy: learner_of(spec, policy) for policy in POLICIES}
    references = {policy: moved(learner) for policy, learner in learners.items()}
    plain = {policy: learner_of(spec, policy).model for policy in POLICIES}
    for policy, model in plain.items():
        model.load_state_dict(learners[policy].model.state_dict())
    own = spec.policies["writer"].optimizer
    updates = torch.optim.AdamW(
        [p for model in plain.values() for p in model.parameters()],
        lr=own.lr,
        betas=own.betas,
        eps=own.eps,
        weight_decay=own.weight_decay,
    )
    for version in range(3):
        rows = rows_of(version, TEAMS)
        updates.zero_grad()
        torch.autograd.backward(joint_loss(plain, references, rows, loss))
        updates.step()
        for policy, learner in learners.items():
            learner.accumulate(rows[policy][:3])
            learner.accumulate(rows[policy][3:])
        exchange(learners)
        for learner in learners.values():
            assert learner.apply(version).applied
    for policy, model in plain.items():
        for name, tensor in model.state_dict().items():
            mine = learners[policy].model.state_dict()[name]
            torch.testing.assert_close(mine, tensor, rtol=1e-5, atol=1e-7)


def test_deterministic_weights_do_not_depend_on_the_cuts(tokenizer: Path) -> None:
    pipeline = {"steps": 10, "queries_per_step": 2, "deterministic": True}
    spec = spec_of(tokenizer, pipeline=pipeline)
    rows = rows_of(2, TEAMS)
    found = []
    for cut in (1, 4, 100):
        learners = {}
        for policy in POLICIES:
            learner = Learner(
                load_model(policy, spec.policies[policy], 3), spec, policy, forward_tokens=80
            )
            moved(learner, 0.02)
            some = rows[policy] if cut > 1 else rows[policy][::-1]
            for start in range(0, len(some), 2 * cut):
                learner.accumulate(some[start : start + 2 * cut])
            learners[policy] = learner
        exchange(learners)
        for learner in learners.values():
            assert learner.apply(0).applied
        weights = [one.weights() for one in learners.values()]
        found.append([{name: t.clone() for name, t in some.items()} for some in weights])
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_a_pair_that_one_policy_lacks_is_learned_by_none(tokenizer: Path) -> None:
    spec = spec_of(tokenizer)
    learners = {policy: learner_of(spec, policy) for policy in POLICIES}
    for learner in learners.values():
        moved(learner)
    rows, found = rows_of(3, [POLICIES] * 3), []
    for lacking in (1, 2, 0):
        for policy, learner in learners.items():
            learner.discard()
            some = rows[policy]
            if lacking == 0:
                some = some[:4]  # the third pair is not there at all
            elif policy == "writer":
                some = some[: 6 - lacking]  # one side, or both
            learner.accumulate(some)
        sums = exchange(learners)
        assert [one.policies for one in sums.pairs][:2] == [2, 2]
        found.append([gradient(learner).clone() for learner in learners.values()])
        assert all(learner._step.sums.normalizer == 2 for learner in learners.values())
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-10)


def test_a_step_suspended_before_the_exchange_goes_on_elsewhere(tokenizer: Path) -> None:
    spec = spec_of(tokenizer)
    learners = {policy: learner_of(spec, policy) for policy in POLICIES}
    for learner in learners.values():
        moved(learner)
    rows = rows_of(4, TEAMS)
    for policy, learner in learners.items():
        learner.accumulate(rows[policy])
    tensors, values = learners["writer"].suspended()
    other = learner_of(spec, "writer")
    reference = {n: t.clone() for n, t in learner_of(spec, "writer").weights().items()}
    other.set_reference(reference)
    other.adopt({n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(values)))
    assert other.pair_sums() == learners["writer"].pair_sums()
    sums = exchange(learners)
    other.join_pairs(sums)
    found = [learner.apply(0).metrics for learner in (learners["writer"], other)]
    for name in ("preference/loss", "preference/margin", "grad_norm", "samples"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-9)


def test_a_margin_that_is_not_finite_skips_the_step_of_every_policy(tokenizer: Path) -> None:
    spec = spec_of(tokenizer)
    learners = {policy: learner_of(spec, policy) for policy in POLICIES}
    for learner in learners.values():
        moved(learner)
    with torch.no_grad():
        next(learners["writer"].model.parameters()).fill_(float("nan"))
    rows = rows_of(5, [POLICIES] * 2)
    for policy, learner in learners.items():
        learner.accumulate(rows[policy])
    exchange(learners)
    for learner in learners.values():
        outcome = learner.apply(0)
        assert not outcome.applied
        assert "pair of preferences is not finite" in outcome.reason


@pytest.mark.parametrize("field", ["epochs", "minibatches"])
def test_several_updates_per_step_are_refused(tokenizer: Path, field: str) -> None:
    pipeline = {"mode": "sync", "steps": 10, "queries_per_step": 2}
    with pytest.raises(ValueError, match=f"algorithm.{field}: not with `preferences`"):
        spec_of(tokenizer, pipeline=pipeline, algorithm={field: 2})


def test_a_simulated_policy_is_refused(tokenizer: Path) -> None:
    values = spec_of(tokenizer).model_dump()
    values["policies"]["writer"]["simulated"] = {"step_seconds": 0.0}
    with pytest.raises(ValueError, match=r"policies\.writer\.simulated: not with"):
        JobSpec.model_validate(values)
