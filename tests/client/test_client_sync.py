"""The blocking client: the same surface, driven from a thread."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest

from tests.client.conftest import Stage
from tests.support.fake_orchestrator import S
from tests.support.waiting import PATIENCE
from troupe.client import (
    AsyncClient,
    AsyncFunctions,
    AsyncJobHandle,
    Client,
    Functions,
    JobHandle,
    JobState,
    MetricsLogged,
    StateChanged,
)
from troupe.job import parse_job
from troupe.rpc import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound


@pytest.mark.parametrize(
    ("blocking", "native"),
    [(Client, AsyncClient), (JobHandle, AsyncJobHandle), (Functions, AsyncFunctions)],
)
def test_both_clients_have_the_same_methods_and_parameters(blocking: type, native: type) -> None:
    def surface(kind: type) -> dict[str, list[tuple[str, object, object]]]:
        return {
            name: [
                (p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()
            ]
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert surface(blocking) == surface(native)


def test_a_job_from_submit_to_result(stage: Stage, job_yaml: str) -> None:
    with Client(stage.address) as troupe:
        job = troupe.submit(job_yaml, job_id="mine")

        async def train(fake) -> None:  # type: ignore[no-untyped-def]
            await fake.move("mine", S.JOB_STATE_STARTING, S.JOB_STATE_RUNNING)
            for step in range(1, 4):
                await fake.step("mine", step, reward__mean=step / 3)
            fake.jobs["mine"].after["team_success"] = 1.0
            await fake.move("mine", S.JOB_STATE_SUCCEEDED)

        stage.play(train)
        events = list(job.watch())

        assert [e.step for e in events if isinstance(e, MetricsLogged)] == [1, 2, 3]
        assert job.result(timeout=PATIENCE).after == {"team_success": 1.0}
        assert troupe.jobs()[0].state == JobState.SUCCEEDED
        assert troupe.job("mine").generate("solver", "1 + 1 =").text == "four"


def test_a_watch_may_be_left_and_the_client_used_on(stage: Stage, job_yaml: str) -> None:
    with Client(stage.address) as troupe:
        job = troupe.submit(job_yaml)
        for event in job.watch():
            assert isinstance(event, StateChanged)
            break
        assert job.info().state == JobState.SUBMITTED
        with pytest.raises(DeadlineExceeded):
            job.wait(timeout=0.1)  # deadline: the job does not end


def test_errors_are_those_of_the_asyncio_client(stage: Stage) -> None:
    with Client(stage.address) as troupe, pytest.raises(NotFound, match="job_id = nope"):
        troupe.job("nope").info()
    with pytest.raises(InvalidArgument):
        Client("nonsense")
    with pytest.raises(FailedPrecondition, match="the client is closed"):
        troupe.jobs()
    troupe.close()


def test_a_closed_client_leaves_no_thread(stage: Stage) -> None:
    before = set(threading.enumerate())
    with Client(stage.address) as troupe:
        troupe.jobs()
    # Not their number: others' threads end meanwhile.
    assert not set(threading.enumerate()) - before


def test_several_threads_may_share_a_client(stage: Stage, job_yaml: str) -> None:
    with Client(stage.address) as troupe:
        threads = [
            threading.Thread(target=troupe.submit, args=(job_yaml, f"job-{i}")) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert {job.id for job in troupe.jobs()} == {f"job-{i}" for i in range(8)}


def test_a_job_is_sent_as_its_author_wrote_it_with_tags_and_notes(
    stage: Stage, job_yaml: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"# The baseline.{job_yaml}", "utf-8")
    fields = {**parse_job(job_yaml).model_dump(mode="json", exclude_unset=True), "seed": 3}
    with Client(stage.address) as troupe:
        job = troupe.submit(file, overrides={"pipeline.steps": 7}, tags=["a"], notes="first")
        given = job.given_spec()
        assert given.startswith("# The baseline.\nname: team")
        assert given.endswith("# Changed when it was submitted:\n#   pipeline.steps: 7\n")
        assert job.info().spec["pipeline"]["steps"] == 7
        assert (job.info().tags, job.info().notes) == (("a",), "first")
        changed = job.annotate(add_tags=["b"], remove_tags=["a"])
        assert (changed.tags, changed.notes) == (("b",), "first")
        assert job.annotate(notes="second").notes == "second"
        # Fields of a program: those that were set, which are the same job.
        other = troupe.submit(fields)
        assert "group_size" not in other.given_spec()
        assert parse_job(other.given_spec()) == parse_job(other.info().spec_json)
