"""Tasks of reasoning_gym: how they are drawn, and that their own answers are right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from troupe.data.reasoning_gym import PuzzleTasks, entry_of
from troupe.data.tasks import open_tasks
from troupe.functions.library.answers import solves_puzzle
from troupe.job.sections.data import TasksSpec
from troupe.workflow.errors import EntrypointError

# Not installed on machines without a C compiler.
reasoning_gym = pytest.importorskip("reasoning_gym")
DATASETS = reasoning_gym.factory.DATASETS

PATTERN = "(?s)<answer>(.*?)</answer>"
# Sets whose answers have several lines, whose entries have tuples or dicts with numbers as keys, or
# whose scorers raise for wrong answers. The others are in the slow suite.
TELLING = (
    *("binary_matrix", "game_of_life", "graph_color", "kakurasu", "knights_knaves"),
    *("mini_sudoku", "modulo_grid", "n_queens", "pool_matrix", "prime_factorization", "rearc"),
    *("rotate_matrix", "sudoku", "survo", "tower_of_hanoi"),
)
# Where a set leaves `answer` empty, since many answers are right: one of them.
RIGHT = {
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
}
# Neither has a right answer in its entries.
UNANSWERED = {"boxnet", "rush_hour"}


def scored(item: dict[str, Any], answer: str) -> object:
    turns = [{"agent": "a", "response": f"<think>?</think>\n<answer>{answer}</answer>"}]
    return solves_puzzle({"data": item}, turns, {}, reply_pattern=PATTERN)


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in TELLING else pytest.mark.slow)
        for name in sorted(DATASETS.keys() - {"composite"})
    ],
)
def test_the_own_answer_of_a_puzzle_is_right_after_its_way_through_json(name: str) -> None:
    tasks = PuzzleTasks("train", {name: {}})
    for index in range(2):
        item = json.loads(json.dumps(tasks[index]))
        answer = item["answer"]
        if answer is None and name not in UNANSWERED:
            answer = RIGHT[name](entry_of(item["entry"]))
        if answer is not None:
            assert scored(item, answer) == scored(item, f"\n{answer}\n") == 1.0
            fenced = f"\n```text\n{answer}\n```\n"
            assert scored(item, fenced) == scored(item, answer.replace("\n", "\r\n")) == 1.0
        score = reasoning_gym.get_score_answer_fn(name)
        for wrong in ("I do not know", "", "[1]", "null"):
            try:
                expected = score(wrong, entry_of(item["entry"]))
            except Exception:
                expected = 0.0
            assert scored(item, wrong) == expected


def test_the_pattern_of_the_documentation_is_the_one_that_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs/data.md").read_text()
    assert f"reply_pattern: '{PATTERN}'" in text


def test_an_entry_that_its_scorer_cannot_use_is_an_error() -> None:
    item = PuzzleTasks("train", {"prime_factorization": {}})[0]
    del item["entry"]["answer"]
    with pytest.raises(KeyError):
        scored(item, "2")


def test_a_set_that_makes_all_its_puzzles_at_once_may_be_given_its_size() -> None:
    tasks = PuzzleTasks("train", {"list_functions": {"size": 30}})
    assert len({tasks[index]["question"] for index in range(60)}) <= 30


def test_puzzles_by_name_are_drawn_from_their_number_alone() -> None:
    sets = {"spell_backward": {"min_word_len": 3, "max_word_len": 5}, "leg_counting": {"weight": 3}}
    spec = TasksSpec(
        source="troupe.data.reasoning_gym:PuzzleTasks", args={"sets": sets, "size": 200}
    )
    train, again = (open_tasks(spec, "train", 0) for _ in range(2))
    held_out = open_tasks(spec, "held_out", 0)
    items = [train[index] for index in range(200)]
    assert items == [again[index] for index in range(200)]
    asked = {item["question"].lower() for item in items}
    assert asked.isdisjoint(held_out[index]["question"].lower() for index in range(200))
    share = sum(item["dataset"] == "leg_counting" for item in items) / 200
    assert 0.6 < share < 0.9
    for item in items[:20]:
        query = {"data": item}
        turns = [{"agent": "a", "response": f"<answer>{item['answer']}</answer>", "tokens": 1}]
        found = PATTERN
        assert solves_puzzle(query, turns, {}, reply_pattern=found) == 1.0
        assert solves_puzzle(query, turns, {}, reply_pattern="@@(.*)") < 1.0


@pytest.mark.parametrize(
    ("sets", "said"),
    [({"spel_backward": {}}, "Look at spell_backward"), ({"leg_counting": {"no": 1}}, "no")],
)
def test_an_unknown_puzzle_is_refused(sets: dict[str, Any], said: str) -> None:
    spec = TasksSpec(source="troupe.data.reasoning_gym:PuzzleTasks", args={"sets": sets})
    with pytest.raises(EntrypointError, match=said):
        open_tasks(spec, "train", 0)


@pytest.mark.parametrize(
    "sets",
    [
        None,
        {},
        ["spell_backward"],
        "spell_backward",
        {"spell_backwards": {}},
        {1: {}},
        {"composite": {}},
        *(
            {"spell_backward": config}
            for config in (
                *("x", [1], {"weight": 0}, {"weight": -1}, {"weight": "a"}, {"weight": math.nan}),
                *({"weight": None}, {"size": 0}, {"size": -1}, {"size": "9"}, {"seed": "a"}),
                *({"min_word_len": "a"}, {"min_word_len": 9, "max_word_len": 3}, {"length": 3}),
            )
        ),
    ],
)
def test_sets_that_give_no_puzzles_are_refused_before_the_job_starts(sets: Any) -> None:
    with pytest.raises(EntrypointError) as refused:
        PuzzleTasks("train", sets)
    assert refused.value.field == "tasks.args.sets"


def test_a_set_may_be_switched_off_by_its_weight() -> None:
    tasks = PuzzleTasks("train", {"spell_backward": {"weight": 0}, "leg_counting": None})
    assert {tasks[index]["dataset"] for index in range(9)} == {"leg_counting"}
