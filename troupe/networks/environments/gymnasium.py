"""Copies of PettingZoo parallel environments and of Gymnasium environments, stepped in turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from troupe.networks.vector import Actions, Observed, Spaces, Stepped
from troupe.rpc.errors import InvalidArgument
from troupe.workflow.loading import load_attribute


class PettingZooCopies:
    """Copies of a PettingZoo parallel environment, stepped one after the other. `action_mask` in a
    copy's `infos` are its legal actions. A copy ends with the first of its agents."""

    def __init__(self, copies: int, entrypoint: str, steps: int, **settings: Any) -> None:
        """`entrypoint`: `module:attribute` of a `parallel_env`, called with `settings`. `steps`:
        longer episodes are truncated. Raises InvalidArgument for spaces that are neither vectors
        nor discrete or bounded actions, and EntrypointError."""
        make = load_attribute(entrypoint, "environment.entrypoint")
        self.copies = copies
        self._copies_of = [make(**settings) for _ in range(copies)]
        first = self._copies_of[0]
        self.agents = tuple(str(agent) for agent in first.possible_agents)
        # The widest spaces of all agents.
        self.spaces = _spaces(first, self.agents, steps)
        self._widths = [first.observation_space(agent).shape[0] for agent in self.agents]
        self._has_state = _state_size(first) is not None
        shape = (copies, len(self.agents), self.spaces.observation)
        self._seen = np.zeros(shape, np.float32)
        self._state = np.zeros((copies, self.spaces.state), np.float32)
        self._legal: Any = None
        if not self.spaces.continuous:
            self._least = np.zeros((len(self.agents), self.spaces.actions), np.bool_)
            for i, agent in enumerate(self.agents):
                self._least[i, : first.action_space(agent).n] = True
        self._over = np.zeros(copies, np.bool_)
        self._step = 0

    def reset(self, seed: int) -> Observed:
        """Reset every copy with a seed of its own."""
        seeds = np.random.SeedSequence(seed).generate_state(self.copies)
        self._over[:] = False
        self._step = 0
        begun = [
            copy.reset(seed=int(own)) for copy, own in zip(self._copies_of, seeds, strict=True)
        ]
        masked = any("action_mask" in info for _, infos in begun for info in infos.values())
        self._legal = None
        if not self.spaces.continuous and (masked or not self._least.all()):
            self._legal = np.repeat(self._least[None], self.copies, axis=0)
        for b, (seen, infos) in enumerate(begun):
            self._write(b, seen, infos)
        return self._observe()

    def step(self, actions: Actions) -> Stepped:
        """int64 [B, A] or float32 [B, A, D]"""
        self._step += 1
        rewards = np.zeros((self.copies, len(self.agents)), np.float32)
        terminated = np.zeros(self.copies, np.bool_)
        truncated = np.full(self.copies, self._step >= self.spaces.steps)
        for b, copy in enumerate(self._copies_of):
            if self._over[b]:
                continue
            taken = {agent: actions[b, i] for i, agent in enumerate(self.agents)}
            seen, gained, ended, cut, infos = copy.step(taken)
            self._write(b, seen, infos)
            rewards[b] = [gained.get(agent, 0.0) for agent in self.agents]
            terminated[b] = any(ended.values())
            truncated[b] |= any(cut.values())
        self._over |= terminated | truncated
        return Stepped(self._observe(), rewards, terminated, truncated & ~terminated)

    def close(self) -> None:
        """Close all copies."""
        for copy in self._copies_of:
            copy.close()
        self._copies_of = self._copies_of[:0]

    def _write(self, b: int, seen: Any, infos: Any) -> None:
        for i, agent in enumerate(self.agents):
            if agent in seen:
                self._seen[b, i, : self._widths[i]] = seen[agent]
            mask = infos.get(agent, {}).get("action_mask")
            if mask is not None and self._legal is not None:
                self._legal[b, i, : len(mask)] = mask
        if self._has_state:
            self._state[b] = self._copies_of[b].state()
        else:
            self._state[b] = self._seen[b].ravel()

    def _observe(self) -> Observed:
        return Observed(self._seen, self._state, self._legal)


def _state_size(copy: Any) -> int | None:
    space = getattr(copy, "state_space", None)
    return None if space is None or len(space.shape) != 1 else int(space.shape[0])


def _spaces(copy: Any, agents: tuple[str, ...], steps: int) -> Spaces:
    widths: list[int] = []
    sizes: list[int] = []
    bounds: set[tuple[float, float] | None] = set()
    for agent in agents:
        seen, doing = copy.observation_space(agent), copy.action_space(agent)
        if seen.shape is None or len(seen.shape) != 1:
            raise _unsupported(agent, seen, "observations that are vectors")
        widths.append(seen.shape[0])
        if hasattr(doing, "n"):
            sizes.append(int(doing.n))
            bounds.add(None)
        elif doing.shape is not None and len(doing.shape) == 1 and doing.is_bounded():
            sizes.append(doing.shape[0])
            bounds.update(
                (float(low), float(high)) for low, high in zip(doing.low, doing.high, strict=True)
            )
        else:
            raise _unsupported(agent, doing, "discrete actions, or a bounded vector")
    if len(bounds) != 1:
        raise _unsupported(
            agents[0], copy.action_space(agents[0]), "one kind of action for all agents"
        )
    bound = bounds.pop()
    state = _state_size(copy) or max(widths) * len(agents)
    if bound is None:
        return Spaces(max(widths), state, max(sizes), steps)
    return Spaces(max(widths), state, max(sizes), steps, True, bound[0], bound[1])


def _unsupported(agent: str, space: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(
        f"agent '{agent}' has {space}; needed are {wanted}",
        field="environment.entrypoint",
        remedy="Wrap the environment (SuperSuit has wrappers).",
    )


_AGENT = "agent"


class GymnasiumCopies(PettingZooCopies):
    """Copies of a Gymnasium environment; its agent is `agent`, its state the observation."""

    def __init__(self, copies: int, id: str, steps: int, **settings: Any) -> None:
        """`id` as Gymnasium knows it. Raises as `PettingZooCopies`."""
        super().__init__(
            copies,
            "troupe.networks.environments.gymnasium:OnlyAgent",
            steps,
            id=id,
            settings=settings,
        )


class OnlyAgent:
    """A Gymnasium environment as a PettingZoo parallel environment of one agent."""

    def __init__(self, id: str, settings: dict[str, Any]) -> None:
        import gymnasium

        self._inner = gymnasium.make(id, **settings)
        self.possible_agents = [_AGENT]

    def observation_space(self, agent: str) -> Any:
        """The observation space."""
        return self._inner.observation_space

    def action_space(self, agent: str) -> Any:
        """The action space."""
        return self._inner.action_space

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment."""
        seen, info = self._inner.reset(seed=seed)
        return {_AGENT: seen}, {_AGENT: info}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Step the environment by the agent's action."""
        return tuple({_AGENT: value} for value in self._inner.step(actions[_AGENT]))

    def close(self) -> None:
        """Close the environment."""
        self._inner.close()
