"""`SimpleSpread`: N agents cover N landmarks without collisions, B copies at once.

MPE's simple_spread (Lowe et al. 2017) as arrays; equal to `mpe2` (PettingZoo) step by step.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from troupe.networks.vector import Actions, Observed, Spaces, Stepped
from troupe.rpc.errors import InvalidArgument

Float64 = NDArray[np.float64]

_DT: Final = 0.1
_DAMPING: Final = 0.25
_CONTACT_FORCE: Final = 1e2
_CONTACT_MARGIN: Final = 1e-3
_SENSITIVITY: Final = 5.0
_DIAMETER: Final = 0.3
# nothing, left, right, down, up
_MOVES: Final = np.array([[0, -1, 1, 0, 0], [0, 0, 0, -1, 1]]) * _SENSITIVITY
# Below this exponent a contact force is less than the last bit of a position.
_APART: Final = -50.0


class SimpleSpread:
    """Computes in float64 and returns float32, as `mpe2`. The state is all agents' observations."""

    def __init__(
        self,
        copies: int,
        agents: int = 3,
        steps: int = 25,
        local_ratio: float = 0.5,
        continuous: bool = False,
        variant: Literal["mpe2", "mpe"] = "mpe2",
    ) -> None:
        """`local_ratio`: the share of an agent's own collisions in its reward; the rest comes from
        the team's distances. `variant`: `mpe` is OpenAI's first release, whose numbers most
        publications state: velocities change before positions, an agent always collides with
        itself, and every agent's reward is the sum of all rewards. Raises InvalidArgument."""
        if agents < 2:
            raise InvalidArgument(
                "needs at least two agents", field="environment.agents", value=agents
            )
        if variant not in ("mpe2", "mpe"):
            raise InvalidArgument("must be mpe2 or mpe", field="environment.variant", value=variant)
        self.copies, self._steps, self._local = copies, steps, local_ratio
        self._first_release = variant == "mpe"
        self.agents = tuple(f"agent_{i}" for i in range(agents))
        observation = 4 + 2 * agents + 4 * (agents - 1)
        self.spaces = Spaces(
            observation, observation * agents, 5, steps, continuous, low=0.0, high=1.0
        )
        self._others = np.array([[j for j in range(agents) if j != i] for i in range(agents)])
        # Copies are the last axis, so that operations are vectorized over them.
        self._position = np.zeros((2, agents, copies))
        self._velocity = np.zeros((2, agents, copies))
        self._landmarks = np.zeros((2, agents, copies))
        self._step = 0
        self._seen = np.zeros((copies, agents, observation), np.float32)
        self._measure()

    def reset(self, seed: int) -> Observed:
        """Place agents, at rest, and landmarks uniformly in [-1, 1]."""
        shape = (2, self.copies, len(self.agents), 2)
        drawn = np.random.default_rng(seed).uniform(-1, 1, shape)
        return self.place(drawn[0], drawn[1])

    def place(self, positions: Float64, landmarks: Float64) -> Observed:
        """Begin with agents and landmarks at given positions, each [B, N, 2]."""
        self._position = np.ascontiguousarray(positions.transpose(2, 1, 0))
        self._landmarks = np.ascontiguousarray(landmarks.transpose(2, 1, 0))
        self._velocity = np.zeros_like(self._position)
        self._step = 0
        self._measure()
        return self._observe()

    def step(self, actions: Actions) -> Stepped:
        """Step by discrete [B, N] (nothing, left, right, down, up) or continuous [B, N, 5] in [0,
        1]."""
        if actions.ndim == 3:
            force = (actions[..., 2::2] - actions[..., 1::2]).T.astype(np.float64) * _SENSITIVITY
        else:
            force = _MOVES[:, actions.T]
        force += self._pushes()
        if self._first_release:
            self._velocity = self._velocity * (1 - _DAMPING) + force * _DT
            self._position = self._position + self._velocity * _DT
        else:
            self._position = self._position + self._velocity * _DT
            self._velocity = self._velocity * (1 - _DAMPING) + force * _DT
        self._measure()
        self._step += 1
        rewards = self._rewards()
        over = np.full(self.copies, self._step >= self._steps)
        return Stepped(self._observe(), rewards, np.zeros(self.copies, np.bool_), over)

    def close(self) -> None:
        """Nothing to release."""

    def _measure(self) -> None:
        """Compute relative positions and distances, for physics, rewards and observations."""
        position = self._position
        # [2, N, N - 1, B], [N, N - 1, B] and [2, N, N, B]
        self._apart = position[:, self._others] - position[:, :, None]
        self._distance = _length(self._apart)
        self._away = self._landmarks[:, None] - position[:, :, None]

    def _pushes(self) -> Float64:
        """Return contact forces between agents [2, N, B]."""
        near: Any = (_DIAMETER - self._distance) / _CONTACT_MARGIN
        touching = near > _APART
        if not touching.any():
            return np.zeros_like(self._position)
        strength = np.zeros_like(near)
        depth = np.logaddexp(0, near[touching]) * _CONTACT_MARGIN
        strength[touching] = _CONTACT_FORCE * depth / self._distance[touching]
        pushes: Float64 = -(self._apart * strength).sum(axis=2)
        return pushes

    def _rewards(self) -> NDArray[np.float32]:
        covered = _length(self._away).min(axis=0).sum(axis=0)
        bumps = (self._distance < _DIAMETER).sum(axis=1)
        rewards = np.empty((self.copies, len(self.agents)), np.float32)
        if self._first_release:
            # An agent is near itself, too.
            total = -len(self.agents) * (covered + 1) - bumps.sum(axis=0)
            rewards[:] = total[:, None]
        else:
            rewards[:] = (-bumps * self._local - covered * (1 - self._local)).T
        return rewards

    def _observe(self) -> Observed:
        """Return velocity, position, relative landmarks and agents, and silent communication."""
        n, seen = len(self.agents), self._seen
        shown: Any = seen.T  # [O, N, B]
        shown[:2], shown[2:4] = self._velocity, self._position
        # x and y alternate, one landmark or agent after another.
        for axis in range(2):
            shown[4 + axis : 4 + 2 * n : 2] = self._away[axis].swapaxes(0, 1)
            first, last = 4 + 2 * n, 4 + 2 * n + 2 * (n - 1)
            shown[first + axis : last : 2] = self._apart[axis].swapaxes(0, 1)
        return Observed(seen, seen.reshape(self.copies, -1))


def _length(vectors: Float64) -> Float64:
    """Return Euclidean norms of vectors [2, ...]."""
    x, y = vectors
    found: Float64 = np.sqrt(x * x + y * y)
    return found
