"""The displays of events: pure models, drawn into strings."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from troupe.client import Activity, Job, JobState, MetricsLogged, Notice, StateChanged
from troupe.client.cli.display import (
    LiveDisplay,
    PlainDisplay,
    Progress,
    print_conversations,
    print_summary,
    scores,
)
from troupe.client.cli.options import change, duration, number, size, sparkline
from troupe.client.records.jobs import Interval, Trajectory, Turn
from troupe.job import parse_job
from troupe.rpc import FailedPrecondition, Internal

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def job(job_yaml: str) -> Job:
    return Job(
        id="mine", name="team", state=JobState.RUNNING, mode="micro_batch", step=0, total_steps=10,
        activity="", directory="/runs/mine", versions={}, metrics={},
        before={"team_success": 0.2, "reward/solver": 0.1}, after={"team_success": 0.9},
        created_at=START, started_at=START, ended_at=START + timedelta(seconds=75),
        problem=None, spec_json=parse_job(job_yaml).model_dump_json(),
    )  # fmt: skip


def step(n: int, seconds: float, **values: float) -> MetricsLogged:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return MetricsLogged(START + timedelta(seconds=seconds), n, named)


def test_progress_follows_rewards_policies_and_time(job: Job) -> None:
    progress = Progress(job)
    assert progress.seconds_left is None
    progress.apply(step(0, 1, evaluation__team__mean=0.2, evaluation__reward__solver__mean=0.1))
    assert progress.step == 0
    progress.apply(step(1, 5, reward__solver__mean=0.3, step__seconds=4.0, solver__loss__policy=1))
    trained = {"solver__samples": 8, "solver__skipped": 0, "checker__skipped": 1}
    progress.apply(
        step(2, 11, reward__solver__mean=0.4, step__seconds=6.0, solver__kl=0.01, **trained)
    )

    assert progress.step == 2
    assert progress.rewards["solver"] == [0.3, 0.4]
    assert progress.evaluation == {"team": 0.2, "solver": 0.1}
    assert progress.seconds_left == pytest.approx(8 * 5.0)
    policy = progress.policy("solver")
    # The newest step has none, and the previous step's value is not shown for it.
    assert (policy.loss, policy.kl, policy.grad_norm, policy.version) == (None, 0.01, None, 1)
    assert progress.policy("checker").version == 0


def test_the_pace_is_measured_without_pauses(job: Job) -> None:
    progress = Progress(job)
    progress.apply(step(1, 10, reward__mean=0.1))
    assert progress.seconds_left is None
    progress.apply(step(2, 14, reward__mean=0.1))
    assert progress.seconds_left == pytest.approx(8 * 4.0)
    progress.apply(StateChanged(START, JobState.PAUSED))
    progress.apply(StateChanged(START, JobState.RUNNING))
    progress.apply(step(3, 5000, reward__mean=0.1))
    assert progress.seconds_left == pytest.approx(7 * 4.0)


def test_the_plain_display_tells_every_event_but_activities(job: Job) -> None:
    stream = io.StringIO()
    display, progress = PlainDisplay(stream), Progress(job)
    for event in (
        StateChanged(START, JobState.RUNNING),
        Activity(START, "step 1: 3 of 8", 1, 10, 3, 8),
        step(1, 5, reward__solver__mean=0.25, rollout__tokens_per_second=1234.5),
        Notice(START, "warning", "a worker was lost"),
        StateChanged(START, JobState.FAILED, Internal("it broke.", field="f", value=1)),
    ):
        progress.apply(event)
        display.show(progress, event)

    assert stream.getvalue().splitlines() == [
        "job mine is running",
        "step 1/10 | reward solver 0.250 | solver v0 loss - grad - | checker v0 loss - grad - | "
        "1,234 tok/s | eta -",
        "warning: a worker was lost",
        "job mine has failed: f = 1: it broke.",
    ]


def test_the_live_picture_shows_all_of_it(job: Job) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    display, progress = LiveDisplay(console), Progress(job)
    for n in range(1, 5):
        progress.apply(step(n, 5 * n, reward__solver__mean=n / 4, solver__grad_norm=1.5))
    progress.apply(step(4, 21, evaluation__reward__solver__mean=0.625))
    progress.apply(Activity(START, "step 5: [3] of 8 trajectories", 5, 10, 3, 8))

    with console.capture() as captured:
        console.print(display.picture(progress))
    text = captured.get()

    for expected in (
        "mine", "running", "micro_batch", "step 4/10", "eta 30s", "solver", "checker",
        "1.000", "0.625", "▁▃▆█", "1.50", "step 5: [3] of 8 trajectories",
    ):  # fmt: skip
        assert expected in text


def test_the_summary_compares_and_says_where_everything_is(job: Job) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=60)
    print_summary(console, job, [], panel="http://127.0.0.1:8080")
    text = stream.getvalue()

    assert "mine running in 1m15s after 0 of 10 steps" in text
    assert "+0.700" in text
    assert "/runs/mine/metrics.jsonl" in text
    assert "http://127.0.0.1:8080" in text


def test_a_line_of_an_evaluation_has_intervals_in_brackets(job: Job) -> None:
    stream = io.StringIO()
    scored = {
        "evaluation/team/mean": 0.5,
        "evaluation/team/mean/low": 0.41,
        "evaluation/team/mean/high": 0.5912,
        "evaluation/reward/low/mean": 2.0,
        "evaluations/math/pass@1": 0.25,
        "evaluations/math/pass@1/low": 0.2,
        "evaluations/math/pass@1/high": 0.3,
    }
    event = MetricsLogged(START, 20, scored)
    progress = Progress(job)
    progress.apply(event)
    PlainDisplay(stream).show(progress, event)
    assert stream.getvalue().strip() == (
        "evaluation after step 20 | low 2.000 team 0.500 [0.410, 0.591] "
        "math/pass@1 0.250 [0.200, 0.300]"
    )


def test_the_summary_has_intervals_in_brackets_before_and_after(job: Job) -> None:
    known = replace(
        job,
        before_intervals={"team_success": Interval(0.15, 0.2612)},
        after_intervals={"team_success": Interval(0.853, 0.94)},
    )
    stream = io.StringIO()
    print_summary(Console(file=stream, width=90), known, [])
    rows = {
        line.split()[0]: line.split() for line in stream.getvalue().splitlines() if line.strip()
    }
    assert " ".join(rows["team_success"][1:]) == "0.200 [0.150, 0.261] 0.900 [0.853, 0.940] +0.700"
    assert rows["reward/solver"][1:] == ["0.100", "-"]
    assert "In brackets: 95 % confidence intervals." in stream.getvalue()
    stream = io.StringIO()
    print_summary(Console(file=stream, width=90), replace(known, total_steps=0, after={}), [])
    assert "0.200 [0.150, 0.261]" in stream.getvalue()


def test_the_summary_says_how_many_steps_had_a_signal(job: Job) -> None:
    done = replace(
        job,
        step=20,
        versions={"solver": 20, "checker": 20, "frozen": 0},
        metrics={"solver/signal_steps": 12.0, "checker/signal_steps": 0.0},
    )
    stream = io.StringIO()
    print_summary(Console(file=stream, width=90), done, [])
    assert "signal       checker 0 of 20 steps, solver 12 of 20 steps" in stream.getvalue()
    assert done.signal_steps == {"solver": 12, "checker": 0}


def test_without_evaluation_the_training_rewards_are_compared(job: Job) -> None:
    from dataclasses import replace

    progress = Progress(job)
    progress.apply(step(1, 5, reward__solver__mean=0.25))
    progress.apply(step(2, 9, reward__solver__mean=0.5))
    unscored = replace(job, before={}, after={})
    title, rows = scores(unscored, progress)
    assert (title, rows) == ("training reward", [("solver", 0.25, 0.5)])
    stream = io.StringIO()
    print_summary(Console(file=stream, width=60), unscored, [], progress)
    assert "scored where the job has evaluation.queries" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m"), (270000, "3d03h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    values = [None, 0, 0.00001, 0.1234, 1.5, 12.345, 123.4, 12345.6, float("nan")]
    assert [number(v) for v in values] == [
        "-", "0", "1.0e-05", "0.123", "1.50", "12.3", "123", "12,346", "nan",
    ]  # fmt: skip
    assert (size(512), size(4096), size(3 * 2**30)) == ("512 B", "4.0 KiB", "3.0 GiB")
    assert (change(0.25, 0.5), change(None, 1)) == ("+0.250", "")


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.integers(1, 30))
@example([1.7976931348623157e308, -9.9e291], 2)
def test_a_sparkline_never_fails_nor_overflows(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    assert sparkline([0, 1], ascii_only=True).isascii()


def test_a_step_without_a_signal_shows_nothing_of_the_step_before(job: Job) -> None:
    stream = io.StringIO()
    display, progress = PlainDisplay(stream), Progress(job)
    numbers = {"solver__loss__policy": 0.5, "solver__grad_norm": 2.0}
    good = {"solver__skipped": 0, "solver__samples": 8, "checker__skipped": 0}
    for event in (
        step(1, 5, reward__solver__mean=0.25, team__mean=0.5, **numbers, **good),
        step(2, 9, solver__skipped=0, solver__samples=0, checker__skipped=1, checker__samples=4),
    ):
        progress.apply(event)
        display.show(progress, event)
    flat = {**good, "solver__no_signal": 1, "solver__grad_norm": 0.0, "checker__skipped": 1}
    progress.apply(event := step(3, 12, **flat))
    display.show(progress, event)
    assert "| solver v2 no signal | checker v0 no update |" in stream.getvalue().splitlines()[-1]
    assert progress.policy("solver").loss is None
    progress.apply(step(2, 9, solver__skipped=0, solver__samples=0, checker__skipped=1))
    first, second, _ = stream.getvalue().splitlines()
    assert "solver v1 loss 0.500 grad 2.00" in first
    assert "team 0.500" in first
    assert second == "step 2/10 | solver v1 no update | checker v0 no update | eta 32s"
    assert progress.policy("solver").loss is None
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    with console.capture() as captured:
        console.print(LiveDisplay(console).picture(progress))
    assert captured.get().count("no update") == 2
    assert "0.250" not in captured.get()


def test_a_job_that_taught_nothing_says_so_in_its_summary(job: Job) -> None:
    problem = FailedPrecondition("no policy was updated", kind="nothing_learned", remedy="Look.")
    console = Console(file=io.StringIO(), width=100)
    for state, said in ((JobState.SUCCEEDED, True), (JobState.FAILED, False)):
        with console.capture() as captured:
            print_summary(console, replace(job, state=state, problem=problem), [])
        assert ("nothing was learned: no policy was updated. Look." in captured.get()) is said


def test_a_conversation_that_failed_before_its_first_turn_is_shown_without_a_question() -> None:
    turn = Turn(
        "solver", "solver", 0, (("system", "Be brief."), ("user", "2+2")), "4", 1, 1, "stop", 1.0
    )
    failed = Trajectory("h0-e0-t0", "h0", 0, "failed", "KeyError: 'x'", {}, 0, 1.0, True)
    played = Trajectory(
        "h0-e3-t0", "h0", 3, "completed", "", {"solver": 1.0}, 1, 1.0, True, (turn,)
    )
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        print_conversations(console, [(failed, played), (failed, failed)])
    assert "2+2" in captured.get()
    assert captured.get().count("KeyError: 'x'") == 3
