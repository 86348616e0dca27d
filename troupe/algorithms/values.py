"""Generalized advantage estimation (GAE), and the loss that fits its value function.

Symbols: s_t the context before token t, V(s_t) its predicted return, r_t the reward of token t,
gamma the discount, lambda the trace decay, delta_t a temporal difference, A_t the advantage, R_t
the return to which V(s_t) is fitted.

A *chain* is all tokens that one agent (one seat of a game) generates in one trajectory, turn after
turn: one episode. s_t is the prompt of t's turn and the part of its response before t. Text that
other agents and the environment add between two turns is therefore part of the transition from the
last token of one turn to the first token of the next. r_t is zero except at the last token of a
turn with its own reward, and at the last token of the chain, which earns its turn's reward plus the
agent's. V is zero after the end.

gae: delta_t = r_t + gamma V(s_{t+1}) - V(s_t), A_t = sum_l (gamma lambda)^l delta_{t+l}.
    Schulman et al. 2016 (GAE), equations 11, 12 and 16. R_t = A_t + V(s_t), the lambda-return.
value loss: 1/2 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2). Schulman et al. 2017 (PPO),
    equation 9's L^VF, clipped as in its authors' code (`baselines/ppo2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def chains(
    trajectories: Sequence[str],
    agents: Sequence[str],
    names: Sequence[str],
    turns: Sequence[int],
    lengths: Sequence[int],
) -> list[list[int]]:
    """Return the positions of the samples of each chain, in the order of turns.

    All arguments are [n]: the ids of trajectories and agents, the names of chains, the positions of
    turns, the numbers of response tokens. Samples without a response are left out.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for i in sorted(range(len(turns)), key=turns.__getitem__):
        if lengths[i]:
            found.setdefault((trajectories[i], agents[i], names[i]), []).append(i)
    return list(found.values())


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: Sequence[int],
    *,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Return the GAE advantages A_t of concatenated chains with these `lengths`, float64 [T] on the
    CPU.

    `rewards` r_t and `values` V(s_t) are [T], T = sum(lengths). A chain's advantages are bitwise
    independent of the other chains. Raises ValueError if lengths do not match.
    """
    total = sum(lengths)
    if rewards.shape != (total,) or values.shape != (total,):
        shapes = f"rewards {list(rewards.shape)} and values {list(values.shape)}"
        raise ValueError(f"{shapes}, but chains of {total} tokens together")
    r, v = rewards.to(torch.float64).tolist(), values.to(torch.float64).tolist()
    found = [0.0] * total
    end = total
    for length in reversed(lengths):
        following = advantage = 0.0
        for t in range(end - 1, end - length - 1, -1):
            advantage = r[t] + gamma * following - v[t] + gamma * gae_lambda * advantage
            following = v[t]
            found[t] = advantage
        end -= length
    return torch.tensor(found, dtype=torch.float64)


def clipped_values(values: torch.Tensor, old_values: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the clipped values clip(V, V_old - e, V_old + e) per token [T]; `clip` is e > 0."""
    return old_values + torch.clamp(values - old_values, -clip, clip)


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return PPO's value loss 1/2 max((V - R)^2, (clip(V) - R)^2) per token [T].

    `clip` 0: 1/2 (V - R)^2. Gradients flow through `values`; `old_values` are V when the step
    began. While V is unchanged, as in the first update of a step, the clip has no effect.
    """
    error = (values - returns).square()
    if clip > 0:
        error = torch.maximum(error, (clipped_values(values, old_values, clip) - returns).square())
    return 0.5 * error


@dataclass
class ValueStatistics:
    """Accumulator of critic metrics, how well values predict returns: `add`, then read `metrics`.

    Sums stay tensors until they are read, so that adding never waits for a device.
    """

    tokens: int = 0
    loss: torch.Tensor | float = 0.0
    values: torch.Tensor | float = 0.0
    returns: torch.Tensor | float = 0.0
    return_squares: torch.Tensor | float = 0.0
    errors: torch.Tensor | float = 0.0
    error_squares: torch.Tensor | float = 0.0
    clipped: torch.Tensor | float = 0.0

    @torch.no_grad()
    def add(
        self,
        values: torch.Tensor,
        returns: torch.Tensor,
        old_values: torch.Tensor,
        clip: float,
    ) -> None:
        """Add T tokens, all arguments [T]."""
        v, r, old = (t.detach().to(torch.float64) for t in (values, returns, old_values))
        error = r - v
        self.tokens += v.numel()
        self.loss = self.loss + value_loss(v, r, old, clip).sum()
        self.values = self.values + v.sum()
        self.returns = self.returns + r.sum()
        self.return_squares = self.return_squares + r.square().sum()
        self.errors = self.errors + error.sum()
        self.error_squares = self.error_squares + error.square().sum()
        if clip > 0:
            self.clipped = self.clipped + ((v - old).abs() > clip).sum()

    def metrics(self) -> dict[str, float]:
        """Return the metrics: means over all tokens added.

        `critic/explained_variance` is 1 - Var(R - V) / Var(R): 1 for perfect values, 0 for any
        constant, negative for worse; 0 if returns do not vary.
        """
        n = max(self.tokens, 1)
        mean, bias = float(self.returns) / n, float(self.errors) / n
        variance = float(self.return_squares) / n - mean * mean
        left = float(self.error_squares) / n - bias * bias
        # The computed variance of equal returns is not exactly zero but a rounding error.
        varies = variance > 1e-12 * max(1.0, mean * mean)
        return {
            "loss/value": float(self.loss) / n,
            "critic/value_mean": float(self.values) / n,
            "critic/return_mean": mean,
            "critic/explained_variance": 1.0 - left / variance if varies else 0.0,
            "critic/clip_fraction": float(self.clipped) / n,
        }
