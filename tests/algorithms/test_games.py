"""Games with a known optimum, solved by every advantage with every loss, always a step behind.

Tables of logits and values instead of models; advantages and baselines as the trainer has them.
Samples are of the version before the one that trains on them, so the losses have something to clip.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from services.trainer.learning.advantages import AdvantageEstimator
from services.trainer.learning.samples import Row
from troupe.algorithms.losses import grpo_loss_sum, normalizer, token_weights
from troupe.algorithms.registry import ADVANTAGES as ADVANTAGES_BY_NAME
from troupe.algorithms.values import gae, value_loss
from troupe.job import AlgorithmSpec
from troupe.job.sections.algorithm import Advantage, Loss

# All that a job may say.
ADVANTAGES, LOSSES = get_args(Advantage), get_args(Loss)
# Every pair; by default each advantage and each loss at least once.
_SHORTER = min(len(ADVANTAGES), len(LOSSES))
PAIRS = [
    pytest.param(advantage, loss, marks=[] if (i - k) % _SHORTER == 0 else [pytest.mark.slow])
    for i, advantage in enumerate(ADVANTAGES)
    for k, loss in enumerate(LOSSES)
]
QUERIES, GROUP = 4, 8
# Expected rewards of the bandit's arms; what two agents get together for their actions.
ARMS = torch.tensor([0.1, 0.5, 0.9, 0.3])
PAYOFF = torch.tensor([[0.2, 0.0, 0.3], [0.1, 1.0, 0.4], [0.3, 0.2, 0.5]])


class Player:
    """One agent with a policy of its own: a distribution over `actions`, drawn `length` times."""

    def __init__(
        self, name: str, actions: int, length: int, algorithm: AlgorithmSpec, states: int = 1
    ) -> None:
        self.name, self.length, self.algorithm = name, length, algorithm
        self.logits = torch.zeros(length, actions, requires_grad=True)
        self.before = self.logits.detach().clone()
        self.optimizer = torch.optim.Adam([self.logits], lr=0.1)
        self.baselines = AdvantageEstimator(algorithm, ADVANTAGES_BY_NAME.get(algorithm.advantage))
        # `gae`: V of the observation before each token, for each of `states` in which it may occur.
        self.values = torch.zeros(states, length, requires_grad=True)
        self.fit = torch.optim.Adam([self.values], lr=0.1)

    def act(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """int64 [count, length], of the version before."""
        probabilities = torch.softmax(self.before, -1)
        drawn = torch.multinomial(probabilities, count, replacement=True, generator=generator)
        return drawn.T

    def learn(
        self, actions: torch.Tensor, rewards: list[float], seen: torch.Tensor | None = None
    ) -> None:
        """One update with what `act` gave, in two micro-batches; `seen`: the state of each."""
        n = len(rewards)
        seen = torch.zeros(n, dtype=torch.int64) if seen is None else seen
        positions = torch.arange(self.length).expand(n, -1)
        drawn = torch.log_softmax(self.before, -1)[positions, actions]
        rows = [self._row(i, rewards) for i in range(n)]
        if self.baselines.needs_whole_step:
            self.baselines.measure(rows)
        self.before = self.logits.detach().clone()
        self.optimizer.zero_grad()
        total = 0
        cut = 0 if self.baselines.needs_whole_groups else n // 2 - 3
        for half in (slice(0, cut), slice(cut, n)):
            advantages = self._advantages(rows[half], seen[half])
            now = torch.log_softmax(self.logits, -1)[positions[half], actions[half]]
            lengths = [self.length] * len(advantages)
            loss = grpo_loss_sum(
                now.flatten(),
                drawn[half].flatten(),
                advantages.flatten(),
                token_weights(lengths, self.algorithm.normalize).float(),
                clip_low=self.algorithm.clip_low,
                clip_high=self.algorithm.clip_high,
                loss=self.algorithm.loss,
                sequences=torch.arange(len(advantages)).repeat_interleave(self.length),
            )
            torch.autograd.backward(loss)
            total += normalizer(lengths, self.algorithm.normalize, self.length)
        assert self.logits.grad is not None
        self.logits.grad /= total
        self.optimizer.step()
        if self.values.grad is not None:
            self.values.grad /= n * self.length
            self.fit.step()
            self.fit.zero_grad()
        self.baselines.applied()
        self.baselines.discard()

    def _advantages(self, rows: list[Row], seen: torch.Tensor) -> torch.Tensor:
        """[n, length]; leaves the gradient of the values' loss."""
        if self.algorithm.value_function is None:
            return self.baselines.estimate(rows).advantages.float()[:, None].expand(-1, self.length)
        values = self.values[seen].flatten()
        earned = torch.zeros(len(rows), self.length)
        earned[:, -1] = torch.tensor([row.reward for row in rows])
        lengths, old = [self.length] * len(rows), values.detach()
        found = gae(earned.flatten(), old, lengths, gamma=1.0, gae_lambda=0.95).float()
        loss = value_loss(values, found + old, old, 0.2)
        torch.autograd.backward(loss.sum())
        self.surprise = float(loss.detach().mean())
        return found.view(-1, self.length)

    def _row(self, index: int, rewards: list[float]) -> Row:
        first = index // GROUP * GROUP
        group = tuple(sorted(rewards[first : first + GROUP]))
        ids, drawn = np.zeros(2, np.int64), np.zeros(1, np.float32)
        return Row(
            str(index),
            ids,
            1,
            drawn,
            rewards[index],
            group,
            0,
            group=str(first),
            trajectory=str(index),
            agent=self.name,
        )

    def probabilities(self) -> torch.Tensor:
        """[length, actions]"""
        return torch.softmax(self.logits.detach(), -1)


