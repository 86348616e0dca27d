"""`GymnasiumCopies`: n copies of a Gymnasium environment, one agent each, in this process."""

from __future__ import annotations

from typing import Any

from troupe.networks.environments.pettingzoo import PettingZooCopies

_AGENT = "agent"


class GymnasiumCopies(PettingZooCopies):
    """What `gymnasium.make` gives; its agent is `agent`, its state what the agent sees."""

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
        """The only one's."""
        return self._inner.observation_space

    def action_space(self, agent: str) -> Any:
        """The only one's."""
        return self._inner.action_space

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """As a parallel environment."""
        seen, info = self._inner.reset(seed=seed)
        return {_AGENT: seen}, {_AGENT: info}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """As a parallel environment."""
        return tuple({_AGENT: value} for value in self._inner.step(actions[_AGENT]))

    def close(self) -> None:
        """Close it."""
        self._inner.close()
