"""What baselines are means of: groups, trajectories or samples, against plain references."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.gang.gang import decode_rows, encode_rows
from services.trainer.learning.advantages import AdvantageEstimator
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row, parse_rows
from services.trainer.state.suspension import pack_rows, unpack_rows
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows
from tests.trainer.learning.test_supervised import gradient
from troupe import tensors
from troupe.algorithms.advantages import SampleBatch
from troupe.algorithms.registry import ADVANTAGES
from troupe.job import AlgorithmSpec
from troupe.rpc import FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.workflow.token_ids import TokenIds


def row(group: str, trajectory: str, turn: int, reward: float, **more: Any) -> Row:
    return Row(
        sample_id=f"{trajectory}/{turn}",
        ids=np.arange(4 + turn),
        prompt_length=3,
        behaviour=np.zeros(1 + turn, np.float32),
        reward=reward,
        group_rewards=(),
        version=0,
        group=group,
        query="q0",
        trajectory=trajectory,
        turn=turn,
        **{"agent": group, **more},
    )


def ragged_rows(seed: int) -> list[Row]:
    """Trajectories of one to five turns, whose turns have rewards of their own."""
    dice = random.Random(seed)
    rows = [
        row(group, f"{group}-t{t}", turn, round(dice.uniform(-2, 2), 3))
        for group in ("one", "two")
        for t in range(4)
        for turn in range(dice.randint(1, 5))
    ]
    rewards = {g: sorted(r.reward for r in rows if r.group == g) for g in ("one", "two")}
    return [replace(r, group_rewards=tuple(rewards[r.group])) for r in rows]


def reference(mine: Row, rows: list[Row], advantage: str) -> float:
    """With `baseline_weight: trajectory`, one sample at a time."""
    rewards: dict[str, list[float]] = {}
    for other in rows:
        if other.group == mine.group:
            rewards.setdefault(other.trajectory, []).append(other.reward)
    means = {name: statistics.fmean(values) for name, values in rewards.items()}
    match advantage:
        case "rloo":
            others = [mean for name, mean in means.items() if name != mine.trajectory]
            return mine.reward - statistics.fmean(others)
        case "dr_grpo":
            return mine.reward - statistics.fmean(means.values())
        case "rae":
            return mine.reward
    centred = mine.reward - statistics.fmean(means.values())
    within = statistics.fmean(statistics.pvariance(values) for values in rewards.values())
    return centred / ((statistics.variance(means.values()) + within) ** 0.5 + 1e-4)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "rae"])
@pytest.mark.parametrize("seed", range(3))
def test_a_trajectory_counts_once_in_its_baseline(advantage: str, seed: int) -> None:
    rows = ragged_rows(seed)
    spec = AlgorithmSpec.model_validate({"advantage": advantage, "baseline_weight": "trajectory"})
    estimator = AdvantageEstimator(spec, ADVANTAGES[advantage])
    estimator.measure(rows)
    found = estimator.estimate(rows).advantages
    expected = [reference(one, rows, advantage) for one in rows]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )
    by_sample = AdvantageEstimator(
        AlgorithmSpec.model_validate({"advantage": advantage}), ADVANTAGES[advantage]
    )
    by_sample.measure(rows)
    same = torch.allclose(found, by_sample.estimate(rows).advantages)
    assert same == (advantage == "rae"), "rae's baseline is that of earlier steps"


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus"])
def test_agents_with_rewards_of_their_own_are_not_divided_by_nothing(advantage: str) -> None:
    """Each trajectory has a proposer that fails and a checker that does not: their means are
    equal, and had a deviation of 0."""
    rows = [
        row("both", f"t{number}", turn, float(turn), agent=("proposer", "checker")[turn])
        for number in range(4)
        for turn in range(2)
    ]
    algorithm: dict[str, Any] = {"advantage": advantage, "baseline_weight": "trajectory"}
    if advantage != "grpo":
        algorithm["normalize_per_agent"] = False
    spec = AlgorithmSpec.model_validate(algorithm)
    estimator = AdvantageEstimator(spec, ADVANTAGES[advantage])
    estimator.measure(rows)
    found = estimator.estimate(rows).advantages
    torch.testing.assert_close(found.abs(), torch.full_like(found, 0.5 / (0.5 + 1e-4)))


def test_raes_average_moves_once_per_trajectory() -> None:
    spec = AlgorithmSpec.model_validate(
        {"advantage": "rae", "baseline_weight": "trajectory", "rae_decay": 0.9}
    )
    estimator = AdvantageEstimator(spec, ADVANTAGES["rae"])
    rows = [row("one", "long", turn, 1.0) for turn in range(9)] + [row("one", "short", 0, 0.0)]
    estimator.estimate(rows[:4])
    estimator.restore_step(json.loads(json.dumps(estimator.step_state())))  # a suspension
    estimator.estimate(rows[4:])
    estimator.applied()
    assert float(estimator.state()["baseline/one"]) == pytest.approx((1 - 0.9**2) * 0.5)


@pytest.mark.parametrize("mode", ["sync", "micro_batch"])
def test_a_learner_weighs_trajectories_however_its_rows_arrive(tokenizer: Path, mode: str) -> None:
    pipeline = {"steps": 10, "queries_per_step": 2, "micro_batch_samples": 4, "mode": mode}
    algorithm = {"advantage": "dr_grpo", "baseline_weight": "trajectory"}

    def learner(**algorithm: Any) -> Learner:
        spec = make_spec(tokenizer, algorithm=algorithm, pipeline=pipeline)
        return Learner(load_model("solver", spec.policies["solver"], 0).double(), spec, "solver")

    mine, plain = learner(**algorithm), learner(advantage="dr_grpo")
    # Two samples in each trajectory but the last.
    rows = [
        replace(one, trajectory=f"{one.group}-{k // 2}")
        for k, one in enumerate(random_rows(mine.model, 1))
    ]
    # The same baselines, given to a learner that knows nothing of trajectories.
    given = []
    for one in rows:
        rewards: dict[str, list[float]] = {}
        for other in rows:
            if other.group == one.group:
                rewards.setdefault(other.trajectory, []).append(other.reward)
        means = tuple(sorted(statistics.fmean(values) for values in rewards.values()))
        given.append(replace(one, group_rewards=means))
    expected = gradient(plain, given, [])
    assert float(expected.norm()) > 0
    for cuts in ([], [4], list(range(1, len(rows)))):
        found = gradient(mine, rows, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("advantage", ["gigpo", "hgpo"])
@pytest.mark.parametrize("mode", ["sync", "micro_batch"])
def test_turns_are_compared_however_rows_arrive(tokenizer: Path, mode: str, advantage: str) -> None:
    spec = make_spec(
        tokenizer,
        algorithm={"advantage": advantage, "step_groups": {"observation": "room"}},
        pipeline={"steps": 10, "queries_per_step": 2, "micro_batch_samples": 4, "mode": mode},
    )
    model = load_model("solver", spec.policies["solver"], 0).double()
    learner = Learner(model, spec, "solver")
    rows = [
        replace(
            one,
            trajectory=f"{one.group}-{k // 2}",
            turn=k % 2,
            earned=one.reward,
            columns={"room": k % 2},
        )
        for k, one in enumerate(random_rows(model, 1, Shape(members=8)))
    ]
    whole = gradient(learner, rows, [])
    assert float(whole.norm()) > 0
    for cuts in ([4], list(range(1, len(rows)))):
        found = gradient(learner, rows, cuts)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)
    # The same advantages, given by hand.
    estimator = AdvantageEstimator(spec.algorithm, ADVANTAGES[advantage])
    expected = estimator.estimate(rows).advantages
    learner.accumulate(rows)
    learner.complete()
    metrics = learner.apply(0).metrics
    assert metrics["advantage/abs_mean"] == pytest.approx(float(expected.abs().mean()))


def test_a_turn_without_its_observation_is_named() -> None:
    spec = AlgorithmSpec.model_validate(
        {"advantage": "gigpo", "step_groups": {"observation": "room"}}
    )
    assert spec.user_columns == ("room",)
    estimator = AdvantageEstimator(spec, ADVANTAGES["gigpo"])
    with pytest.raises(FailedPrecondition, match="no column room") as caught:
        estimator.estimate([row("one", "t0", 0, 1.0)])
    assert caught.value.kind == "malformed_sample"
    # Equal arrays are one observation, whatever their memory layout.
    board = np.arange(6).reshape(2, 3)
    rows = [
        row("one", f"t{t}", 0, float(t), final=float(t), earned=0.0, columns={"room": one})
        for t, one in enumerate((board, np.asfortranarray(board), board + 1))
    ]
    found = AdvantageEstimator(
        AlgorithmSpec.model_validate(
            {
                "advantage": "hgpo",
                "scale_by_std": False,
                "step_groups": {"observation": "room", "gamma": 1.0},
            }
        ),
        ADVANTAGES["hgpo"],
    ).estimate(rows)
    assert found.advantages.tolist() == [-0.5, 0.5, 0.0]


def seen(samples: SampleBatch) -> torch.Tensor:
    SEEN.append(samples)
    return samples.rewards


seen.whole_group = True  # type: ignore[attr-defined]
SEEN: list[SampleBatch] = []


def test_a_users_advantage_sees_whole_groups_and_what_the_workflow_set() -> None:
    spec = AlgorithmSpec.model_validate({"advantage": "a.b:c", "columns": ["state", "board"]})
    estimator = AdvantageEstimator(spec, seen)
    assert estimator.needs_whole_groups
    rows = [
        row("one", "t0", 0, 0.0, earned=1.0, final=5.0, columns={"state": "A"}),
        row("one", "t0", 2, 0.0, earned=2.0, final=5.0),
        row("one", "t1", 0, 0.0, earned=0.5, final=None, chain="white"),
    ]
    SEEN.clear()
    estimator.estimate(rows)
    (given,) = SEEN
    assert list(given.queries) == ["q0"] * 3
    assert list(given.trajectories) == ["t0", "t0", "t1"]
    assert list(given.groups) == ["one"] * 3
    assert list(given.chains) == ["", "", "white"]
    assert [dict(one) for one in given.columns] == [{"state": "A"}, {}, {}]
    # The agent's reward comes with the last turn of its chain.
    assert given.earned is not None
    assert given.earned.tolist() == [1.0, 7.0, 0.5]
    assert given.prompts[0] == given.prompts[1] == TokenIds.of((0, 1, 2)).digest


def test_columns_come_from_the_store_and_survive_suspension_and_the_way_to_other_ranks() -> None:
    board = np.arange(6, dtype=np.float32).reshape(2, 3)
    sample = store_pb.Sample(
        sample_id="q0_0_t0",
        query_id="q0",
        prompt_ids=tensors.to_proto(np.array([1, 2], np.int32)),
        response_ids=tensors.to_proto(np.array([3], np.int32)),
        logprobs=tensors.to_proto(np.zeros(1, np.float32)),
        reward=1.0,
        columns={
            "state": store_pb.Column(json='{"room": [1, null]}'),
            "board": store_pb.Column(ref="elsewhere"),
            "other": store_pb.Column(json="1"),
        },
    )
    claimed = [store_pb.ClaimedSample(sample=sample, group_rewards=[1.0])]
    (parsed,) = parse_rows(
        claimed, 64, {"elsewhere": board}.__getitem__, (), user_columns=("state", "board", "none")
    )
    arrays, described = pack_rows([parsed, replace(parsed, columns={})])
    suspended = unpack_rows(arrays, json.loads(json.dumps(described)))
    sent = decode_rows(*encode_rows([parsed, replace(parsed, columns={})]))
    for first, second in (suspended, sent):
        assert first.query == "q0"
        assert first.columns["state"] == {"room": [1, None]}
        assert np.array_equal(first.columns["board"], board)
        assert sorted(first.columns) == ["board", "state"]
        assert second.columns == {}
