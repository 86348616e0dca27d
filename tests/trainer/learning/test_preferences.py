"""Preferences in the learner: losses of pairs, however they are divided and repeated."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.references import TRL, ReferenceUnavailable, reference_python
from services.trainer.learning.learner import Learner
from services.trainer.learning.lora import adapter_of
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.samples import Row, parse_rows
from tests.support.training import VOCABULARY, make_rollout, make_spec
from tests.trainer.batches import random_rows, response_logprobs
from troupe.algorithms.losses import SideSums, preference_weights
from troupe.job import JobSpec
from troupe.v1 import experience_store_pb2 as store_pb

Loss = Literal["dpo", "ipo"]
LOSSES: list[Loss] = ["dpo", "ipo"]
TASKS = {"source": "nowhere:rows"}


def spec_of(tokenizer: Path, loss: Loss = "dpo", **sections: Any) -> JobSpec:
    pairs = {"tasks": TASKS, "steps": 10, "loss": loss, "beta": 0.4}
    return make_spec(tokenizer, **{"preferences": pairs, **sections})


def learner_of(spec: JobSpec, *, double: bool = True) -> Learner:
    model = load_model("solver", spec.policies["solver"], 0)
    return Learner(model.double() if double else model, spec, "solver", forward_tokens=80)


def pairs_of(seed: int, count: int = 5, *, several: bool = False) -> list[Row]:
    """Return pairs, chosen before rejected; with `several` a chosen side may have two replies."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(count):
        prompt = rng.integers(VOCABULARY, size=rng.integers(1, 7))
        sides = [1.0, 0.0] if not several or number % 2 else [1.0, 1.0, 0.0]
        for turn, reward in enumerate(sides):
            response = rng.integers(VOCABULARY, size=rng.integers(1, 9))
            rows.append(
                Row(
                    sample_id=f"q{number:02d}_{turn}_t{number:02d}",
                    ids=np.concatenate([prompt, response]).astype(np.int64),
                    prompt_length=len(prompt),
                    behaviour=np.zeros(len(response), np.float32),
                    reward=reward,
                    group_rewards=tuple(sorted(sides)),
                    version=0,
                    group=f"pair{number}",
                    trajectory=f"t{number:02d}",
                    turn=turn,
                    demonstration=True,
                    preference=True,
                )
            )
    return rows


def plain(model: Any, reference: Any, rows: Sequence[Row], loss: Loss, beta: float) -> torch.Tensor:
    """Return the mean loss of all pairs as in the papers, differentiable."""
    losses = []
    for group in dict.fromkeys(row.group for row in rows):
        means = []
        for reward in (1.0, 0.0):
            side = [row for row in rows if (row.group, row.reward) == (group, reward)]
            ratio = sum(
                response_logprobs(model, row)[0].sum()
                - response_logprobs(reference, row)[0].sum().detach()
                for row in side
            )
            tokens = sum(row.response_length for row in side)
            means.append(ratio / tokens if loss == "ipo" else ratio)
        margin = torch.as_tensor(means[0] - means[1])
        if loss == "ipo":
            losses.append((margin - 1 / (2 * beta)).square())
        else:
            losses.append(-torch.nn.functional.logsigmoid(beta * margin))
    return torch.stack(losses).mean()


def moved(learner: Learner, by: float = 0.1) -> Any:
    """A copy of the model, which becomes the learner's reference; the learner's then moves on."""
    reference = copy.deepcopy(learner.model)
    learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return reference


