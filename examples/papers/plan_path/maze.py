"""Plan-Path: mazes, their exact distances, walks, and rewards of plans.

A maze has 5 x 5 cells, 5 or 6 walls among them (22 %), a start and a goal. A move goes straight
on, over any number of free cells. A plan names the cells in which two moves end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

SIDE: Final = 5
CELLS: Final = tuple(f"{column}{row}" for row in range(1, SIDE + 1) for column in "abcde")
WALLS: Final = (5, 6)
NEAR, FAR = 2, 4
"""Moves from start to goal."""
MOVES: Final = 2
"""Moves of a plan."""


def rays(cell: str) -> list[list[str]]:
    """Return the cells in each of the four directions from `cell`, walls or not, nearest first."""
    row, column = divmod(CELLS.index(cell), SIDE)
    found = []
    for down, right in ((-1, 0), (0, -1), (0, 1), (1, 0)):
        far = [(row + down * step, column + right * step) for step in range(1, SIDE)]
        found.append(
            [CELLS[SIDE * y + x] for y, x in far if 0 <= y < SIDE and 0 <= x < SIDE],
        )
    return found


@dataclass(frozen=True)
class Maze:
    """A maze with the team in it."""

    walls: tuple[str, ...]
    start: str
    """Where the team began."""
    goal: str
    at: str
    """Where the team is."""

    def ends(self, cell: str) -> list[str]:
        """Return the cells in which a move from `cell` can end."""
        found = []
        for ray in rays(cell):
            for end in ray:
                if end in self.walls:
                    break
                found.append(end)
        return found

    @cached_property
    def distances(self) -> dict[str, int]:
        """The number of moves to the goal from each cell from which it can be reached."""
        found = {self.goal: 0}
        waiting = deque([self.goal])
        while waiting:
            cell = waiting.popleft()
            for end in self.ends(cell):
                if end not in found:
                    found[end] = found[cell] + 1
                    waiting.append(end)
        return found

    @property
    def solved(self) -> bool:
        """Whether the team is at the goal."""
        return self.at == self.goal

    def walked(self, plan: Sequence[str]) -> Maze:
        """Return the maze after the team has followed `plan` to the goal, to its end, or to where
        it names a cell in which no move can end."""
        at = self.at
        for cell in plan[:MOVES]:
            if at == self.goal or cell not in self.ends(at):
                break
            at = cell
        return replace(self, at=at)

    def reward(self, plan: Sequence[str]) -> float:
        """Return the reward of a plan: 1 if it leads to the goal (the team's), plus the share of
        the moves from start to goal that the team no longer needs after it (local)."""
        after = self.walked(plan)
        left = after.distances[after.at] / self.distances[self.start]
        return float(after.solved) + max(0.0, 1 - left)


def drawn(draw: random.Random) -> Maze:
    """Draw a maze whose goal is between `NEAR` and `FAR` moves away."""
    while True:
        walls = draw.sample(CELLS, draw.choice(WALLS))
        start, goal = draw.sample([cell for cell in CELLS if cell not in walls], 2)
        maze = Maze(tuple(sorted(walls)), start, goal, start)
        if NEAR <= maze.distances.get(start, 0) <= FAR:
            return maze


def rough_plan(maze: Maze, draw: random.Random, stray: float) -> list[str]:
    """Draw a plan of two moves. Each takes a shortest way to the goal or, with probability `stray`,
    a straight line to anywhere, walls or not."""
    plan: list[str] = []
    at = maze.at
    while len(plan) < MOVES:
        ends = [cell for cell in maze.ends(at) if cell in maze.distances]
        fewest = min((maze.distances[cell] for cell in ends), default=0)
        ends = [cell for cell in ends if maze.distances[cell] == fewest]
        if not ends or draw.random() < stray:
            ends = [cell for ray in rays(at) for cell in ray]
        at = draw.choice(ends)
        plan.append(at)
    return plan
