"""The recipe of AT-GRPO on Plan-Path: its mazes, its trees, its criteria."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from examples.papers.plan_path.maze import CELLS, FAR, MOVES, NEAR, Maze, drawn, rough_plan
from examples.papers.plan_path.recipe import RECIPE
from examples.papers.plan_path.workflow import Mazes, correct, mazes_of, propose, workflow
from troupe.recipes.recipe import Run, SeedRuns
from troupe.workflow import Query, ScriptedPolicy, play

# a1 b1 ## d1 e1
# a2 ## ## d2 e2
# a3 b3 c3 d3 e3
# a4 b4 c4 ## e4
# a5 b5 c5 d5 ##
MAZE = Maze(("b2", "c1", "c2", "d4", "e5"), "b1", "e1", "b1")
BEST = ["a1", "a3", "e3", "e1"]


def can_move(maze: Maze, start: str, end: str) -> bool:
    """Whether all cells between two of a row or column are free, cell by cell."""
    (x, y), (u, v) = ((ord(cell[0]) - ord("a"), int(cell[1]) - 1) for cell in (start, end))
    if start == end or (x != u and y != v):
        return False
    steps = max(abs(u - x), abs(v - y))
    passed = [(x + (u - x) * k // steps, y + (v - y) * k // steps) for k in range(1, steps + 1)]
    return all(CELLS[5 * row + column] not in maze.walls for column, row in passed)


def test_distances_are_those_of_all_sequences_of_moves() -> None:
    draw = random.Random(3)
    for maze in (MAZE, *(drawn(draw) for _ in range(4))):
        moves = {cell: [end for end in CELLS if can_move(maze, cell, end)] for cell in CELLS}
        reached = [{maze.start}]
        while maze.goal not in reached[-1]:
            reached.append({end for cell in reached[-1] for end in moves[cell]})
        assert maze.distances[maze.start] == len(reached) - 1
        assert NEAR <= maze.distances[maze.start] <= FAR
        assert all(set(maze.ends(cell)) == set(moves[cell]) for cell in CELLS)


def test_mazes_have_22_percent_walls_and_are_the_seeds() -> None:
    draw = random.Random(0)
    mazes = [drawn(draw) for _ in range(600)]
    share = sum(len(one.walls) for one in mazes) / len(mazes) / len(CELLS)
    assert share == pytest.approx(0.22, abs=0.004)
    assert mazes_of(1) == mazes_of(1) != mazes_of(2)
    tasks = Mazes("train", candidates=4, seed=1)
    assert tasks[9] == tasks[1]
    assert tasks[1]["walls"] == mazes_of(1)[1].walls


def test_a_walk_ends_at_the_goal_at_the_end_of_the_plan_or_before_a_wall() -> None:
    assert MAZE.walked(BEST[:2]).walked(BEST[2:]).solved
    assert MAZE.walked(BEST).at == BEST[MOVES - 1], "a plan has two moves"
    assert MAZE.walked(["a1", "a5"]).at == "a5"
    assert MAZE.walked(["b3", "a1"]).at == "b1", "b2 is a wall"
    assert MAZE.walked(["a1", "b3"]).at == "a1", "b3 is not in line with a1"
    assert replace(MAZE, at="e3").walked(["e1", "e3"]).solved, "the team stays at the goal"
    assert MAZE.walked(["proposed"]).at == MAZE.walked([]).at == "b1"


def test_a_plan_earns_the_teams_success_and_the_moves_behind_it() -> None:
    assert len(BEST) == MAZE.distances["b1"]
    assert MAZE.reward(BEST[:1]) == 1 / 4
    assert MAZE.reward(BEST[:2]) == 2 / 4
    there = MAZE.walked(BEST[:2])
    assert there.reward(BEST[2:]) == 2.0
    assert there.reward(BEST[2:3]) == 3 / 4
    assert there.reward(["b1"]) == 2 / 4
    assert replace(MAZE, start="a1", at="a1").reward(["b1"]) == 0.0, "not less than nothing"


def test_a_plan_that_never_strays_is_of_the_fewest_moves() -> None:
    draw = random.Random(5)
    for _ in range(50):
        maze = drawn(draw)
        after = maze.walked(rough_plan(maze, draw, 0.0))
        assert after.distances[after.at] == maze.distances[maze.start] - MOVES
    strayed = [maze.reward(rough_plan(maze, draw, 0.5)) for _ in range(200)]
    assert 0 < sum(one == max(strayed) for one in strayed) < 200


async def test_in_training_the_best_candidate_goes_on_and_all_are_rewarded() -> None:
    answers = {
        "proposer": ["b3 a3", "a1 b1", "e3 d1", "b1"],
        "corrector": ["a1 a3", "c3", "e3 e1", "c3"],
    }
    task = {"name": "maze0", "candidates": 2, **asdict(MAZE)}
    agents = ("proposer", "corrector")
    query = Query("q", "train", 0, task)
    played = await play(
        workflow, query, agents=agents, policy=ScriptedPolicy(answers), group_by="branch"
    )
    there = MAZE.walked(["a1", "a3"])
    questions = [
        propose("maze0", MAZE),
        correct("maze0", MAZE, ["b3", "a3"]),
        propose("maze0", there),
        correct("maze0", there, ["e3", "d1"]),
    ]
    assert [turn.messages[-1][1] for turn in played.turns[::2]] == questions
    rewards = [sample.reward for sample in played.samples]
    assert rewards == pytest.approx([0, 0, 2 / 4, 0, 3 / 4, 2 / 4, 2, 2 / 4])
    assert played.rewards["team"] == 1.0
    assert len({sample.group_id for sample in played.samples}) == 4


async def test_an_agent_alone_walks_its_own_plan_and_an_evaluation_has_one_candidate() -> None:
    task = {"name": "maze0", "candidates": 4, **asdict(MAZE)}
    query = Query("q", "held_out", 0, task)
    policy = ScriptedPolicy(["a1 a3", "e3"])
    played = await play(workflow, query, agents=("proposer",), policy=policy)
    assert [one.reward for one in played.samples] == pytest.approx([2 / 4, 3 / 4])
    assert played.rewards["team"] == 0.0


def runs(agent: float, turn: float, branch: float, alone: float = 0.5) -> SeedRuns:
    ends = {"agent": agent, "turn": turn, "branch": branch, "alone": alone}
    return SeedRuns(0, "", "", {arm: Run([(0.0, 0.3), (100.0, end)]) for arm, end in ends.items()})


def test_criteria_are_those_of_the_page() -> None:
    good = [runs(0.60 + seed / 100, 0.70, 0.80) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(good)] == [True, True, True]
    bad = [runs(0.70 + seed / 100, 0.69, 0.68) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(bad)] == [False, False, False]
    near = [runs(0.60 + seed / 100, 0.70, 0.69) for seed in range(3)]
    assert [one.passed for one in RECIPE.verdicts(near)] == [False, True, False]


def test_arms_differ_in_sampling_and_groups_and_draw_as_many_plans() -> None:
    specs = {arm: RECIPE.job(arm, Path("model"), 0) for arm in RECIPE.arms}
    assert [spec.algorithm.group_by for spec in specs.values()] == [
        "agent",
        "turn",
        "branch",
        "branch",
    ]
    differ = {"tasks", "algorithm", "pipeline", "agents"}
    assert len({spec.model_dump_json(exclude=differ) for spec in specs.values()}) == 1
    plans = {
        spec.pipeline.queries_per_step
        * spec.pipeline.group_size
        * int(spec.tasks.args["candidates"])
        * len(spec.agents)
        for spec in specs.values()
        if spec.tasks is not None
    }
    assert len(plans) == 1