def gradient(learner: Learner, rows: Sequence[Row], cuts: Sequence[int]) -> torch.Tensor:
    """Return the gradient of the mean loss."""
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        learner.accumulate(rows[start:stop])
    learner.complete()
    count = learner._step.sums.normalizer
    found = [p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]
    return torch.cat(found) / count


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_and_loss_equal_those_of_the_papers(
    tokenizer: Path, loss: Loss, deterministic: bool
) -> None:
    pipeline = {"steps": 10, "queries_per_step": 2, "deterministic": deterministic}
    learner = learner_of(spec_of(tokenizer, loss, pipeline=pipeline))
    reference, rows = moved(learner), pairs_of(0, several=True)
    mean = plain(learner.model, reference, rows, loss, 0.4)
    torch.autograd.backward(mean)
    named = [p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]
    expected = torch.cat(named)
    learner.model.zero_grad()
    shuffled = [rows[i] for i in np.random.default_rng(3).permutation(len(rows))]
    # Also cut between the sides of a pair.
    for some, cuts in ((rows, []), (rows, [1, 2, 6]), (shuffled, [4])):
        learner.discard()
        if deterministic:  # whose gradient is assembled when the step is made
            for row in some:
                learner.accumulate([row])
            assert learner._step.sums.groups.waiting == []
            continue
        found = gradient(learner, some, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    outcome = learner.apply(0)
    assert outcome.applied, outcome.reason
    assert outcome.metrics["preference/loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert outcome.metrics["samples"] == len(rows)
    assert outcome.metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert not {"reward/mean", "k3_kl", "supervised/loss", "loss/policy"} & set(outcome.metrics)


def test_the_weights_of_a_step_do_not_depend_on_its_cuts(tokenizer: Path) -> None:
    pipeline = {"steps": 10, "queries_per_step": 2, "deterministic": True}
    found = []
    for cut in (1, 3, 4, 11):
        learner = learner_of(spec_of(tokenizer, pipeline=pipeline), double=False)
        moved(learner, 0.02)
        rows = pairs_of(0, several=True)
        for start in range(0, len(rows), cut):
            learner.accumulate(rows[start : start + cut])
        assert learner.apply(0).applied
        found.append({name: t.clone() for name, t in learner.weights().items()})
    assert all(torch.equal(t, other[n]) for other in found[1:] for n, t in found[0].items())


@pytest.mark.parametrize("loss", LOSSES)
def test_an_adapter_learns_from_its_base(tokenizer: Path, loss: Loss) -> None:
    values = spec_of(tokenizer, loss).model_dump(mode="json")
    values["policies"]["solver"]["lora"] = {"rank": 4, "alpha": 8, "dropout": 0.1}
    spec = JobSpec.model_validate(values)
    model = load_adapted("solver", spec.policies["solver"], 0, torch.device("cpu"))
    adapter = adapter_of(model)
    assert adapter is not None
    learner = Learner(model, spec, "solver")
    learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
    rows, losses, found = pairs_of(2), [], {}
    for version in range(8):
        learner.accumulate(rows)
        found = learner.apply(version).metrics
        losses.append(found["preference/loss"])
    # At first policy and reference are equal, and every preference is a coin toss.
    assert losses[0] == pytest.approx(np.log(2) if loss == "dpo" else 1 / 0.8**2, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert found["preference/accuracy"] == 1
    assert found["preference/margin"] == pytest.approx(
        found["preference/chosen_reward"] - found["preference/rejected_reward"], rel=1e-6
    )


def test_a_side_that_waits_for_the_other_is_suspended_with_its_step(tokenizer: Path) -> None:
    rows = pairs_of(4, 2)
    one, two = (learner_of(spec_of(tokenizer)) for _ in range(2))
    moved(one)
    two.set_reference({n: t.clone() for n, t in two.weights().items()})
    one.accumulate(rows[:3])
    assert [row.sample_id for row in one._step.sums.groups.waiting] == [rows[2].sample_id]
    tensors, values = one.suspended()
    two.adopt({n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(values)))
    found = []
    for learner in (one, two):
        learner.accumulate(rows[3:])
        found.append(learner.apply(0).metrics)
    for name in ("preference/loss", "grad_norm", "preference/chosen_reward"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-6)
    assert found[0]["samples"] == 4


def test_a_reply_without_the_other_side_changes_nothing(tokenizer: Path) -> None:
    learner = learner_of(spec_of(tokenizer))
    moved(learner)
    rows = pairs_of(5, 3)
    whole = gradient(learner, rows[:4], [])
    learner.discard()
    torch.testing.assert_close(gradient(learner, rows[:5], [2]), whole, rtol=1e-6, atol=1e-9)
    metrics = learner.apply(0).metrics
    assert metrics["samples"] == 5


def test_every_update_of_a_step_computes_its_own_margins(tokenizer: Path) -> None:
    pipeline = {"mode": "sync", "steps": 10, "queries_per_step": 2}
    optimizer = {"schedule": "constant", "lr": 1e-3}
    several = learner_of(
        spec_of(tokenizer, pipeline=pipeline, algorithm={"epochs": 3}, optimizer=optimizer)
    )
    single = learner_of(spec_of(tokenizer, pipeline=pipeline, optimizer=optimizer))
    rows = pairs_of(6)
    for learner in (several, single):
        learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
    several.accumulate(rows)
    assert several.apply(0).metrics["train/updates"] == 3
    for version in range(3):
        single.accumulate(rows)
        single.apply(version)
    for name, tensor in several.weights().items():
        torch.testing.assert_close(tensor, single.weights()[name], rtol=1e-6, atol=1e-8)


def test_reinforcement_learning_goes_on_without_the_reference(tokenizer: Path) -> None:
    rows = random_rows(learner_of(spec_of(tokenizer)).model, 7)
    found = []
    for preferences in (True, False):
        changes: dict[str, Any] = {} if preferences else {"preferences": None}
        learner = learner_of(spec_of(tokenizer, **changes))
        if preferences:
            moved(learner, 0.0)
        learner.accumulate(rows)
        found.append(learner.apply(10).metrics)
    assert "kl" not in found[0]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-9)


def test_the_flag_comes_from_the_store() -> None:
    sample = make_rollout("q0", "q0-s0-t0", prompt=[5, 6], response=[7, 8], logprobs=[0.0, 0.0])
    sample.demonstration = sample.preference = True
    (row,) = parse_rows([store_pb.ClaimedSample(sample=sample, group_rewards=[0.0, 1.0])], 64)
    assert row.demonstration
    assert row.preference


@given(
    st.sampled_from(LOSSES),
    st.floats(0.01, 5.0),
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 50), st.floats(-30.0, 30.0)),
        max_size=12,
    ),
)
def test_weights_are_the_slopes_of_the_loss(
    loss: Loss, beta: float, replies: list[tuple[int, bool, int, float]]
) -> None:
    pairs = torch.tensor([one[0] for one in replies], dtype=torch.int64)
    chosen = torch.tensor([one[1] for one in replies], dtype=torch.bool)
    lengths = torch.tensor([one[2] for one in replies], dtype=torch.int64)
    ratios = torch.tensor([one[3] for one in replies], dtype=torch.float64, requires_grad=True)
    sums = SideSums.of(ratios.detach(), lengths, pairs, chosen)
    found = preference_weights(sums, pairs, chosen, loss=loss, beta=beta)
    total = torch.zeros((), dtype=torch.float64) + 0 * ratios.sum()
    for pair in range(4):
        sides = [(pairs == pair) & (chosen == side) for side in (True, False)]
        if not all(side.any() for side in sides):
            continue
        means = [ratios[s].sum() / (lengths[s].sum() if loss == "ipo" else 1) for s in sides]
        gap = means[0] - means[1]
        own = (gap - 1 / (2 * beta)) ** 2
        total = total + (own if loss == "ipo" else -torch.nn.functional.logsigmoid(beta * gap))
    torch.autograd.backward(total)
    assert ratios.grad is not None
    torch.testing.assert_close(found.losses.sum(), total.detach())
    torch.testing.assert_close(found.weights, -ratios.grad)
    assert len(found.losses) == len(found.chosen) == len(found.rejected)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preferences": {"tasks": TASKS, "steps": 11}}, "preferences.steps"),
    ({"preferences": {"tasks": TASKS, "steps": 4, "agent": "nobody"}}, "preferences.agent"),
    ({"preferences": {"tasks": TASKS, "steps": 4, "beta": 0}}, "preferences.beta"),
    ({"preferences": {"tasks": TASKS, "steps": 4, "turns": "all"}}, "preferences.turns"),
    ({"supervised": {"tasks": TASKS, "steps": 4}}, "supervised: not with `preferences`"),
    (
        {
            "preferences": {"tasks": TASKS, "steps": 4},
            "algorithm": {"kl_coefficient": 0.1},
        },
        "algorithm.kl_coefficient: not with `preferences`",
    ),
]


