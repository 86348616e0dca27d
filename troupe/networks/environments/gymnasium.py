"""Copies of PettingZoo parallel environments and of Gymnasium environments, stepped in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from troupe.networks.environments.spaces import MASK, ActionSpace, ObservedSpace
from troupe.networks.vector import Actions, BrokenEnvironment, Observed, Spaces, Stepped
from troupe.rpc.errors import InvalidArgument
from troupe.workflow.loading import load_attribute

_RESET: Final = ("observations", "infos")
_STEP: Final = ("observations", "rewards", "terminations", "truncations", "infos")


class PettingZooCopies:
    """Copies of a PettingZoo parallel environment, stepped one after the other.

    Agents may join an episode late and leave it early; a copy ends with its last agent. Legal
    actions are `action_mask` in an agent's `infos` or in its observation; an agent without one may
    take any action. Actions of a `Box` are scaled from [-1, 1] to its bounds."""

    name = ""
    """The environment's name in errors."""

    def __init__(
        self,
        copies: int,
        entrypoint: str,
        steps: int,
        make_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`entrypoint`: `module:attribute` of a `parallel_env`, called with `settings` and
        `make_args`, which may share names with parameters here. `steps`: longer episodes are
        truncated. Raises InvalidArgument for spaces that a network cannot play (`spaces.py`), and
        EntrypointError."""
        make = load_attribute(entrypoint, "environment.entrypoint")
        self.copies = copies
        self.name = self.name or entrypoint
        self._copies_of = [make(**settings, **(make_args or {})) for _ in range(copies)]
        first = self._copies_of[0]
        if hasattr(first, "agent_iter"):
            raise InvalidArgument(
                "makes an AEC environment, whose agents take turns",
                field="environment.entrypoint",
                value=entrypoint,
                remedy="Name its `parallel_env`, or convert it: pettingzoo.utils.aec_to_parallel.",
            )
        # The environment's own names, which need not be texts.
        self._names = tuple(first.possible_agents)
        self.agents = tuple(map(str, self._names))
        owners = [f"agent '{name}' of {self.name}" for name in self.agents]
        self._views = [
            ObservedSpace(first.observation_space(name), owner)
            for name, owner in zip(self._names, owners, strict=True)
        ]
        self._moves = [
            ActionSpace(first.action_space(name), owner)
            for name, owner in zip(self._names, owners, strict=True)
        ]
        self._whole = _state_of(first)
        # The widest spaces of all agents.
        width = max(view.width for view in self._views)
        self.spaces = Spaces(
            width,
            self._whole.width if self._whole else width * len(self.agents),
            max(move.size for move in self._moves),
            steps,
            _continuous(first, self._names, self._moves),
        )
        shape = (copies, len(self.agents))
        self._seen = np.zeros((*shape, width), np.float32)
        self._state = np.zeros((copies, self.spaces.state), np.float32)
        # The actions in each agent's space, before masks.
        sizes = np.array([move.size for move in self._moves])
        self._least = np.arange(self.spaces.actions) < sizes[:, None]
        self._legal: Any = None
        self._ended = np.zeros(shape, np.bool_)
        self._absent = np.zeros(shape, np.bool_)
        self._step = 0

    def reset(self, seed: int) -> Observed:
        """Reset every copy with a seed of its own."""
        seeds = np.random.SeedSequence(seed).generate_state(self.copies)
        self._step = 0
        self._ended[:] = False
        self._seen[:] = 0
        self._legal = None
        if not self.spaces.continuous and not self._least.all():
            self._legal = np.repeat(self._least[None], self.copies, axis=0)
        for b, (copy, own) in enumerate(zip(self._copies_of, seeds, strict=True)):
            self._write(b, *_unpacked(copy.reset(seed=int(own)), "reset", _RESET))
        return self._observe()

    def step(self, actions: Actions) -> Stepped:
        """Step every copy by `actions`, int64 [B, A] or float32 [B, A, D]."""
        self._step += 1
        shape = self._ended.shape
        rewards = np.zeros(shape, np.float32)
        terminated, truncated = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        for b, copy in enumerate(self._copies_of):
            if self._ended[b].all():
                continue
            present = set(copy.agents)
            taken = {
                name: self._moves[i].action(actions[b, i])
                for i, name in enumerate(self._names)
                if name in present
            }
            seen, gained, over, cut, infos = _unpacked(copy.step(taken), "step", _STEP)
            self._write(b, seen, infos)
            rewards[b] = [self._reward(gained.get(name, 0.0), b) for name in self._names]
            terminated[b] = [bool(over.get(name, False)) for name in self._names]
            truncated[b] = [bool(cut.get(name, False)) for name in self._names]
            truncated[b] |= self._step >= self.spaces.steps
            # Agents that never joined, or left without a flag, end with the copy.
            if (self._ended[b] | terminated[b] | truncated[b] | self._absent[b]).all():
                truncated[b] |= truncated[b].any()
                terminated[b] |= ~truncated[b]
        self._ended |= terminated | truncated
        return Stepped(self._observe(), rewards, terminated, truncated & ~terminated)

    def close(self) -> None:
        """Close all copies."""
        for copy in self._copies_of:
            copy.close()
        self._copies_of = self._copies_of[:0]

    def _write(self, b: int, seen: Any, infos: Any) -> None:
        copy = self._copies_of[b]
        when = f"after {f'step {self._step}' if self._step else 'reset'} in copy {b}"
        present = set(copy.agents)
        if unknown := present.difference(self._names):
            raise BrokenEnvironment(
                f"{when} its agents include {sorted(map(str, unknown))}, which are not among its "
                "`possible_agents`",
                field="agents",
                remedy="Name all agents that an episode may have in `possible_agents`.",
            )
        for name, gone in zip(self._names, self._ended[b] & self._absent[b], strict=True):
            if gone and name in present:
                raise BrokenEnvironment(
                    f"agent '{name}' is there again {when}, after its episode ended",
                    field="agents",
                    remedy="End an agent's episode when it does not return: until then leave it "
                    "out of `agents`, without a flag.",
                )
        self._absent[b] = [name not in present for name in self._names]
        # Agents that have left are no longer seen.
        self._seen[b, self._ended[b]] = 0
        if self._legal is not None:
            self._legal[b] = self._least
        for i, name in enumerate(self._names):
            if self._ended[b, i]:
                continue
            if name not in seen:
                if name in present:
                    raise BrokenEnvironment(
                        f"agent '{name}' has not ended, but has no observation {when}",
                        field="observations",
                        remedy="Return an observation of every agent in `agents`.",
                    )
                continue
            view, move = self._views[i], self._moves[i]
            self._seen[b, i, : view.width] = view.vector(seen[name], when)
            mask = ((infos or {}).get(name) or {}).get(MASK)
            mask = view.mask(seen[name]) if mask is None else mask
            if mask is None or move.continuous:
                continue
            if self._legal is None:
                self._legal = np.repeat(self._least[None], self.copies, axis=0)
            self._legal[b, i, : move.size] = move.legal(mask, when)
        if self._whole:
            self._state[b] = self._whole.vector(copy.state(), when)
        else:
            self._state[b] = self._seen[b].ravel()

    def _reward(self, given: Any, b: int) -> float:
        """Return a reward, which may be an array of one number. Raises BrokenEnvironment."""
        try:
            return float(given if np.ndim(given) == 0 else np.asarray(given).item())
        except (TypeError, ValueError) as error:
            raise BrokenEnvironment(
                f"a reward after step {self._step} in copy {b} is not a number: {given!r}"[:500],
                field="rewards",
                remedy="Return one number for each agent.",
            ) from error

    def _observe(self) -> Observed:
        waiting = self._absent & ~self._ended
        return Observed(self._seen, self._state, self._legal, ~waiting if waiting.any() else None)


def _unpacked(given: Any, method: str, names: tuple[str, ...]) -> Any:
    """Return the values that `reset` or `step` has returned. Raises BrokenEnvironment for a
    different number of values, such as the number of OpenAI Gym's API."""
    if isinstance(given, tuple) and len(given) == len(names):
        return given
    found = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
    raise BrokenEnvironment(
        f"its `{method}` returns {found}, not a tuple of {len(names)}: {', '.join(names)}",
        field=method,
        remedy="Adapt it to the current API of Gymnasium and PettingZoo.",
    )


def _state_of(copy: Any) -> ObservedSpace | None:
    """Return the environment's own global state; None if it has none, or one that is not a
    vector."""
    space = getattr(copy, "state_space", None)
    if space is None:
        return None
    try:
        return ObservedSpace(space, "the global state")
    except InvalidArgument:
        return None


def _continuous(copy: Any, names: tuple[Any, ...], moves: list[ActionSpace]) -> bool:
    """Return whether actions are continuous. Raises InvalidArgument if agents differ."""
    kinds = {move.continuous: name for move, name in zip(moves, names, strict=True)}
    if len(kinds) > 1:
        shown = " and ".join(f"agent '{name}' {copy.action_space(name)}" for name in kinds.values())
        raise InvalidArgument(
            f"has discrete and continuous actions: {shown}; all agents need the same kind",
            kind="unsupported_space",
            field="environment.source",
            remedy="Wrap the environment so that all agents have actions of one kind.",
        )
    return next(iter(kinds))


_AGENT = "agent"


class GymnasiumCopies(PettingZooCopies):
    """Copies of a Gymnasium environment; its agent is `agent`, its state the observation."""

    def __init__(
        self,
        copies: int,
        id: str,
        steps: int,
        make_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`id` as Gymnasium knows it; `gymnasium.make` also gets `settings` and `make_args`, which
        may share names with parameters here. Raises the errors of `PettingZooCopies`."""
        self.name = id
        super().__init__(
            copies,
            "troupe.networks.environments.gymnasium:OnlyAgent",
            steps,
            {"id": id, "settings": dict(**settings, **(make_args or {}))},
        )


class OnlyAgent:
    """A Gymnasium environment as a PettingZoo parallel environment of one agent."""

    def __init__(self, id: str, settings: dict[str, Any]) -> None:
        import gymnasium

        self._inner = gymnasium.make(id, **settings)
        self.possible_agents = [_AGENT]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        """Return the observation space."""
        return self._inner.observation_space

    def action_space(self, agent: str) -> Any:
        """Return the action space."""
        return self._inner.action_space

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment."""
        seen, info = _unpacked(self._inner.reset(seed=seed), "reset", _RESET)
        self.agents = [_AGENT]
        return {_AGENT: seen}, {_AGENT: info}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Step the environment by the agent's action."""
        returned = self._inner.step(actions[_AGENT])
        seen, reward, over, cut, info = _unpacked(returned, "step", _STEP)
        if over or cut:
            self.agents = []
        return tuple({_AGENT: value} for value in (seen, reward, over, cut, info))

    def close(self) -> None:
        """Close the environment."""
        self._inner.close()
