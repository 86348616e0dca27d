"""`troupe conversations`: of a cluster, and of the data directory of one that has stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.conftest import Run, Stage
from tests.client.project import JOB_YAML
from troupe.contracts.conversations import CONVERSATIONS, ConversationLog, Kept
from troupe.v1 import common_pb2 as common_pb


def test_conversations_of_a_running_job_are_listed_and_shown(run: Run, cluster: Stage) -> None:
    status, out, err = run("conversations", "mine", "--limit", "2")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(" t")]
    assert [row[0] for row in rows] == ["trajectory", "t0", "t1"]
    assert "solver 1.00" in out
    status, out, _ = run("conversations", "mine", "t1")
    assert status == 0
    assert [line.strip() for line in out.splitlines() if line.strip()] == [
        "t1  step 0, completed, 0s",
        "solver[0]",
        "user: 2+2",
        "-> 4",
        ", 0+0 tokens, reward 0.500",
        "rewards: solver 1.000",
    ]
    assert run("conversations", "mine", "--failed")[1] == "no conversations\n"


def test_filters_are_asked_of_the_orchestrator(run: Run, cluster: Stage) -> None:
    given = ("--agent", "solver", "--text", "sum 7", "--step", "3", "--training")
    bounds = ("--reward-below", "0.5", "--reward-above", "0")
    assert run("conversations", "mine", *given, *bounds)[0] == 0
    asked = cluster.fake.requests("ListTrajectories")[-1]
    assert (asked.agent, asked.text, asked.from_step, asked.to_step) == ("solver", "sum 7", 3, 3)
    assert (asked.evaluation, asked.failed, asked.page_size) == (False, False, 20)
    assert 0.49999 < asked.max_reward < 0.5, "below, not at"
    assert 0 < asked.min_reward < 1e-9


def full(name: str, step: int, reward: float, *, failed: bool = False) -> Kept:
    made = Kept()
    one = made.summary
    one.trajectory_id, one.step, one.rewards["team"] = name, step, reward
    one.state = common_pb.TRAJECTORY_STATE_COMPLETED
    if failed:
        one.state, one.reason = common_pb.TRAJECTORY_STATE_FAILED, "workflow_raised: KeyError"
    ask = made.turns.add(agent="solver", policy="base", turn=0, response="4", prompt_tokens=9)
    ask.messages.add(role="system", content="Be brief.")
    ask.messages.add(role="user", content="2+2")
    ask.versions.add(version=3, start=0, end=1)
    again = made.turns.add(agent="solver", policy="base", turn=1, response="x" * 900, reward=1)
    again.shared_turn, again.shared_messages = 0, 2
    again.messages.add(role="assistant", content="4")
    again.messages.add(role="user", content="Are you sure?")
    again.versions.add(version=5, start=0, end=1)
    again.finish_reason = "stop"
    return made


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The data directory of a stopped cluster, with a job `old`."""
    log = ConversationLog(tmp_path / "data" / "old" / CONVERSATIONS, 10**6)
    log.append([full("a", 0, 0.0, failed=True), full("b", 0, 0.5)])
    log.append([full("c", 1, 1.0)])
    (tmp_path / "data" / "old" / "job.yaml").write_text(JOB_YAML)
    return tmp_path / "data"


def test_conversations_of_a_stopped_cluster_come_from_its_directory(
    run: Run, stopped: Path
) -> None:
    def names(*given: str) -> list[str]:
        status, out, err = run("conversations", "old", "--json", *given)
        assert (status, err) == (0, "")
        return [one["id"] for one in json.loads(out)]

    assert names() == ["c", "b", "a"]
    assert names("--limit", "1") == ["c"]
    assert names("--failed") == ["a"]
    assert names("--reward-below", "0.5") == ["a"]
    assert names("--reward-above", "0.5") == ["c"]
    assert names("--step", "0", "--text", "SURE?", "--agent", "solver") == ["b", "a"]
    assert names("--agent", "nobody") == []
    out = run("conversations", "old")[1]
    assert "workflow_raised" in " ".join(out.split())
    assert "3-5" in out
    out = run("conversations", "old", "c")[1]
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    assert lines[0] == "c  step 1, completed, 0s"
    assert "x" * 900 in out, "whole"
    assert "stop, 0+0 tokens, base version 5, reward 1.000" in lines
    assert lines.count("user: 2+2") == 1, "what is told again is shown once"
    assert "900 characters" in run("conversations", "old", "--full", "--limit", "1")[1]


def test_an_unknown_trajectory_and_a_missing_cluster_are_named(run: Run, stopped: Path) -> None:
    status, _, err = run("conversations", "old", "z")
    assert status == 2
    assert "trajectory_id = z" in err
    assert "troupe conversations JOB" in err
    status, _, err = run("conversations", "unknown")
    assert status == 1
    assert "no cluster runs in this directory" in err
