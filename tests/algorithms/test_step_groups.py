"""GiGPO, HGPO and MaxRL against plain references, and their gradients in games solved exactly."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from troupe.algorithms.advantages import SampleBatch, likelihood_advantages
from troupe.algorithms.registry import ADVANTAGES
from troupe.job.sections.algorithm import StepGroupsSpec

F64 = torch.float64
# A turn: query, trajectory, observation, reward earned.
Turn = tuple[str, str, str, float]


def batch(turns: Sequence[Turn], *, seed: int | None = None, **fields: Any) -> SampleBatch:
    """The turns of whole groups, in the order of trajectories or in a drawn one."""
    positions: dict[str, int] = {}
    numbered = []
    for turn in turns:
        numbered.append((*turn, positions.get(turn[1], 0)))
        positions[turn[1]] = numbered[-1][-1] + 1
    order = list(range(len(turns)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    mixed = [numbered[i] for i in order]
    n = len(mixed)
    found = SampleBatch(
        rewards=torch.zeros(n, dtype=F64),
        group_rewards=[[0.0]] * n,
        agents=["solver"] * n,
        turns=torch.tensor([one[4] for one in mixed]),
        lengths=torch.ones(n, dtype=torch.int64),
        behaviour_logprobs=torch.zeros(n),
        baselines=torch.zeros(n, dtype=F64),
        trajectories=[one[1] for one in mixed],
        groups=[one[0] for one in mixed],
        chains=[""] * n,
        observations=[one[2] for one in mixed],
        earned=torch.tensor([one[3] for one in mixed], dtype=F64),
        **fields,
    )
    ORDERS[id(found)] = order
    return found


ORDERS: dict[int, list[int]] = {}


def advantages(
    name: str, turns: Sequence[Turn], seed: int | None = None, **fields: Any
) -> list[float]:
    """In the order of `turns`, whatever the order in which the function got them."""
    given = batch(turns, seed=seed, **fields)
    found = ADVANTAGES[name](given).tolist()
    back = dict(zip(ORDERS.pop(id(given)), found, strict=True))
    return [back[i] for i in range(len(turns))]


def wandering(seed: int) -> list[Turn]:
    """Episodes in a house of three rooms, which they enter again and again."""
    dice = random.Random(seed)
    return [
        (query, f"{query}-t{t}", dice.choice("ABC"), round(dice.uniform(-1, 1), 3))
        for query in ("q0", "q1")
        for t in range(4)
        for _ in range(dice.randint(1, 5))
    ]


def norm(value: float, group: Sequence[float], scale: bool) -> float:
    spread = statistics.stdev(group) if len(group) > 1 else 0.0
    return (value - statistics.fmean(group)) / (spread + 1e-4 if scale else 1.0)


def to_go(turns: Sequence[Turn], i: int, gamma: float) -> float:
    rest = [one for one in turns[i:] if one[1] == turns[i][1]]
    return math.fsum(gamma**k * one[3] for k, one in enumerate(rest))


@pytest.mark.parametrize("by_trajectory", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo_is_the_papers_formula(seed: int, scale: bool, by_trajectory: bool) -> None:
    turns = wandering(seed)
    spec = StepGroupsSpec(weight=0.7, gamma=0.9)
    found = advantages(
        "gigpo",
        turns,
        seed,
        scale_by_std=scale,
        step_groups=spec,
        by_trajectory=by_trajectory,
    )
    whole = {t: math.fsum(one[3] for one in turns if one[1] == t) for _, t, _, _ in turns}
    for i, (query, trajectory, room, _) in enumerate(turns):
        alike = [one[1] for one in turns if one[0] == query]
        pool = [whole[t] for t in (dict.fromkeys(alike) if by_trajectory else alike)]
        met = [k for k, one in enumerate(turns) if (one[0], one[2]) == (query, room)]
        step = norm(to_go(turns, i, 0.9), [to_go(turns, k, 0.9) for k in met], scale)
        expected = norm(whole[trajectory], pool, scale) + 0.7 * step
        assert found[i] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def last(turns: Sequence[Turn], i: int, count: int) -> list[str] | None:
    """The last `count` observations of an episode at its turn i; None: there are fewer."""
    before = [one[2] for one in turns[: i + 1] if one[1] == turns[i][1]]
    return before[-count:] if len(before) >= count else None


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(3))
def test_hgpo_is_the_papers_formula(seed: int, alpha: float) -> None:
    turns = wandering(seed)
    spec = StepGroupsSpec(history=2, alpha=alpha, gamma=0.8)
    for scale in (False, True):
        found = advantages("hgpo", turns, seed, scale_by_std=scale, step_groups=spec)
        for i, (query, *_) in enumerate(turns):
            terms = []
            for k in range(3):
                seen = last(turns, i, k + 1)
                group = [
                    to_go(turns, j, 0.8)
                    for j, other in enumerate(turns)
                    if other[0] == query and last(turns, j, k + 1) == seen
                ]
                if seen is not None and len(group) > 1:
                    terms.append(((k + 1) ** alpha, norm(to_go(turns, i, 0.8), group, scale)))
            expected = sum(w * a for w, a in terms) / sum(w for w, _ in terms) if terms else 0.0
            assert found[i] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_hgpo_gives_no_advantage_to_an_observation_that_only_one_turn_had() -> None:
    turns = [("q", "a", "A", 3.0), ("q", "b", "B", 1.0)]
    assert advantages("hgpo", turns) == [0.0, 0.0]
    assert advantages("gigpo", turns, scale_by_std=False) == [1.0, -1.0]


def gradient_of(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def test_gigpos_expected_gradient_in_a_game_of_two_moves_is_that_of_its_baselines() -> None:
    """Stop, or go on and choose: each state occurs at most once in an episode, so the baselines do
    not bias the gradient, but a mean over n that includes the own return takes the factor 1 - 1/n.
    """
    rewards = {"stop": 0.3, "left": 1.0, "right": -0.5}
    on_the_way, weight, n = 0.2, 0.7, 3
    logits = torch.tensor([0.4, -0.3], dtype=F64, requires_grad=True)
    go, left = torch.sigmoid(logits[0]), torch.sigmoid(logits[1])
    chance = {"stop": 1 - go, "left": go * left, "right": go * (1 - left)}
    logs = {
        "stop": [torch.log(1 - go)],
        "left": [torch.log(go), torch.log(left)],
        "right": [torch.log(go), torch.log(1 - left)],
    }
    spec = StepGroupsSpec(weight=weight, gamma=1.0)
    expected = torch.zeros(2, dtype=F64)
    for ends in itertools.product(rewards, repeat=n):
        turns: list[Turn] = []
        for t, end in enumerate(ends):
            if end != "stop":
                turns.append(("q", f"t{t}", "root", on_the_way))
            turns.append(("q", f"t{t}", "root" if end == "stop" else "fork", rewards[end]))
        found = advantages("gigpo", turns, scale_by_std=False, step_groups=spec, by_trajectory=True)
        drawn = [log for end in ends for log in logs[end]]
        surrogate = sum(a * log for a, log in zip(found, drawn, strict=True))
        probability = math.prod(float(chance[end].detach()) for end in ends)
        expected += probability * gradient_of(logits, torch.as_tensor(surrogate)) / n
    value = sum(
        chance[end] * (reward + (0 if end == "stop" else on_the_way))
        for end, reward in rewards.items()
    )
    whole = gradient_of(logits, torch.as_tensor(value))
    # The fork: one of n episodes is there, each other one with probability `go`.
    p = float(go.detach())
    there = sum(
        math.comb(n - 1, k) * p**k * (1 - p) ** (n - 1 - k) * (1 - 1 / (k + 1)) for k in range(n)
    )
    macro, root = (1 - 1 / n) * whole, (1 - 1 / n) * whole[0]
    fork = there * whole[1]
    analytic = macro + weight * torch.stack([root, fork])
    torch.testing.assert_close(expected, analytic, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_maxrls_expected_gradient_is_that_of_the_first_terms_of_the_log_likelihood(n: int) -> None:
    """sum_{k<n} 1/k grad pass@k, by enumeration of all groups of n."""
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=F64, requires_grad=True)
    chances = torch.softmax(logits, 0)
    rewards = [1.0, 0.0, 0.0]
    found = torch.zeros(3, dtype=F64)
    for drawn in itertools.product(range(3), repeat=n):
        group = [rewards[a] for a in drawn]
        scale = likelihood_advantages(group, [group] * n)
        surrogate = (scale * torch.log(chances[list(drawn)])).sum() / n
        found += math.prod(chances.detach()[list(drawn)].tolist()) * gradient_of(logits, surrogate)
    failed = 1 - chances[0]
    terms = torch.as_tensor(sum((1 - failed**k) / k for k in range(1, n)))
    torch.testing.assert_close(found, gradient_of(logits, terms), rtol=1e-9, atol=1e-12)


def test_maxrl_divides_by_the_success_rate_and_refuses_negative_rewards() -> None:
    group = [1.0, 0.0, 0.0, 0.0]
    assert likelihood_advantages(group, [group] * 4).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert likelihood_advantages([0.0, 0.0], [[0.0, 0.0]] * 2).tolist() == [0.0, 0.0]
    assert likelihood_advantages([1.0, -1.0], [[-1.0, 1.0]] * 2).isnan().all()
