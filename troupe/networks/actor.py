"""`Actor`: plays whole episodes of all copies, with one forward pass per policy and step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from troupe.contracts import kinds
from troupe.job.sections.network import NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.fragments import Fragment
from troupe.networks.vector import (
    BrokenEnvironment,
    Observed,
    Stepped,
    VectorEnvironment,
    name_of,
)
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
                "every agent of the environment must be played by exactly one policy",
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
        """Play one whole episode of every copy.

        `explore=False`: always the most likely or best action, for evaluation. `earnest`: policies
        that do not explore and sample only if they are stochastic (`ActingNetwork.draws`). Raises
        NotFound for a policy without weights, BrokenEnvironment for values that cannot be played.
        """
        environment, spaces = self._environment, self._environment.spaces
        players = list(self._players.values())
        exploring = [
            explore and (one.network.draws or one.policy not in earnest) for one in players
        ]
        seeds = np.random.SeedSequence(seed).generate_state(1 + len(players), np.uint64)
        observed = environment.reset(int(seeds[0] >> np.uint64(1)))
        for player, own in zip(players, seeds[1:], strict=True):
            player.begin(int(own >> np.uint64(1)))
        copies, agents = environment.copies, len(environment.agents)
        shape = (copies, agents, spaces.actions) if spaces.continuous else (copies, agents)
        actions: Any = np.zeros(shape, np.float32 if spaces.continuous else np.int64)
        rewards = np.zeros((spaces.steps, copies, agents), np.float32)
        terminated = np.zeros((copies, agents), np.bool_)
        lengths = np.zeros((copies, agents), np.int32)
        alive = np.ones((copies, agents), np.bool_)
        _check_shapes(environment, observed, None, 0)
        _check_finite(observed, None, alive, 0)
        observed = _playable(environment, observed, alive, alive, 0)
        step = 0
        while step < spaces.steps:
            for player, explores in zip(players, exploring, strict=True):
                player.act(step, observed, actions, explores)
            stepped = environment.step(actions)
            step += 1
            _check_shapes(environment, stepped.observed, stepped, step)
            _check_finite(stepped.observed, stepped.rewards, alive, step)
            rewards[step - 1] = stepped.rewards
            lengths += alive
            # [B, A], or [B, 1] where all agents end together.
            over, cut = (
                np.asarray(flags).reshape(copies, -1)
                for flags in (stepped.terminated, stepped.truncated)
            )
            terminated |= alive & over
            before, alive = alive, alive & ~(over | cut)
            observed = _playable(environment, stepped.observed, before, alive, step)
            if not alive.any():
                break
        rewards = rewards[:step]
        if (lengths < step).any():
            rewards[np.arange(step)[:, None, None] >= lengths] = 0
        fragments = {
            player.policy: player.finish(step, observed, rewards, lengths, terminated)
            for player in players
        }
        returns = rewards.sum(axis=0, dtype=np.float64)
        return PlayedCopies(fragments, returns, lengths.max(axis=1))

    def evaluate(self, seeds: Sequence[int]) -> NDArray[np.float64]:
        """Return [len(seeds) * B, A] without exploration."""
        return np.concatenate([self.sample(seed, explore=False).returns for seed in seeds])


def _after(step: int) -> str:
    return f"after step {step}" if step else "after reset"


def _check_shapes(
    environment: VectorEnvironment, observed: Observed, stepped: Stepped | None, step: int
) -> None:
    """Raise BrokenEnvironment for an array whose shape contradicts the environment's spaces, since
    NumPy might broadcast it."""
    copies, agents, spaces = environment.copies, len(environment.agents), environment.spaces
    expected: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
        "observations": (observed.observations, [(copies, agents, spaces.observation)]),
        "state": (observed.state, [(copies, spaces.state)]),
        "acting": (observed.acting, [(copies, agents)]),
    }
    if not spaces.continuous:
        expected["legal"] = (observed.legal, [(copies, agents, spaces.actions)])
    if stepped is not None:
        expected["rewards"] = (stepped.rewards, [(copies, agents)])
        expected["terminated"] = (stepped.terminated, [(copies,), (copies, agents)])
        expected["truncated"] = (stepped.truncated, [(copies,), (copies, agents)])
    for name, (array, shapes) in expected.items():
        if array is not None and np.shape(array) not in shapes:
            right = " or ".join(str(list(shape)) for shape in shapes)
            raise BrokenEnvironment(
                f"its {name} {_after(step)} have the shape {list(np.shape(array))}, not {right}",
                field=name,
                remedy="Return arrays of the shapes that its `spaces` declare.",
            )


def _playable(
    environment: VectorEnvironment, observed: Observed, before: Any, alive: Any, step: int
) -> Observed:
    """Return `observed` without undefined values: agents that had ended before the step (false in
    `before` [B, A]) observe zeros, and agents that need not act (false in `alive`) may take any
    action. Raises BrokenEnvironment if an agent that must act has no legal action."""
    seen, legal, acting = observed.observations, observed.legal, observed.acting
    if not before.all():
        seen = np.where(before[..., None], seen, np.float32(0))
    if environment.spaces.continuous:
        legal = None
    if legal is not None:
        legal = np.asarray(legal, np.bool_)
        none: Any = ~legal.any(axis=-1)
        if none.any():
            asked = none & alive if acting is None else none & alive & acting
            for copy, agent in np.argwhere(asked):
                raise BrokenEnvironment(
                    f"the action mask of agent '{environment.agents[agent]}' of "
                    f"{name_of(environment)} {_after(step)} in copy {copy} allows no action, and "
                    "its episode continues",
                    kind="no_legal_action",
                    field="legal",
                    remedy="Allow at least one action, or end the agent's episode.",
                )
            legal = legal | none[..., None]
    return Observed(seen, observed.state, legal, acting)


def _check_finite(observed: Observed, rewards: Any, alive: Any, step: int) -> None:
    """Raise BrokenEnvironment for values that are not finite in a step (0: the reset) of agents
    that had not ended (`alive` [B, A]): they would turn all weights into NaN."""
    given = {"observations": observed.observations, "state": observed.state, "rewards": rewards}
    for name, values in given.items():
        if values is None:
            continue
        with np.errstate(over="ignore"):
            array = np.asarray(values, np.float32)
        if np.isfinite(array).all():
            continue
        bad: Any = ~np.isfinite(array)
        wide = alive.any(axis=1) if name == "state" else alive
        bad &= wide.reshape(*wide.shape, *[1] * (bad.ndim - wide.ndim))
        for at in np.argwhere(bad):
            value = np.asarray(values)[tuple(at)]
            raise BrokenEnvironment(
                f"its {name} {_after(step)} are not finite: {value} in copy {at[0]}",
                kind=kinds.NOT_FINITE,
                field=name,
                remedy=f"Return finite {name}.",
            )


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

    def begin(self, seed: int) -> None:
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
        # New arrays: the arrays of earlier episodes belong to their fragments.
        self._arrays = {
            "observations": np.empty((steps + 1, copies, agents, spaces.observation), np.float32),
            "state": np.empty((steps + 1, copies, spaces.state), np.float32),
            "actions": np.empty(
                (steps, copies, agents, *drawn), np.float32 if spaces.continuous else np.int64
            ),
            "log_probs": np.empty((steps, copies, agents), np.float32),
        }

    def _record(self, step: int, observed: Observed) -> None:
        arrays = self._arrays
        arrays["observations"][step] = observed.observations[:, self._at]
        arrays["state"][step] = observed.state
        if observed.legal is not None:
            flags = self._flags("legal", len(arrays["state"]), observed.legal)
            flags[step] = observed.legal[:, self._at]

    def _flags(self, name: str, steps: int, given: Any) -> Any:
        """Return the recorded array `name`. It is created, all true, when the environment first
        returns such an array."""
        if name not in self._arrays:
            shape = (steps, len(given), len(self.agents), *given.shape[2:])
            self._arrays[name] = np.ones(shape, np.bool_)
        return self._arrays[name]

    def act(self, step: int, observed: Observed, actions: Any, explore: bool) -> None:
        """Write this policy's actions of a step into `actions` of all agents."""
        self._record(step, observed)
        arrays, spaces = self._arrays, self._environment.spaces
        legal = None if observed.legal is None else torch.from_numpy(arrays["legal"][step])
        observations = torch.from_numpy(arrays["observations"][step])
        acting = None
        if observed.acting is not None:
            turns = self._flags("acting", spaces.steps, observed.acting)
            turns[step] = observed.acting[:, self._at]
            acting = torch.from_numpy(turns[step])
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
            "lengths": np.ascontiguousarray(lengths[:, self._at]),
            "terminated": np.ascontiguousarray(terminated[:, self._at]),
        }
        if "acting" in arrays:
            arrays["acting"] &= np.arange(steps)[:, None, None] < arrays["lengths"]
        self._arrays = {}
        return Fragment(self.policy, self.version, self.agents, arrays)
