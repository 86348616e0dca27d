"""Baselines per turn in a game of going on or stopping, by enumeration of all groups.

Root: `stop` earns s; `go` earns nothing and leads to a second turn, in which `left` or `right` earn
what the whole game is about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from services.trainer.learning.advantages import AdvantageEstimator
from services.trainer.learning.samples import Row
from troupe.algorithms.registry import ADVANTAGES
from troupe.job import AlgorithmSpec

F64 = torch.float64
N = 3
STOP, LATER = 0.3, {"left": 1.4, "right": 0.2}
LOGITS = torch.tensor([0.1, -0.6], dtype=F64, requires_grad=True)
# Ends of an episode, and what its turns earn.
REWARDS = {"stop": [STOP], "left": [0.0, LATER["left"]], "right": [0.0, LATER["right"]]}


def log_chances(end: str) -> list[torch.Tensor]:
    """Return the log-probabilities of the episode's actions, one per turn."""
    go, left = torch.sigmoid(LOGITS[0]), torch.sigmoid(LOGITS[1])
    if end == "stop":
        return [torch.log(1 - go)]
    return [torch.log(go), torch.log(left if end == "left" else 1 - left)]


def advantages(rows_rewards: Sequence[Sequence[float]], advantage: str) -> list[list[float]]:
    """Return the trainer's advantages with `group_by: turn`, from turns' rewards by trajectory."""
    rows = []
    for t, rewards in enumerate(rows_rewards):
        for turn, reward in enumerate(rewards):
            alike = sorted(other[turn] for other in rows_rewards if len(other) > turn)
            rows.append(
                Row(
                    sample_id=f"{t}/{turn}",
                    ids=np.zeros(2, np.int64),
                    prompt_length=1,
                    behaviour=np.zeros(1, np.float32),
                    reward=reward,
                    group_rewards=tuple(alike),
                    version=0,
                    group=f"q/solver/{turn}",
                    trajectory=f"t{t}",
                    turn=turn,
                )
            )
    estimator = AdvantageEstimator(
        AlgorithmSpec.model_validate({"advantage": advantage, "group_by": "turn"}),
        ADVANTAGES[advantage],
    )
    found = iter(estimator.estimate(rows).advantages.tolist())
    return [[next(found) for _ in rewards] for rewards in rows_rewards]


def to_go(rewards: Sequence[float]) -> list[float]:
    return [math.fsum(rewards[t:]) for t in range(len(rewards))]


def expected_gradient(rule: Callable[[list[list[float]]], list[list[float]]]) -> torch.Tensor:
    """Return the gradient of sum_t A_t log pi(a_t) per trajectory, over all groups of N.

    `rule` maps rewards to A."""
    total = torch.zeros(2, dtype=F64)
    for ends in itertools.product(REWARDS, repeat=N):
        found = rule([REWARDS[end] for end in ends])
        logs = [log_chances(end) for end in ends]
        surrogate = torch.zeros((), dtype=F64)
        for own, chances in zip(found, logs, strict=True):
            for a, log in zip(own, chances, strict=True):
                surrogate = surrogate + a * log
        probability = math.exp(sum(float(log.detach()) for one in logs for log in one))
        (gradient,) = torch.autograd.grad(surrogate, LOGITS)
        total += probability * gradient / N
    return total


def value() -> torch.Tensor:
    go, left = torch.sigmoid(LOGITS[0]), torch.sigmoid(LOGITS[1])
    later = left * LATER["left"] + (1 - left) * LATER["right"]
    return (1 - go) * STOP + go * later


def reaching(factor: Callable[[int], float]) -> float:
    """The mean of `factor(n)` over the number n of trajectories at the second turn, as seen by one
    that is there."""
    p = float(torch.sigmoid(LOGITS[0]).detach())
    return sum(
        math.comb(N - 1, k) * p**k * (1 - p) ** (N - 1 - k) * factor(k + 1) for k in range(N)
    )


@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo"])
def test_turns_with_rewards_to_go_have_the_exact_gradient(advantage: str) -> None:
    found = expected_gradient(lambda rewards: advantages([to_go(r) for r in rewards], advantage))
    (exact,) = torch.autograd.grad(value(), LOGITS)
    if advantage == "dr_grpo":
        # A mean that includes the own return takes 1/n of it.
        factors = [1 - 1 / N, reaching(lambda n: 1 - 1 / n)]
    else:
        # Exact, but for a trajectory that is alone at its turn, which is compared with nothing.
        factors = [1.0, reaching(lambda n: float(n > 1))]
    torch.testing.assert_close(
        found, exact * torch.tensor(factors, dtype=F64), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("whole", [False, True])
def test_rewards_centred_by_position_and_added_up_never_speak_for_going_on(whole: bool) -> None:
    """verl#7244: the bias is minus the mean of what comes later."""

    def rule(rewards: list[list[float]]) -> list[list[float]]:
        centred = advantages(rewards, "dr_grpo")
        if whole:
            return [[math.fsum(one)] * len(one) for one in centred]
        return [to_go(one) for one in centred]

    found = expected_gradient(rule)
    (exact,) = torch.autograd.grad(value(), LOGITS)
    go, left = torch.sigmoid(LOGITS.detach())
    later = float(left * LATER["left"] + (1 - left) * LATER["right"])
    slope = float(go * (1 - go))
    bias = -(1 - 1 / N) * slope * later
    assert float(found[0]) == pytest.approx((1 - 1 / N) * float(exact[0]) + bias, rel=1e-9)
    # It prefers to stop although going on is worth more.
    assert float(exact[0]) > 0 > float(found[0])
