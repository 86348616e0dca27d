"""`Actor`: plays whole episodes of all copies, with one forward pass per policy and step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from troupe.job.network import NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.fragments import Fragment
from troupe.networks.vector import Observed, VectorEnvironment
from troupe.rpc.errors import InvalidArgument, NotFound


@dataclass(frozen=True)
class Seat:
    """A policy and the agents that it plays."""

    network: NetworkSpec
    agents: tuple[str, ...]
    """The agents that it plays, in the environment's order."""
    roster: tuple[str, ...] = ()
    """The agents that its network was made for, in that order; empty: the same."""


@dataclass(frozen=True)
class PlayedCopies:
    """One episode of every copy."""

    fragments: dict[str, Fragment]
    """By policy."""
    returns: NDArray[np.float64]
    """[B, A]: undiscounted returns of all agents of the environment."""
    lengths: NDArray[np.int32]
    """[B]"""


class Actor:
    """Plays an environment's copies with several policies.

    The episodes of `sample` are a function of the weights and its seed.
    """

    def __init__(self, environment: VectorEnvironment, seats: Mapping[str, Seat]) -> None:
        """`seats` by policy. Raises InvalidArgument unless every agent is played by exactly one
        policy, and is in its roster."""
        played = sorted(agent for seat in seats.values() for agent in seat.agents)
        if played != sorted(environment.agents):
            raise InvalidArgument(
                "every agent of the environment is played by exactly one policy",
                field="agents",
                value=", ".join(played),
                remedy=f"The agents are {', '.join(environment.agents)}.",
            )
        self._environment = environment
        self._players = {name: _Player(environment, name, seat) for name, seat in seats.items()}

    def load(self, policy: str, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights (`NetworkTrainer.published`) for the next episodes.

        Raises InvalidArgument naming a tensor that is missing or does not fit, NotFound for an
        unknown policy.
        """
        if policy not in self._players:
            raise NotFound("does not play here", field="policy", value=policy)
        player = self._players[policy]
        player.network.take(weights)
        player.version = version

    # Copies that have ended may return values that are not finite.
    @np.errstate(over="ignore", invalid="ignore")
    @torch.inference_mode()
    def sample(
        self, seed: int, *, explore: bool = True, earnest: Collection[str] = ()
    ) -> PlayedCopies:
        """One whole episode of every copy.

        `explore=False`: always the likeliest or best action, for evaluation. `earnest`: policies
        that do not explore and sample only if they are stochastic (`ActingNetwork.draws`). Raises
        NotFound for a policy without weights."""
        environment, spaces = self._environment, self._environment.spaces
        players = list(self._players.values())
        exploring = [
            explore and (one.network.draws or one.policy not in earnest) for one in players
        ]
        seeds = np.random.SeedSequence(seed).generate_state(1 + len(players), np.uint64)
        observed = environment.reset(int(seeds[0] >> np.uint64(1)))
        _check_finite(observed, None, np.ones(environment.copies, np.bool_), 0)
        for player, own in zip(players, seeds[1:], strict=True):
            player.begin(observed, int(own >> np.uint64(1)))
        copies, agents = environment.copies, len(environment.agents)
        shape = (copies, agents, spaces.actions) if spaces.continuous else (copies, agents)
        actions: Any = np.zeros(shape, np.float32 if spaces.continuous else np.int64)
        rewards = np.zeros((spaces.steps, copies, agents), np.float32)
        terminated = np.zeros(copies, np.bool_)
        lengths = np.zeros(copies, np.int32)
        alive = np.ones(copies, np.bool_)
        step = 0
        while step < spaces.steps:
            for player, explores in zip(players, exploring, strict=True):
                player.act(step, observed, actions, explores)
            stepped = environment.step(actions)
            observed = stepped.observed
            _check_finite(observed, stepped.rewards, alive, step + 1)
            rewards[step] = stepped.rewards
            lengths += alive
            terminated |= alive & stepped.terminated
            alive &= ~(stepped.terminated | stepped.truncated)
            step += 1
            if not alive.any():
                break
        rewards = rewards[:step]
        if (lengths < step).any():
            rewards[np.arange(step)[:, None] >= lengths] = 0
        fragments = {
            player.policy: player.finish(step, observed, rewards, lengths, terminated)
            for player in players
        }
        return PlayedCopies(fragments, rewards.sum(axis=0, dtype=np.float64), lengths)

    def evaluate(self, seeds: Sequence[int]) -> NDArray[np.float64]:
        """Returns [len(seeds) * B, A] without exploration."""
        return np.concatenate([self.sample(seed, explore=False).returns for seed in seeds])


class NotFinite(ValueError):
    """An environment returned NaN, infinity or a number beyond float32 in its `what`."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


def _check_finite(observed: Observed, rewards: Any, alive: Any, step: int) -> None:
    """Raise `NotFinite` for values of a step (0: the reset) that are not finite, in copies that had
    not ended: they would turn all weights into NaN."""
    given = {"observations": observed.observations, "state": observed.state, "rewards": rewards}
    for name, values in given.items():
        if values is None:
            continue
        with np.errstate(over="ignore"):
            array = np.asarray(values, np.float32)
        if np.isfinite(array).all():
            continue
        bad = ~np.isfinite(array.reshape(len(array), -1))
        for copy in np.flatnonzero(alive & bad.any(axis=1)):
            value = np.asarray(values).reshape(len(array), -1)[copy, int(bad[copy].argmax())]
            when = f"step {step}" if step else "reset"
            message = f"its {name} after {when} are not finite: {value} in copy {copy}"
            raise NotFinite(name, message)


class _Player:
    """The network and recorded arrays of one policy during an episode."""

    def __init__(self, environment: VectorEnvironment, policy: str, seat: Seat) -> None:
        self.policy, self.version = policy, -1
        self.agents = tuple(agent for agent in environment.agents if agent in seat.agents)
        roster = seat.roster or self.agents
        if unknown := sorted(set(self.agents) - set(roster)):
            raise InvalidArgument(
                f"policy {policy} was made for {', '.join(roster)} only",
                field="agents",
                value=unknown[0],
            )
        self.network = ActingNetwork(seat.network, environment.spaces, len(roster))
        self._who = [roster.index(agent) for agent in self.agents]
        self._environment = environment
        at = [environment.agents.index(agent) for agent in self.agents]
        # Where agents are neighbours, their part of an array is a view.
        contiguous = at == list(range(at[0], at[0] + len(at)))
        self._at: Any = slice(at[0], at[0] + len(at)) if contiguous else np.array(at)
        self._generator = torch.Generator()
        self._arrays: dict[str, Any] = {}

    def begin(self, observed: Observed, seed: int) -> None:
        if self.version < 0:
            raise NotFound(
                "has no weights yet",
                field="policy",
                value=self.policy,
                remedy="Call Actor.load first.",
            )
        self._generator.manual_seed(seed)
        spaces, copies = self._environment.spaces, self._environment.copies
        self.network.begin(copies, self._who)
        steps, agents = spaces.steps, len(self.agents)
        drawn = (spaces.actions,) if spaces.continuous else ()
        # New arrays: those of the former episodes belong to its fragments.
        self._arrays = {
            "observations": np.empty((steps + 1, copies, agents, spaces.observation), np.float32),
            "state": np.empty((steps + 1, copies, spaces.state), np.float32),
            "actions": np.empty(
                (steps, copies, agents, *drawn), np.float32 if spaces.continuous else np.int64
            ),
            "log_probs": np.empty((steps, copies, agents), np.float32),
        }
        if observed.legal is not None:
            shape = (steps + 1, copies, agents, spaces.actions)
            self._arrays["legal"] = np.empty(shape, np.bool_)
        if observed.acting is not None:
            self._arrays["acting"] = np.empty((steps, copies, agents), np.bool_)

    def _record(self, step: int, observed: Observed) -> None:
        arrays = self._arrays
        arrays["observations"][step] = observed.observations[:, self._at]
        arrays["state"][step] = observed.state
        if observed.legal is not None:
            arrays["legal"][step] = observed.legal[:, self._at]

    def act(self, step: int, observed: Observed, actions: Any, explore: bool) -> None:
        """Write this policy's actions of a step into `actions` of all agents."""
        self._record(step, observed)
        arrays, spaces = self._arrays, self._environment.spaces
        legal = None if observed.legal is None else torch.from_numpy(arrays["legal"][step])
        observations = torch.from_numpy(arrays["observations"][step])
        acting = None
        if observed.acting is not None:
            arrays["acting"][step] = observed.acting[:, self._at]
            acting = torch.from_numpy(arrays["acting"][step])
        drawn = self.network.act(observations, legal, self._generator, explore, acting)
        chosen = drawn.actions.numpy()
        arrays["actions"][step] = chosen
        arrays["log_probs"][step] = drawn.log_probs.numpy()
        if spaces.continuous:
            half, middle = (spaces.high - spaces.low) / 2, (spaces.high + spaces.low) / 2
            chosen = chosen.clip(-1, 1) * half + middle
        actions[:, self._at] = chosen

    def finish(
        self, steps: int, observed: Observed, rewards: Any, lengths: Any, terminated: Any
    ) -> Fragment:
        self._record(steps, observed)
        arrays = {
            name: array[: steps + (name in ("observations", "state", "legal"))]
            for name, array in self._arrays.items()
        }
        arrays |= {
            "rewards": np.ascontiguousarray(rewards[:, :, self._at]),
            "lengths": lengths.copy(),
            "terminated": terminated.copy(),
        }
        if "acting" in arrays:
            arrays["acting"] &= (np.arange(steps)[:, None] < lengths)[..., None]
        self._arrays = {}
        return Fragment(self.policy, self.version, self.agents, arrays)
