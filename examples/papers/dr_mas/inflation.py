"""How much a baseline inflates the gradients of agents that share a policy, measured and predicted.

Dr. MAS (Feng et al. 2026): with rewards normalised by mean mu and deviation sigma of all agents,
the gradient of agent k has E|g_k|^2 = (sigma_k^2 + (mu_k - mu)^2) / sigma^2 times the value that it
has with its own mean mu_k and deviation sigma_k, where rewards do not depend on the norm of the
gradient of the answer's log-prob.

Counted by trajectory (`baseline_weight: trajectory`), mu is the mean of the trajectories' mean
rewards, and sigma^2 their variance plus the mean variance within a trajectory: mean and variance of
a sample that is drawn by drawing a trajectory first.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.papers.dr_mas.workflow import (
    BITS,
    CHECKS,
    NAMES,
    NEEDED,
    answers_of,
    check,
    propose,
    reward_of,
)
from troupe.algorithms.advantages import group_advantages

Trajectory = Mapping[str, Sequence[tuple[float, float]]]
"""By agent: reward and squared norm of the gradient, sample by sample."""
Group = Sequence[Trajectory]
"""The trajectories of a question."""
ARMS: Final = ("trajectory", "step")
"""What counts once in the mean of all agents."""


class Answers:
    """A model's answers to all questions: rewards and squared norms of gradients."""

    def __init__(self, checkpoint: Path, seed: int, trajectories: int) -> None:
        """Draw the proposals and checks of `trajectories` trajectories per question."""
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.groups: list[Group] = []
        """By question."""
        for name, answer in zip(NAMES, answers_of(seed), strict=True):
            said = self._drawn([propose(name)] * trajectories)
            counts = [draw.choice(CHECKS) for _ in said]
            asked = [
                check(name, one)
                for (one, _), count in zip(said, counts, strict=True)
                for _ in range(count)
            ]
            checked = iter(self._drawn(asked))
            group = []
            for proposal, count in zip(said, counts, strict=True):
                answers = {"proposer": [proposal], "checker": [next(checked) for _ in range(count)]}
                group.append(
                    {
                        agent: [(reward_of(agent, text, answer), norm) for text, norm in found]
                        for agent, found in answers.items()
                    }
                )
            self.groups.append(group)

    def _drawn(self, questions: Sequence[str]) -> list[tuple[str, float]]:
        """Draw an answer to each question, all of equal lengths, and return it with the squared
        norm of the gradient of its log-prob in all parameters."""
        ids = torch.tensor(
            [
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": one}],
                    add_generation_prompt=True,
                    return_dict=False,
                )
                for one in questions
            ]
        )
        begin = ids.shape[1]
        for _ in range(len(BITS)):
            with torch.no_grad():
                chances = torch.softmax(self._model(ids).logits[:, -1], dim=-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
        parameters = list(self._model.parameters())
        found = []
        for row in ids:
            logprobs = torch.log_softmax(self._model(row[None]).logits[0, begin - 1 : -1], dim=-1)
            total = logprobs.gather(1, row[begin:, None]).sum()
            norm = sum(float((g**2).sum()) for g in torch.autograd.grad(total, parameters))
            found.append((self._tokenizer.decode(row[begin:]), norm))
        return found


def shared_advantages(group: Group, agent: str, arm: str) -> torch.Tensor:
    """Return the advantages of the agent's samples, trajectory by trajectory, with the baseline of
    `arm`: those that the trainer computes for `group_by: query`. float64 [n]."""
    rewards = rewards_of(group, agent)
    entries, within = entries_of(group, arm)
    count = len(rewards)
    variances = torch.full((count,), within, dtype=torch.float64)
    return group_advantages(rewards, [entries] * count, within=variances)


def measured(groups: Sequence[Group], arm: str) -> list[float]:
    """Return by agent the mean squared norm of a sample's gradient with the baseline of `arm`,
    divided by that with the agent's own."""
    found = []
    for agent in NEEDED:
        shared = own = 0.0
        for group in groups:
            rewards = rewards_of(group, agent)
            samples = [sample for trajectory in group for sample in trajectory[agent]]
            norms = torch.tensor([norm for _, norm in samples], dtype=torch.float64)
            shared += float(shared_advantages(group, agent, arm).pow(2) @ norms)
            own += float(group_advantages(rewards, [rewards] * len(rewards)).pow(2) @ norms)
        found.append(shared / own)
    return found


def predicted(groups: Sequence[Group], arm: str) -> list[float]:
    """Return by agent (sigma_k^2 + (mu_k - mu)^2) / sigma^2, the mean over questions."""
    found = []
    for agent in NEEDED:
        values = []
        for group in groups:
            entries, within = entries_of(group, arm)
            rewards = rewards_of(group, agent)
            apart = statistics.fmean(rewards) - statistics.fmean(entries)
            second = statistics.pvariance(rewards) + apart**2
            values.append(second / (statistics.pvariance(entries) + within))
        found.append(statistics.fmean(values))
    return found


def rewards_of(group: Group, agent: str) -> list[float]:
    """Return the rewards of an agent's samples, trajectory by trajectory."""
    return [reward for trajectory in group for reward, _ in trajectory[agent]]


def entries_of(group: Group, arm: str) -> tuple[list[float], float]:
    """Return what counts once in the mean of all agents, the reward of a sample or the mean of a
    trajectory, and the mean variance of rewards within such an entry."""
    by_trajectory = [
        [reward for samples in trajectory.values() for reward, _ in samples] for trajectory in group
    ]
    if arm == "step":
        return [reward for rewards in by_trajectory for reward in rewards], 0.0
    means = [statistics.fmean(rewards) for rewards in by_trajectory]
    return means, statistics.fmean(statistics.pvariance(rewards) for rewards in by_trajectory)
