"""Bad input through the whole product, job after job on one cluster: a bad job ends and says why,
a job with bad moments goes on and says so, and the cluster is there for the next."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.standing import BAD, Standing, ended, stand_up, until_job
from troupe.client.records.jobs import JobState

PATH = "policies.solver.model.path"
QUICKLY = {"limits.trajectory_seconds": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with stand_up(tmp_path_factory.mktemp("standing")) as standing:
        yield standing


def judge(function: str) -> dict[str, Any]:
    """A job whose rewards come from `function`."""
    return {
        "workflow": BAD + "unrewarded",
        "rewards": {"judge": {"entrypoint": BAD + function, "timeout_seconds": 1}},
    }


def play(workflow: str, **changes: Any) -> dict[str, Any]:
    return {"workflow": BAD + workflow, **changes}


@pytest.mark.parametrize(
    ("job", "field", "message"),
    [
        ({PATH: "/nowhere/solver"}, PATH, "there is no such directory"),
        ({"tasks": {"source": BAD + "NoTasks"}}, "tasks.source", "has 0 queries"),
        (play("no_such_play"), "workflow", "has no attribute 'no_such_play'"),
        (play("misspells_an_agent"), "agents", "no agent 'slover'; known: checker, solver"),
        (play("returns_text"), "the workflow", "returned str 'good', not a dict"),
        (play("raises"), "limits.max_failed_fraction", "RuntimeError: the user's bug (bad_team.py"),
        (
            play("hangs", **QUICKLY),
            "limits.max_failed_fraction",
            "deadline: not done within limits.trajectory_seconds = 2 s; after 1 turns it was "
            "waiting for the workflow",
        ),
        (
            play("stops_at_a_breakpoint"),
            "workflow",
            "there is a breakpoint at bad_team.py:",
        ),
        (judge("reward_stops"), "limits.max_failed_fraction", "there is a breakpoint at bad_team"),
        (judge("always_nan"), "limits.max_failed_fraction", "returned {'solver': nan"),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
async def test_a_bad_job_fails_with_its_cause(
    cluster: Standing, job: dict[str, Any], field: str, message: str
) -> None:
    end = await cluster.run(cluster.yaml(**job))
    assert end.job.state == JobState.FAILED
    assert end.problem.field == field
    assert message in str(end.problem)


async def test_what_a_workflow_and_a_reward_print_is_in_the_logs(cluster: Standing) -> None:
    end = await cluster.run(cluster.yaml(**judge("reward_prints") | {"workflow": BAD + "prints"}))
    assert end.job.state == JobState.SUCCEEDED
    assert "the workflow sees a?" in (cluster.data_dir / "logs/rollout-0.log").read_text()
    async with cluster.client() as client:
        name = f"{end.job.id}/rewards/judge"
        lines = [line.text async for line in client.functions.logs(name)]
    assert len(lines) == 16
    assert all(re.fullmatch(r"the reward sees \d+ characters", line) for line in lines)


async def test_a_tokenizer_that_does_not_match(cluster: Standing) -> None:
    larger = cluster.models / "larger"
    shutil.copytree(cluster.models / "solver", larger)
    tokenizer = json.loads((larger / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["z"] = 99
    (larger / "tokenizer.json").write_text(json.dumps(tokenizer))
    end = await cluster.run(cluster.yaml(**{"policies.solver.model.tokenizer": str(larger)}))
    assert (end.job.state, end.problem.kind) == (JobState.FAILED, "tokenizer_mismatch")
    assert end.problem.field == "policies.solver.model.tokenizer"
    assert "ids up to 99, the model has 16 embeddings" in str(end.problem)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (play("raises_at_times"), "workflow_raised: KeyError: 'answer' (bad_team.py:"),
        (play("hangs_at_times", **QUICKLY), "deadline: not done within limits.trajectory_seconds"),
        (
            play("talks_too_long_at_times"),
            "context_overflow: a prompt of more than 128 tokens leaves no",
        ),
        (
            play("shouts_at_times"),
            "tool_message_too_large: tools/score: the request of 73,400,4",
        ),
        (judge("reward_raises"), "reward_raised: rewards/judge: ZeroDivisionError"),
        (judge("reward_hangs"), "reward_timeout: rewards/judge: "),
        (judge("reward_is_nan"), "reward_bad_result: rewards/judge: "),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.partition(":")[0],
)
async def test_a_job_with_bad_moments_goes_on_and_says_so(
    cluster: Standing, job: dict[str, Any], reason: str
) -> None:
    end = await cluster.run(cluster.yaml(**job))
    assert end.job.state == JobState.SUCCEEDED
    # All rewards of two short steps may happen to be equal.
    assert end.job.problem is None or end.job.problem.kind == "nothing_learned"
    assert end.job.versions == {"solver": 2, "checker": 2}
    told = f"step 1: 2 of 8 trajectories failed, most of them with: {reason}"
    assert any(text.startswith(told) for text in end.notices), end.notices
    async with cluster.client() as client:
        kept = await client.job(end.job.id).trajectories()
    failed = [one for one in kept if one.state == "failed"]
    assert len(failed) == 4
    assert all(one.reason.startswith(reason) for one in failed)


async def test_a_loss_that_is_not_finite_skips_the_step_and_keeps_the_weights(
    cluster: Standing,
) -> None:
    end = await cluster.run(cluster.yaml(BAD + "enormous_at_first", **{"checkpoint.every": 1}))
    assert end.job.state == JobState.SUCCEEDED
    # The other policy's step counts, and the step after is trained.
    assert end.job.versions == {"solver": 1, "checker": 2}
    told = (
        "step 1: solver skipped its update, so its weights stay: the advantage of sample q0_0_q0-s0"
    )
    assert any(text.startswith(told) for text in end.notices), end.notices
    async with cluster.client() as client:
        handle = client.job(end.job.id)
        rows = {row.step: row.values for row in await handle.metrics()}
        saved = {(c.policy, c.version): c.path for c in await handle.checkpoints()}
    assert [rows[step]["solver/skipped"] for step in (1, 2)] == [1.0, 0.0]
    first, kept, trained = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (cluster.models / "solver", saved["solver", 0], saved["solver", 1])
    )
    assert all(kept[name].equal(value) for name, value in first.items())
    assert any(not trained[name].equal(value) for name, value in first.items())
    assert all(math.isfinite(value.sum()) for value in trained.values())


async def test_an_engine_that_dies_mid_turn(cluster: Standing) -> None:
    long = {f"agents.{name}.sampling.max_new_tokens": 100 for name in ("solver", "checker")}
    text = cluster.yaml(BAD + "chatty", **long, **{"pipeline.group_size": 16})
    async with cluster.client() as client:
        handle = await client.submit(text)
        await until_job(handle, lambda job: "of 64 trajectories" in job.activity)
        # Engines live in the process of the rollout worker: all turns in hand are lost with it.
        cluster.kill("rollout-0")
        end = await ended(handle)
    assert (end.job.state, end.job.problem) == (JobState.SUCCEEDED, None)
    assert end.job.versions == {"solver": 2, "checker": 2}
    assert any("trajectories are dispatched again" in text for text in end.notices), end.notices
    assert end.job.metrics["trajectories/completed"] == 64


def edit(cluster: Standing, text: str) -> None:
    (cluster.code / "users_team.py").write_text(text)


async def test_a_job_resumes_after_its_workflow_is_fixed(cluster: Standing) -> None:
    edit(cluster, "async def play(query, agents, tools):\n    return {}[query.split]\n")
    async with cluster.client() as client:
        handle = await client.submit(cluster.yaml("users_team:play"))
        end = await ended(handle)
        assert end.job.state == JobState.FAILED
        assert "KeyError: 'train' (users_team.py:2 in play)" in str(end.problem)
        edit(cluster, "from tests.support.bad_team import quick as play\n")
        await handle.resume()
        end = await ended(handle)
    assert (end.job.state, end.job.problem) == (JobState.SUCCEEDED, None)


async def test_clumsy_hands(cluster: Standing) -> None:
    async with cluster.client() as client:
        handle = await client.submit(cluster.yaml())
        await handle.cancel("on second thoughts")
        other = await client.submit(cluster.yaml())
        await other.pause()
        await until_job(handle, lambda job: job.state == JobState.CANCELLED)
        await until_job(other, lambda job: job.state == JobState.PAUSED)
        for job in (handle, other):
            await job.resume()
            await job.resume()
        ends = [await ended(job) for job in (handle, other)]
    assert [end.job.versions for end in ends] == [{"solver": 2, "checker": 2}] * 2


@pytest.mark.slow
async def test_a_workflow_that_kills_its_worker_takes_nothing_else_along(cluster: Standing) -> None:
    end = await cluster.run(cluster.yaml(BAD + "kills_its_worker"))
    assert (end.job.state, end.problem.kind) == (JobState.FAILED, "workers_keep_dying")
    assert (await cluster.run(cluster.yaml())).job.state == JobState.SUCCEEDED
