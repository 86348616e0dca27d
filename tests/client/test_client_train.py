"""`troupe.train` in real programs: real processes, real signals, services that play."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.client.project import Project, read_until
from tests.support.waiting import PATIENCE
from troupe.client import Client
from troupe.client.training import train
from troupe.cluster.state import running_state
from troupe.rpc.errors import InvalidArgument

# A suite that a shell runs in the background ignores SIGINT, and so would its programs.
PROGRAM = """
import asyncio
import signal
import troupe
from troupe.client import JobFailed

signal.signal(signal.SIGINT, signal.default_int_handler)

def go(name="team", steps=2, **more):
    return troupe.train(
        name=name, workflow="team:solve", tasks={"source": "tasks:Tasks"}, steps=steps,
        queries_per_step=4, agents={"solver": "solver", "checker": "checker"},
        policies={"solver": "/models/solver", "checker": "/models/checker"}, **more,
    )
"""


def start(project: Project, ending: str) -> subprocess.Popen[str]:
    (project.directory / "program.py").write_text(PROGRAM + ending)
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=project.directory,
        env=project.environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(project: Project, ending: str) -> str:
    process = start(project, ending)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, ""), err
    return out


def test_a_program_shows_progress_gets_the_result_and_leaves_nothing(project: Project) -> None:
    ending = """
result = go(tags=["baseline"], notes="of the paper")
print(result.job.tags, result.job.notes)
print(result.before, result.after, len(result.checkpoints))
"""
    out = run(project, ending)
    assert "\nstep 1/2 | reward solver 0.500" in out
    assert "\n('baseline',) of the paper\n" in out
    assert out.endswith("{'team_success': 0.25} {'team_success': 0.875} 1\n"), out[-300:]
    assert project.gone()


def test_a_program_in_a_running_loop_trains_quietly_and_sees_the_failure(project: Project) -> None:
    """As in a notebook, whose cells run in an event loop."""
    ending = """
async def cell():
    try:
        go("doomed", show=False)
    except JobFailed as error:
        print(error.field)
asyncio.run(cell())
"""
    assert run(project, ending) == "policies.solver.model.path\n"
    assert project.gone()


def test_an_interrupt_pauses_the_job_and_stops_the_cluster(project: Project) -> None:
    # So many steps that it cannot end before the signal arrives.
    ending = "try:\n    go(steps=5000)\nexcept KeyboardInterrupt:\n    print('interrupted')"
    process = start(project, ending)
    read_until(process, r"^step 2/5000")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert "pausing the job after its step" in out
    assert "resume with: troupe train --resume team-" in out
    assert out.endswith("interrupted\n")
    assert project.gone()


def test_without_waiting_a_handle_is_returned_and_the_cluster_stays(project: Project) -> None:
    ending = "print(go(wait=False, tags=['first', 'lr'], notes='with the checker').id)"
    job_id = run(project, ending).strip()
    state = running_state(project.runs)
    assert state is not None
    with Client(state.orchestrator_address) as client:
        result = client.job(job_id).result(timeout=PATIENCE)
    assert result.after["team_success"] == 0.875
    assert (result.job.tags, result.job.notes) == (("first", "lr"), "with the checker")


@pytest.mark.parametrize(
    ("tasks", "held_out", "message"),
    [("words.jsonl", 0.1, "`tasks` has none"), ([{"n": 1}], 1, "neither a fraction nor rows")],
)
def test_an_invalid_share_of_held_out_rows_is_refused(
    tasks: Any, held_out: float, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        train(workflow="a:b", tasks=tasks, agents={}, policies={}, steps=1, held_out=held_out)
    assert caught.value.field == "held_out"


def test_one_text_in_place_of_a_list_of_tags_is_refused_before_a_cluster_starts() -> None:
    with pytest.raises(InvalidArgument, match=r"tags.*Give \['baseline'\]"):
        train(workflow="a:b", tasks=[], agents={}, policies={}, steps=1, tags="baseline")