@pytest.mark.parametrize(("changes", "why"), WRONG)
def test_contradictory_preferences_settings_are_refused(
    tokenizer: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        spec_of(tokenizer, **changes)


def test_a_job_of_pairs_alone_needs_no_workflow(tokenizer: Path) -> None:
    values = spec_of(tokenizer).model_dump()
    values |= {"workflow": None, "tasks": None}
    spec = JobSpec.model_validate(values)
    assert spec.offline_only
    assert spec.needs_reference
    values["preferences"]["steps"] = 9
    with pytest.raises(ValueError, match="workflow: is missing"):
        JobSpec.model_validate(values)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_equal_those_of_trl(
    tokenizer: Path, tmp_path: Path, loss: Loss
) -> None:
    """Six steps of AdamW: every loss and norm of a gradient to 1e-5, so that the updates are the
    same, too."""
    try:
        python = reference_python([TRL], tmp_path / "reference")
    except ReferenceUnavailable as error:
        pytest.skip(str(error))
    optimizer = {
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    learner = learner_of(spec_of(tokenizer, loss, optimizer=optimizer), double=False)
    learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
    rows = pairs_of(0, 24)
    learner.model.save_pretrained(tmp_path / "model")
    for one in tokenizer.iterdir():
        (tmp_path / "model" / one.name).write_bytes(one.read_bytes())
    data = [
        {
            "prompt_ids": chosen.ids[: chosen.prompt_length].tolist(),
            "chosen_ids": chosen.ids[chosen.prompt_length :].tolist(),
            "rejected_ids": rejected.ids[rejected.prompt_length :].tolist(),
        }
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(data))
    script = Path(__file__).with_name("dpo_reference.py")
    kind = {"dpo": "sigmoid", "ipo": "ipo"}[loss]
    paths = [tmp_path / "model", tmp_path / "rows.json", tmp_path / "out.json"]
    done = subprocess.run(
        [python, script, *paths, kind], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / "out.json").read_text())
    mine: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in range(6):
        some = rows[8 * step : 8 * step + 8]
        learner.accumulate(some[:3])
        learner.accumulate(some[3:])
        found = learner.apply(step).metrics
        mine["losses"].append(found["preference/loss"])
        mine["norms"].append(found["grad_norm"])
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-5)


