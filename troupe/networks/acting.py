"""`ActingNetwork`: draws the actions of one policy's agents in all copies at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from troupe.networks.modules import ILLEGAL, Networks, draw, identity_width, likeliest
from troupe.networks.spec import NetworkSpec
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument


class Drawn(NamedTuple):
    """What agents do."""

    actions: torch.Tensor
    """int64 [B, A], or float32 [B, A, D] in halves of the range: -1 is the lowest, 1 the highest;
    may lie beyond, and is clipped on its way to the environment."""
    log_probs: torch.Tensor
    """[B, A]; zero for deterministic actions with noise."""


class ActingNetwork(nn.Module):
    """The part of a policy that plays. Its `state_dict` is what learners publish: `policy.*`, with
    continuous PPO `log_std`, with Q-learning `epsilon`."""

    epsilon: torch.Tensor

    def __init__(self, spec: NetworkSpec, spaces: Spaces, agents: int) -> None:
        super().__init__()
        self.spec, self.spaces, self.agents = spec, spaces, agents
        self.paradigm = spec.learning.paradigm
        self.identity = identity_width(spec, agents)
        inputs = spaces.observation + self.identity
        self.policy = Networks(spec, agents, inputs, spaces.actions)
        self.learns_values = spec.learning.paradigm in ("dqn", "vdn", "qmix")
        if spec.learning.paradigm in ("ppo", "mappo") and spaces.continuous:
            self.log_std = nn.Parameter(torch.zeros(spaces.actions))
        if spec.learning.paradigm in ("dqn", "vdn", "qmix"):
            self.register_buffer("epsilon", torch.tensor(spec.learning.epsilon[0]))
        self._memory: list[torch.Tensor | None] = []
        self._inputs = torch.empty(0)
        self._who: list[int] = []

    @property
    def draws(self) -> bool:
        """Whether chance is a part of what was learned, and not only of how it is explored: such a
        policy draws its actions when it plays in earnest, too."""
        return self.paradigm in ("ppo", "mappo")

    def begin(self, copies: int, who: Sequence[int] | None = None) -> None:
        """New episodes in so many copies, of some of its agents: `who` are their numbers (None: all
        of them), which from now on are the A of `act`."""
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
        """The next step of all copies, `observations` [B, A, O] and `legal` [B, A, n] (None: all
        actions are). The random numbers are the generator's. `acting` [B, A]: whose turn it is;
        the others remember nothing of it. After `begin`."""
        out = self._out(observations, legal, acting)
        if self.spaces.continuous:
            return self._continuous(out, generator, explore)
        if self.learns_values:
            return self._epsilon_greedy(out, legal, generator, explore)
        return Drawn(*(draw(out, generator) if explore else likeliest(out)))

    def probabilities(self, observations: torch.Tensor, legal: torch.Tensor | None) -> torch.Tensor:
        """How likely each discrete action is in the next step [B, A, n] when it plays in earnest:
        what `draws`, is drawn from; else it is the best one for certain."""
        out = self._out(observations, legal, None)
        if self.draws:
            return out.double().softmax(-1)
        return nn.functional.one_hot(out.argmax(-1), out.shape[-1]).double()

    def _out(
        self, observations: torch.Tensor, legal: torch.Tensor | None, acting: torch.Tensor | None
    ) -> torch.Tensor:
        """What the networks say, one step further; of illegal actions `ILLEGAL`."""
        if self.identity:
            self._inputs[..., : self.spaces.observation] = observations
            observations = self._inputs
        before = list(self._memory)
        out, self._memory = self.policy.step(observations, self._memory, self._who)
        if acting is not None and self.policy.recurrent:
            # As learners see it: an episode of an agent consists of its own decisions.
            turns = [acting.flatten()] if len(before) == 1 else list(acting.unbind(1))
            for i, (turn, old, new) in enumerate(zip(turns, before, self._memory, strict=True)):
                assert new is not None, "a step has been made"
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
        strays = torch.rand(best.shape, generator=generator) < epsilon
        actions = torch.where(strays, scores.argmax(-1), best)
        chances = epsilon / choices + (1 - epsilon) * (actions == best)
        return Drawn(actions, chances.log())

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
        """Play with these. Raises InvalidArgument naming the tensor that is missing, unknown or of
        another shape; then nothing has changed."""
        own = self.state_dict()
        for name in sorted(own.keys() | weights.keys()):
            if name not in weights or name not in own:
                what = "is missing" if name in own else "is none of this network's"
                raise InvalidArgument(what, field="weights", value=name)
            expected, found = list(own[name].shape), list(weights[name].shape)
            if found != expected:
                raise InvalidArgument(
                    f"has shape {found}, this network's {expected}", field="weights", value=name
                )
        self.load_state_dict(dict(weights))
