"""The demo's puzzles: reasoning_gym's questions and answers without that package, split, scored."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from troupe.demo.tasks import TASKS, TeamTasks, score, split_of

INDICES = st.integers(0, 2**31 - 1)
# With reasoning_gym's configuration: it draws operations by weight, and e^-99 is never drawn.
OTHERS = ("rotate", "map", "crop", "remove_every_nth_row", "remove_every_nth_col", "zero_divisible")
CONFIGURATIONS: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 4, "max_word_len": 4},
    "manipulate_matrix": {
        **dict.fromkeys(("min_rows", "max_rows", "min_cols", "max_cols"), 2),
        **dict.fromkeys(("min_transforms", "max_transforms"), 1),
        **{f"w_{name}": -99 for name in OTHERS},
    },
    "rotate_matrix": {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 3},
}


@pytest.fixture(scope="module")
def originals() -> dict[str, Any]:
    """The datasets of reasoning_gym that the puzzles are taken from."""
    gym = pytest.importorskip("reasoning_gym")
    return {
        name: gym.create_dataset(name, seed=0, size=2**31, **configuration)
        for name, configuration in CONFIGURATIONS.items()
    }


@given(index=INDICES)
@pytest.mark.parametrize("name", TASKS)
def test_puzzle_is_the_one_of_reasoning_gym(
    name: str, index: int, originals: dict[str, Any]
) -> None:
    question, answer = TASKS[name](Random(index))
    if name == "spell_backward":  # its list of words is longer
        word = question.removeprefix("spell backward: ")
        assert answer == word[::-1]
        assert word in originals[name].words
        return
    original = originals[name][index]
    assert answer == original["answer"]
    for part in question.split(":", 1)[1].strip().splitlines():  # a word, or rows of a matrix
        assert part in original["question"]
    if name == "manipulate_matrix":
        [operation] = original["metadata"]["operations"]
        asked = f"- {question.split(':')[0]}"
        assert asked.lower() == operation["instruction"].lower()
    if name == "rotate_matrix":
        assert question.startswith(f"rotate {90 * original['metadata']['num_rotations']} degrees")


@given(index=INDICES, width=st.integers(1, 3))
@pytest.mark.parametrize("name", TASKS)
def test_score_takes_the_answer_in_any_case_and_width_of_spaces(
    name: str, index: int, width: int
) -> None:
    _, answer = TASKS[name](Random(index))
    shown = f" {answer.upper().replace(' ', ' ' * width)}\n"
    flat = answer.replace("\n", " ") if "\n" in answer else answer + " 1"
    assert score(answer, [answer, shown, flat, answer + "x", ""]) == [1, 1, 0, 0, 0]


@given(seed=st.integers(0, 2**40), index=st.integers(0, 10**6))
def test_query_is_of_the_split_that_is_asked(seed: int, index: int) -> None:
    for split in ("train", "dev", "held_out"):
        assert split_of(TeamTasks(split, seed)[index]["question"]) == split
    assert TeamTasks("held_out", seed)[index] == TeamTasks("held_out")[index]


def test_tasks_import_without_reasoning_gym() -> None:
    code = "import sys; sys.modules['reasoning_gym'] = None; import troupe.demo.tasks"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