def test_a_joint_pair_is_one_sigmoid_over_what_all_agents_said(tokenizer: Path) -> None:
    """MADPO: -log sigmoid(beta sum over agents of the difference of log-ratios)."""
    spec = spec_of(
        tokenizer,
        agents={"writer": {"policy": "solver"}, "checker": {"policy": "solver"}},
        preferences={"tasks": TASKS, "steps": 10, "joint": True, "beta": 0.4},
    )
    learner = learner_of(spec)
    reference = moved(learner)
    # Two pairs of single agents become one of both.
    rows = pairs_of(5, 4)
    rows = [
        replace(
            row,
            sample_id=f"q{k // 4}_{k % 4}_t{k // 4}",
            group=f"q{k // 4}/*/pair",
            agent=("writer", "checker")[k // 2 % 2],
            group_rewards=(0.0, 0.0, 1.0, 1.0),
            turn=k % 4,
            trajectory=f"t{k // 4}",
        )
        for k, row in enumerate(rows)
    ]
    losses = []
    for group in dict.fromkeys(row.group for row in rows):
        joint: Any = 0.0
        for row in rows:
            if row.group == group:
                own = response_logprobs(learner.model, row)[0].sum()
                own = own - response_logprobs(reference, row)[0].sum().detach()
                joint = joint + (own if row.reward else -own)
        losses.append(-torch.nn.functional.logsigmoid(0.4 * joint))
    total = torch.stack(losses).mean()
    expected = torch.cat(
        [one.flatten() for one in torch.autograd.grad(total, list(learner.model.parameters()))]
    )
    for cuts in ([], [1, 3, 6]):
        found = gradient(learner, rows, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        learner.discard()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"preferences": {"joint": True, "agent": "solver"}}, "name their agents"),
        ({"preferences": {"joint": True}}, "only one agent learns"),
    ],
)
def test_joint_pairs_need_a_team(tokenizer: Path, sections: dict[str, Any], message: str) -> None:
    pairs = {"tasks": TASKS, "steps": 10, **sections["preferences"]}
    with pytest.raises(ValueError, match=message):
        make_spec(tokenizer, preferences=pairs)
