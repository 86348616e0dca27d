"""Games with a known optimum, solved by every advantage with every loss, always a step behind.

Tables of logits instead of a model; advantages and baselines as the trainer has them. Samples are
of the version before the one that trains on them, so the losses have something to clip.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.baselines import Baselines
from services.trainer.rows import Row
from troupe.algorithms import grpo_loss_sum, normalizer, token_weights
from troupe.job import AlgorithmSpec

ADVANTAGES = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "rae"]
LOSSES = ["ppo_clip", "gspo", "cispo", "dppo_mask"]
QUERIES, GROUP = 4, 8
# Expected rewards of the bandit's arms; what two agents get together for their actions.
ARMS = torch.tensor([0.1, 0.5, 0.9, 0.3])
PAYOFF = torch.tensor([[0.2, 0.0, 0.3], [0.1, 1.0, 0.4], [0.3, 0.2, 0.5]])


class Player:
    """One agent with a policy of its own: a distribution over `actions`, drawn `length` times."""

    def __init__(self, name: str, actions: int, length: int, algorithm: AlgorithmSpec) -> None:
        self.name, self.length, self.algorithm = name, length, algorithm
        self.logits = torch.zeros(length, actions, requires_grad=True)
        self.before = self.logits.detach().clone()
        self.optimizer = torch.optim.Adam([self.logits], lr=0.1)
        self.baselines = Baselines(algorithm)

    def act(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """int64 [count, length], of the version before."""
        probabilities = torch.softmax(self.before, -1)
        drawn = torch.multinomial(probabilities, count, replacement=True, generator=generator)
        return drawn.T

    def learn(self, actions: torch.Tensor, rewards: list[float]) -> None:
        """One update with what `act` gave, in two micro-batches."""
        n = len(rewards)
        positions = torch.arange(self.length).expand(n, -1)
        drawn = torch.log_softmax(self.before, -1)[positions, actions]
        rows = [self._row(i, rewards) for i in range(n)]
        if self.baselines.needs_whole_step:
            self.baselines.measure(rows)
        self.before = self.logits.detach().clone()
        self.optimizer.zero_grad()
        total = 0
        for half in (slice(0, n // 2 - 3), slice(n // 2 - 3, n)):
            advantages = self.baselines.advantages(rows[half]).float()
            now = torch.log_softmax(self.logits, -1)[positions[half], actions[half]]
            lengths = [self.length] * len(advantages)
            loss = grpo_loss_sum(
                now.flatten(),
                drawn[half].flatten(),
                advantages.repeat_interleave(self.length),
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
        self.baselines.applied()
        self.baselines.discard()

    def _row(self, index: int, rewards: list[float]) -> Row:
        first = index // GROUP * GROUP
        group = tuple(sorted(rewards[first : first + GROUP]))
        nothing = np.zeros(0, np.float32)
        ids = np.zeros(1, np.int64)
        return Row(str(index), ids, 1, nothing, rewards[index], group, 0, agent=self.name)

    def probabilities(self) -> torch.Tensor:
        """[length, actions]"""
        return torch.softmax(self.logits.detach(), -1)


def _algorithm(advantage: str, loss: str, normalize: str = "token") -> AlgorithmSpec:
    values = {"advantage": advantage, "loss": loss, "normalize": normalize}
    return AlgorithmSpec.model_validate(values)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_cooperative_matrix_game_is_solved(advantage: str, loss: str) -> None:
    """Two agents with one payoff; each sees its own action only. Answers are of two tokens, of
    which the second does not matter: sequence ratios differ from those of tokens."""
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
    # What does not matter was not decided.
    assert all(float(player.probabilities()[1].max()) < 0.9 for player in players)
