"""The environments for RLlib and Sample Factory: one copy each, from its own library."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

AGENTS = 3
STEPS = 25
# The replacement of an illegal move, which is always legal in Leduc poker.
CALL = 1


class Leduc(gymnasium.Env):  # type: ignore[misc]
    """Leduc poker as the first player against uniformly random play. An illegal move is a call."""

    def __init__(self, config: Any = None, **settings: Any) -> None:
        import pyspiel

        del config
        self.render_mode = settings.get("render_mode")
        self._game = pyspiel.load_game("leduc_poker")
        numbers = self._game.information_state_tensor_size()
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (numbers,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._random = np.random.default_rng()
        self._state: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin a new game."""
        del options
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._state = self._game.new_initial_state()
        self._play_others()
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play the move, then all others' moves until the first player is to move again."""
        legal = self._state.legal_actions()
        self._state.apply_action(int(action) if int(action) in legal else CALL)
        self._play_others()
        over = self._state.is_terminal()
        return self._seen(), self._state.returns()[0] if over else 0.0, over, False, {}

    def _play_others(self) -> None:
        state = self._state
        while not state.is_terminal() and state.current_player() != 0:
            # Chance is also uniform here.
            moves = state.legal_actions()
            state.apply_action(moves[self._random.integers(len(moves))])

    def _seen(self) -> Any:
        return np.asarray(self._state.information_state_tensor(0), np.float32)


def spread() -> Any:
    """Return MPE's simple_spread with three simultaneous agents (PettingZoo's parallel
    interface)."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=AGENTS, max_cycles=STEPS)
