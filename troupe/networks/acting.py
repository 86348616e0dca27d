"""`ActingNetwork`: draws the actions of one policy's agents in all copies at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from troupe.job.sections.network import NetworkSpec
from troupe.networks.modules import ILLEGAL, Networks, draw, identity_width, likeliest
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument


class Drawn(NamedTuple):
    """Actions of one step, with their log-probs."""

    actions: torch.Tensor
    """int64 [B, A], or float32 [B, A, D] normalized so that -1 is the lowest value and 1 the
    highest; values beyond are clipped before the environment's step."""
    log_probs: torch.Tensor
    """[B, A]; zero for deterministic actions with noise."""


class ActingNetwork(nn.Module):
    """The part of a policy that acts. Learners publish its `state_dict`: `policy.*`, `log_std` with
    continuous PPO, `epsilon` with Q-learning."""

    epsilon: torch.Tensor

    def __init__(self, spec: NetworkSpec, spaces: Spaces, agents: int) -> None:
        super().__init__()
        self.spec, self.spaces, self.agents = spec, spaces, agents
        self.paradigm = spec.learning.paradigm
        self.identity = identity_width(spec, agents)
        inputs = spaces.observation + self.identity
        self.policy = Networks(spec, agents, inputs, spaces.actions)
        self.learns_values = self.paradigm in ("dqn", "vdn", "qmix")
        if self.draws and spaces.continuous:
            self.log_std = nn.Parameter(torch.zeros(spaces.actions))
        if spec.learning.paradigm in ("dqn", "vdn", "qmix"):
            self.register_buffer("epsilon", torch.tensor(spec.learning.epsilon[0]))
        self._memory: list[torch.Tensor | None] = []
        self._inputs = torch.empty(0)
        self._who: list[int] = []

    @property
    def draws(self) -> bool:
        """Whether the learned policy is stochastic (PPO), so that it samples even without
        exploration; in other policies randomness only serves exploration."""
        return self.paradigm in ("ppo", "mappo")

    def begin(self, copies: int, who: Sequence[int] | None = None) -> None:
        """Begin episodes in `copies` copies. `who`: indices of the agents that act, axis A of `act`
        from now on; None: all."""
        chosen = list(range(self.agents) if who is None else who)
        self._memory = [None] * (1 if len(self.policy.members) == 1 else len(chosen))
        if len(self._inputs) != copies or chosen != self._who:
            width = self.spaces.observation + self.identity
            self._inputs, self._who = torch.zeros(copies, len(chosen), width), chosen
            if self.identity:
                self._inputs[..., self.spaces.observation :] = torch.eye(self.agents)[chosen]

    def act(
        self,
        observations: torch.Tensor,
        legal: torch.Tensor | None,
        generator: torch.Generator,
        explore: bool,
        acting: torch.Tensor | None = None,
    ) -> Drawn:
        """Return actions of the next step of all copies, after `begin`.

        `observations` [B, A, O]; `legal` [B, A, n], None: all actions are legal; `acting` [B, A]:
        the agents whose turn it is; the memory of other agents does not change. Random numbers are
        drawn from `generator`.
        """
        out = self._out(observations, legal, acting)
        if self.spaces.continuous:
            return self._continuous(out, generator, explore)
        if self.learns_values:
            return self._epsilon_greedy(out, legal, generator, explore)
        return Drawn(*(draw(out, generator) if explore else likeliest(out)))

    def probabilities(self, observations: torch.Tensor, legal: torch.Tensor | None) -> torch.Tensor:
        """Return probabilities of the discrete actions of the next step without exploration [B, A,
        n]. If the policy does not sample (`draws`), the best action has probability 1."""
        out = self._out(observations, legal, None)
        if self.draws:
            return out.double().softmax(-1)
        return nn.functional.one_hot(out.argmax(-1), out.shape[-1]).double()

    def _out(
        self, observations: torch.Tensor, legal: torch.Tensor | None, acting: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the networks' outputs for the next step; `ILLEGAL` for illegal actions."""
        if self.identity:
            self._inputs[..., : self.spaces.observation] = observations
            observations = self._inputs
        before = list(self._memory)
        out, self._memory = self.policy.step(observations, self._memory, self._who)
        if acting is not None and self.policy.recurrent:
            # As learners see it: an agent's sequence consists of its own decisions.
            turns = [acting.flatten()] if len(before) == 1 else list(acting.unbind(1))
            for i, (turn, old, new) in enumerate(zip(turns, before, self._memory, strict=True)):
                assert new is not None, "a step was computed"
                kept = torch.zeros_like(new) if old is None else old
                self._memory[i] = torch.where(turn[:, None], new, kept)
        if legal is not None and not self.spaces.continuous:
            out = out.masked_fill(~legal, ILLEGAL)
        return out

    def _epsilon_greedy(
        self,
        values: torch.Tensor,
        legal: torch.Tensor | None,
        generator: torch.Generator,
        explore: bool,
    ) -> Drawn:
        best = values.argmax(-1)
        if not explore:
            return Drawn(best, torch.zeros_like(best, dtype=torch.float32))
        epsilon = self.epsilon
        scores = torch.rand(values.shape, generator=generator)
        if legal is not None:
            scores = scores.masked_fill(~legal, -1.0)
            choices: torch.Tensor = legal.sum(-1)
        else:
            choices = torch.tensor(float(self.spaces.actions))
        random = torch.rand(best.shape, generator=generator) < epsilon
        actions = torch.where(random, scores.argmax(-1), best)
        probabilities = epsilon / choices + (1 - epsilon) * (actions == best)
        return Drawn(actions, probabilities.log())

    def _continuous(self, out: torch.Tensor, generator: torch.Generator, explore: bool) -> Drawn:
        learning = self.spec.learning
        if learning.paradigm == "maddpg":
            out = out.tanh()
            if explore:
                noise = torch.empty_like(out).normal_(generator=generator)
                out = (out + learning.noise * noise).clamp_(-1, 1)
            return Drawn(out, torch.zeros(out.shape[:-1]))
        std = self.log_std.exp()
        noise = torch.zeros_like(out)
        if explore:
            noise.normal_(generator=generator)
        log_probs = -0.5 * noise.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return Drawn(out + std * noise, log_probs.sum(-1))

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load published weights. Raises InvalidArgument naming a tensor that is missing, unknown
        or of another shape; nothing has changed then."""
        check_tensors(self.state_dict(), weights, "weights", "network")
        self.load_state_dict(dict(weights))


def check_tensors(
    own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], field: str, owner: str
) -> None:
    """Raise InvalidArgument naming a tensor that is missing, unknown or of another shape."""
    for name in sorted(own.keys() | given.keys()):
        if name not in own or name not in given:
            problem = "is missing" if name in own else f"is not a tensor of this {owner}"
            raise InvalidArgument(problem, field=field, value=name)
        expected, found = list(own[name].shape), list(given[name].shape)
        if found != expected:
            raise InvalidArgument(
                f"has shape {found}, but this {owner}'s has {expected}", field=field, value=name
            )
