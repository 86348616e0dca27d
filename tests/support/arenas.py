"""Vectorised environments that tests name in jobs (`tests.support.arenas:...`)."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from tests.support.waiting import PATIENCE
from troupe.networks.environments.matrix import MatrixGame
from troupe.networks.vector import Actions, Observed, Stepped

# Both get the first one's choice, if both chose the same.
AGREE = [[[1, 0], [0, 2]], [[1, 0], [0, 2]]]
# Lets `Waits` continue.
RELEASED = threading.Event()


class Agree(MatrixGame):
    """Two agents of whom both get 2 where both choose the second action."""

    def __init__(self, copies: int, steps: int = 2) -> None:
        super().__init__(copies, AGREE, steps)


class Raises(Agree):
    """Breaks in its first step."""

    def step(self, actions: Actions) -> Stepped:
        raise RuntimeError("the world has ended")


class Poisons(Agree):
    """Rewards that are not numbers."""

    def step(self, actions: Actions) -> Stepped:
        stepped = super().step(actions)
        return stepped._replace(rewards=np.full_like(stepped.rewards, np.nan))


class Blinds(Agree):
    """Observations that are not numbers, in one of its copies."""

    def step(self, actions: Actions) -> Stepped:
        stepped = super().step(actions)
        seen = stepped.observed.observations.copy()
        seen[1] = np.nan
        return stepped._replace(observed=stepped.observed._replace(observations=seen))


class Waits(Agree):
    """Stays in its first step until it is released."""

    def step(self, actions: Actions) -> Stepped:
        RELEASED.wait(PATIENCE)
        return super().step(actions)


class Unmade(Agree):
    """Cannot be made."""

    def __init__(self, copies: int) -> None:
        raise OSError("no such world")


class Once(Agree):
    """There is one until it is closed; the first one breaks."""

    made = 0

    def __init__(self, copies: int) -> None:
        super().__init__(copies)
        Once.made += 1
        if Once.made > 1:
            raise OSError("no place for a second world")

    def step(self, actions: Actions) -> Stepped:
        raise RuntimeError("the world has ended")


class Large(Agree):
    """Observations that no row of the store should hold."""

    def __init__(self, copies: int) -> None:
        super().__init__(copies)
        self.spaces = replace(self.spaces, observation=8192)

    def reset(self, seed: int) -> Observed:
        return _widened(super().reset(seed))

    def step(self, actions: Actions) -> Stepped:
        stepped = super().step(actions)
        return stepped._replace(observed=_widened(stepped.observed))


def _widened(observed: Observed) -> Observed:
    seen = observed.observations
    wide = np.zeros((*seen.shape[:2], 8192), np.float32)
    wide[..., : seen.shape[2]] = seen
    return observed._replace(observations=wide)


class Counted(Agree):
    """Says how many of it there are."""

    there = 0

    def __init__(self, copies: int) -> None:
        super().__init__(copies)
        Counted.there += 1

    def close(self) -> None:
        Counted.there -= 1
        super().close()
