"""Two agents on Plan-Path: a proposer plans, a corrector plans again, the team walks; twice.

workflow: examples.papers.plan_path.workflow:workflow
tasks: {source: "examples.papers.plan_path.workflow:Mazes", args: {candidates: 4, seed: 0}}
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from examples.papers.plan_path.maze import Maze, drawn
from troupe.workflow import Agent, Agents, Query, Reply, Tools, branch

ROUNDS: Final = 2
NUMBER: Final = 8
"""Mazes of a job."""
NAMES: Final = tuple(f"maze{number}" for number in range(NUMBER))
PROPOSED: Final = "proposed"


def mazes_of(seed: int) -> list[Maze]:
    """Return the mazes of a recipe's seed, by number."""
    draw = random.Random(seed)
    return [drawn(draw) for _ in range(NUMBER)]


class Mazes:
    """Tasks: query i is maze i % `NUMBER` of the seed, whose turns have `candidates` each in
    training. Both splits have the same mazes."""

    def __init__(self, split: str, candidates: int, seed: int, size: int = 1_000_000) -> None:
        self._tasks = [
            {"name": name, "candidates": candidates, **asdict(maze)}
            for name, maze in zip(NAMES, mazes_of(seed), strict=True)
        ]
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._tasks[index % NUMBER]


def propose(name: str, maze: Maze) -> str:
    """Return the proposer's question: which maze, and where the team is."""
    return f"{name} {maze.at}"


def correct(name: str, maze: Maze, plan: Sequence[str]) -> str:
    """Return the corrector's question: the same, and the proposed plan."""
    return " ".join([propose(name, maze), PROPOSED, *plan])


async def workflow(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Solve a maze in two rounds. Without a corrector the proposer's plan is walked.

    Every plan is rewarded by itself, whether or not it is walked. With several candidates a turn is
    a tree: the best one goes on. In evaluations nobody knows the best: a turn has one candidate.
    """
    name = query["name"]
    maze = Maze(tuple(query["walls"]), query["start"], query["goal"], query["at"])
    candidates = query["candidates"] if query.split == "train" else 1
    for _ in range(ROUNDS):
        plan = await _planned(agents["proposer"], propose(name, maze), maze, candidates)
        if "corrector" in agents:
            plan = await _planned(agents["corrector"], correct(name, maze, plan), maze, candidates)
        maze = maze.walked(plan)
        if maze.solved:
            break
    return {"team": float(maze.solved)}


async def _planned(agent: Agent, question: str, maze: Maze, candidates: int) -> list[str]:
    def score(reply: Reply) -> float:
        return maze.reward(reply.text.split())

    if candidates > 1:
        reply = await branch(agent, question, n=candidates, score=score)
    else:
        reply = await agent.chat(question)
        reply.reward = score(reply)
    return reply.text.split()
