"""The recipe of a pretrained solver and judge: rewards, the team's success, arms, criteria."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.papers.solver_judge.recipe import RECIPE
from examples.papers.solver_judge.workflow import (
    Sentences,
    judge,
    pick,
    scored,
    solve,
    verdict_reward,
    workflow,
)
from examples.real_team.tasks import Tasks
from troupe.functions.sources import collect
from troupe.recipes.recipe import Run, SeedRuns
from troupe.recipes.running import with_sources
from troupe.workflow import Query, ScriptedPolicy, play

ROOT = Path(__file__).parents[2]
TASK = {"words": ["bird", "tree"]}
GOOD = "A bird sings in the tree."
LONG = "A bird sings in the tree and then it flies."
LOST = "A bird and then"


def test_a_verdict_is_a_letter_and_no_word_that_begins_with_it() -> None:
    assert [pick(text) for text in ("B", " A", "C", "", "An")] == [0, 1, None, None, None]


def test_a_judge_earns_1_for_the_better_draft_and_half_where_neither_is() -> None:
    assert [verdict_reward(picked, (1 / 3, 1.0)) for picked in (0, 1, None)] == [0.0, 1.0, 0.0]
    assert [verdict_reward(picked, (1.0, 1.0)) for picked in (0, 1, None)] == [0.5, 0.5, 0.0]


def test_a_draft_earns_the_share_of_the_rules_that_it_follows() -> None:
    texts = (GOOD, LONG, LOST, "", "Trees stand still. Birds fly.")
    assert [scored(TASK["words"], text) for text in texts] == [1, 3 / 4, 1 / 4, 0, 3 / 4]


@pytest.mark.parametrize(
    ("verdicts", "earned", "success"),
    [
        (["A", "B"], [1.0, 1.0], 1.0),
        (["B", "A"], [0.0, 0.0], 0.0),
        (["B", "B"], [0.0, 1.0], 0.0),
        (["An", "B"], [0.0, 1.0], 1.0),
        (["The", "An"], [0.0, 0.0], 0.0),
    ],
)
async def test_two_verdicts_decide_and_every_reply_is_rewarded_by_itself(
    verdicts: list[str], earned: list[float], success: float
) -> None:
    answers = {"solver": [LONG, GOOD], "judge": verdicts}
    played = await play(workflow, TASK, policy=ScriptedPolicy(answers))
    assert [one.reward for one in played.samples] == pytest.approx([3 / 4, 1.0, *earned])
    assert played.rewards["team"] == success
    questions = [turn.messages[-1][1] for turn in played.turns[-2:]]
    assert questions == [judge(TASK["words"], [LONG, GOOD]), judge(TASK["words"], [GOOD, LONG])]


async def test_a_solver_alone_writes_one_draft() -> None:
    query = Query("q", "train", 0, TASK)
    played = await play(workflow, query, agents=("solver",), policy=ScriptedPolicy([LONG]))
    assert [sample.reward for sample in played.samples] == pytest.approx([3 / 4])
    assert played.rewards["team"] == 0.0
    assert [turn.messages[-1][1] for turn in played.turns] == [solve(TASK["words"])]


def test_a_query_has_two_topics_of_its_split() -> None:
    for split in ("train", "held_out"):
        topics, tasks = Tasks(split), Sentences(split)
        known = {topics[index]["topic"] for index in range(len(topics))}
        pairs = [tasks[index]["words"] for index in range(len(tasks))]
        assert all(one != other and {one, other} <= known for one, other in pairs)
        assert len({frozenset(pair) for pair in pairs}) == len(topics)


def test_arms_differ_in_agents_and_policies_and_draw_as_many_drafts() -> None:
    specs = {arm: RECIPE.job(arm, Path("model"), 0) for arm in RECIPE.arms}
    assert {arm: list(spec.policies) for arm, spec in specs.items()} == {
        "apart": ["solver", "judge"],
        "shared": ["solver"],
        "alone": ["solver"],
    }
    assert [list(spec.agents) for spec in specs.values()] == [["solver", "judge"]] * 2 + [
        ["solver"]
    ]
    drafts = {
        spec.pipeline.queries_per_step * spec.pipeline.group_size * len(spec.agents)
        for spec in specs.values()
    }
    assert len(drafts) == 1
    differ = {"agents", "policies", "pipeline"}
    assert len({spec.model_dump_json(exclude=differ) for spec in specs.values()}) == 1


def test_a_job_is_sent_with_the_data_of_the_folders_that_it_needs() -> None:
    code = with_sources(RECIPE, RECIPE.job("apart", Path("model"), 0), ROOT).code
    assert code is not None
    sent = {file.path for file in collect(Path(code.root), code.include)}
    assert {"examples/real_team/topics.txt", "examples/papers/solver_judge/workflow.py"} <= sent
    assert not any(name.endswith("results.json") for name in sent)


def runs(apart: float, shared: float, alone: float) -> SeedRuns:
    ends = {"apart": apart, "shared": shared, "alone": alone}
    return SeedRuns(
        0, "", "", {arm: Run([(0.0, 0.1), (50.0, end), (100.0, end)]) for arm, end in ends.items()}
    )


def test_criteria_are_those_of_the_page() -> None:
    for ends, passed in {
        (0.9, 0.9, 0.8): [True, True],
        (0.8, 0.9, 0.7): [False, True],
        (0.9, 0.8, 0.88): [True, False],
    }.items():
        assert [one.passed for one in RECIPE.verdicts([runs(*ends)])] == passed