def _algorithm(advantage: str, loss: str, normalize: str = "token") -> AlgorithmSpec:
    values = {"advantage": advantage, "loss": loss, "normalize": normalize}
    return AlgorithmSpec.model_validate(values)


@pytest.mark.parametrize(("advantage", "loss"), PAIRS)
def test_a_bandit_is_solved(advantage: str, loss: str) -> None:
    """Four arms, rewards of zero or one."""
    generator = torch.Generator().manual_seed(0)
    player = Player("player", len(ARMS), 1, _algorithm(advantage, loss))
    for _ in range(80):
        actions = player.act(QUERIES * GROUP, generator)
        chances = ARMS[actions[:, 0]]
        player.learn(actions, torch.bernoulli(chances, generator=generator).tolist())
    found = player.probabilities()[0]
    assert found.argmax() == ARMS.argmax()
    assert float(found @ ARMS) > 0.8


@pytest.mark.parametrize(("advantage", "loss"), PAIRS)
def test_a_cooperative_matrix_game_is_solved(advantage: str, loss: str) -> None:
    """Two agents with one payoff, each of which sees only its own action. Answers have two tokens,
    the second of which does not matter, so that ratios of sequences and of tokens differ."""
    generator = torch.Generator().manual_seed(1)
    algorithm = _algorithm(advantage, loss, "constant")
    players = [Player(name, len(PAYOFF), 2, algorithm) for name in ("row", "column")]
    for _ in range(80):
        rows, columns = (player.act(QUERIES * GROUP, generator) for player in players)
        rewards = PAYOFF[rows[:, 0], columns[:, 0]].tolist()
        for player, actions in zip(players, (rows, columns), strict=True):
            player.learn(actions, rewards)
    row, column = (player.probabilities()[0] for player in players)
    assert float(row @ PAYOFF @ column) > 0.85
    assert (row.argmax().item(), column.argmax().item()) == (1, 1)
    # Irrelevant tokens were not decided.
    assert all(float(player.probabilities()[1].max()) < 0.9 for player in players)


@pytest.mark.parametrize(
    "loss", [LOSSES[0], *(pytest.param(loss, marks=pytest.mark.slow) for loss in LOSSES[1:])]
)
def test_a_team_critic_solves_a_game_of_secrets(loss: str) -> None:
    """MAPPO: the agents' reward is their payoff plus a third party's draw, which neither sees.
    Values of the whole team's observations remove this noise; values of one agent's cannot."""
    surprise, found = {}, {}
    for observes in ("agent", "team"):
        generator = torch.Generator().manual_seed(2)
        algorithm = _algorithm("gae", loss, "constant")
        players = [Player(name, 3, 2, algorithm, states=2) for name in ("row", "column")]
        for _ in range(80):
            rows, columns = (player.act(QUERIES * GROUP, generator) for player in players)
            secret = torch.randint(2, (QUERIES * GROUP,), generator=generator)
            rewards = (PAYOFF[rows[:, 0], columns[:, 0]] + 2.0 * secret).tolist()
            seen = secret if observes == "team" else torch.zeros_like(secret)
            for player, actions in zip(players, (rows, columns), strict=True):
                player.learn(actions, rewards, seen)
        row, column = (player.probabilities()[0] for player in players)
        found[observes] = float(row @ PAYOFF @ column)
        surprise[observes] = players[0].surprise
    assert surprise["team"] < 0.2 * surprise["agent"]
    assert found["team"] > 0.85
