"""Joint answers of a team: who is scored with whom, what replies earn, and the exact gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch

from troupe.algorithms.advantages import group_advantages
from troupe.workflow import Agents, InvalidMessagesError, InvalidRewardError, joint, play
from troupe.workflow.candidates import Joint, JointMode, joint_answers, rewards_of_replies

F64 = torch.float64
AGENTS = ("helper", "main")
MODES: tuple[JointMode, ...] = get_args(JointMode)


def worth(answer: Joint) -> float:
    return len(answer[0].text) + 10.0 * len(answer[1].text)


@pytest.mark.parametrize("mode", MODES)
async def test_a_reply_earns_the_rewards_of_its_joint_answers(mode: JointMode) -> None:
    scored: list[Joint] = []

    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        async def score(answer: Joint) -> float:
            scored.append(answer)
            return worth(answer)

        prompts = [(agents[name], f"{name}, go") for name in AGENTS]
        best = await joint(prompts, n=3, score=score, mode=mode, max_new_tokens=9)
        assert worth(best) == max(map(worth, scored))
        assert best in scored
        return {"team": worth(best)}

    played = await play(workflow, {}, agents=AGENTS, group_by="branch", seed=3)
    replies = {
        name: [row.turn.reply for row in played.samples if row.turn.role.name == name]
        for name in AGENTS
    }
    assert [len(own) for own in replies.values()] == [3, 3]
    assert len(scored) == (3 if mode == "aligned" else 9)
    for k, name in enumerate(AGENTS):
        for j, reply in enumerate(replies[name]):
            assert reply is not None
            together = [answer for answer in scored if answer[k] is reply]
            assert len(together) == (1 if mode == "aligned" else 3)
            if mode == "aligned":
                assert together[0] == tuple(replies[other][j] for other in AGENTS)
            expected = math.fsum(map(worth, together)) / len(together)
            assert reply.reward == pytest.approx(expected)
    # An agent's replies are compared with each other.
    assert len({row.group_id for row in played.samples}) == 2


async def test_a_drawn_joint_answer_is_the_same_again_and_a_function_may_choose() -> None:
    async def chosen(seed: int, choose: Any) -> list[str]:
        found: list[str] = []

        async def workflow(query: Any, agents: Agents, tools: Any) -> None:
            prompts = {agents[name]: "go" for name in AGENTS}
            answer = await joint(prompts, n=3, score=worth, choose=choose, greediness=0.0)
            found.extend(reply.text for reply in answer)

        await play(workflow, {}, agents=AGENTS, seed=seed)
        return found

    drawn = [await chosen(seed, "sample") for seed in range(6)]
    assert drawn == [await chosen(seed, "sample") for seed in range(6)]
    assert await chosen(0, lambda answers: answers[-1]) != await chosen(0, lambda a: a[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mode": "crossed"}, '"aligned" or "cross"'),
        ({"n": 300, "mode": "cross"}, "90,000 joint answers"),
        ({"choose": "worst"}, "choose cannot be"),
        ({"greediness": -1}, "greediness cannot be"),
        ({"prompts": []}, "prompts cannot be"),
        ({"choose": lambda answers: "none"}, "one of the candidates"),
    ],
)
async def test_bad_arguments_are_refused(how: dict[str, Any], message: str) -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> None:
        given = {"prompts": [(agents[name], "go") for name in AGENTS], "n": 2, "score": worth}
        given |= how
        await joint(given.pop("prompts"), **given)

    with pytest.raises(InvalidMessagesError, match=message):
        await play(workflow, {}, agents=AGENTS)


async def test_an_agent_answers_once_and_a_score_is_a_number() -> None:
    async def twice(query: Any, agents: Agents, tools: Any) -> None:
        await joint([(agents["main"], "a"), (agents["main"], "b")], n=2, score=worth)

    async def nothing(query: Any, agents: Agents, tools: Any) -> None:
        await joint({agents["main"]: "a"}, n=2, score=lambda answer: math.nan)

    with pytest.raises(InvalidMessagesError, match="several different agents"):
        await play(twice, {}, agents=AGENTS)
    with pytest.raises(InvalidRewardError, match=r"the score of main\[0\]"):
        await play(nothing, {}, agents=AGENTS)


# Two agents with two actions each, and what they get together.
PAYOFF = torch.tensor([[1.0, -0.5], [0.2, 0.8]], dtype=F64)
LOGITS = torch.tensor([0.3, -0.7], dtype=F64, requires_grad=True)


def log_chance(agent: int, action: int) -> torch.Tensor:
    first = torch.sigmoid(LOGITS[agent])
    return torch.log(first if action == 0 else 1 - first)


def moments(mode: JointMode, n: int) -> tuple[torch.Tensor, float]:
    """The mean of the gradient estimate over all draws of n actions of each agent, and its total
    variance."""
    answers = joint_answers(mode, n, 2)
    mean, square = torch.zeros(2, dtype=F64), 0.0
    for drawn in itertools.product(itertools.product(range(2), repeat=n), repeat=2):
        rewards = [float(PAYOFF[drawn[0][i], drawn[1][j]]) for i, j in answers]
        surrogate, log_probability = torch.zeros((), dtype=F64), 0.0
        for k, own in enumerate(rewards_of_replies(answers, rewards, n)):
            scale: Sequence[float] = group_advantages(own, [own] * n, scale_by_std=False).tolist()
            for a, action in zip(scale, drawn[k], strict=True):
                log = log_chance(k, action)
                surrogate = surrogate + a * log / n
                log_probability += float(log.detach())
        (gradient,) = torch.autograd.grad(surrogate, LOGITS)
        mean += math.exp(log_probability) * gradient
        square += math.exp(log_probability) * float(gradient.square().sum())
    return mean, square - float(mean.square().sum())


@pytest.mark.parametrize("n", [2, 3])
def test_both_modes_have_the_exact_gradient_and_cross_the_lower_variance(n: int) -> None:
    chances = torch.sigmoid(LOGITS)
    both = torch.stack([chances, 1 - chances])
    value = both[:, 0] @ PAYOFF @ both[:, 1]
    (exact,) = torch.autograd.grad(value, LOGITS)
    variances = []
    for mode in MODES:
        mean, variance = moments(mode, n)
        torch.testing.assert_close(mean, (1 - 1 / n) * exact, rtol=1e-9, atol=1e-12)
        variances.append(variance)
    aligned, cross = variances
    assert cross < 0.95 * aligned
