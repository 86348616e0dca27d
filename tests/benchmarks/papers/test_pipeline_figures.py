"""Figures and pictures of the pipeline benchmark, from rows made by hand."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.papers.pipeline import equality, report
from benchmarks.papers.pipeline.equality import Lesson
from benchmarks.papers.pipeline.figures import blocks, figures, levels, window
from benchmarks.papers.pipeline.measure import Run, StepEnd
from benchmarks.papers.pipeline.research_team import AGENTS, PLANNER, Queries, lognormal, play
from benchmarks.papers.pipeline.svg import Panel, draw
from benchmarks.papers.pipeline.workload import CA, MA, SETUPS, job, modes, quick
from testbed.timeline import Timeline, TimelineSpan, busy_within, read_spans


def span(
    lane: str, what: str, policy: str, start: float, end: float, level: float = 1
) -> TimelineSpan:
    return TimelineSpan(lane, what, policy, start, end, level)


def hand_made() -> Run:
    """Two measured steps of 10 s: 6 s of rollout, 5 s of training, 2 s of them together."""
    engines, trainers = [], []
    for begin in (100.0, 110.0):
        engines.append(span("j.planner.0", "generate", "planner", begin, begin + 6))
        engines.append(span("j.planner.0", "load", "planner", begin + 9.5, begin + 10))
        trainers.append(span("t", "train", "planner", begin + 4, begin + 8))
        trainers.append(span("t", "step", "planner", begin + 8, begin + 9))
    steps = [StepEnd(at, {"step/seconds": 10.0}) for at in (100.0, 110.0, 120.0)]
    mode = modes()[0]
    return Run(mode, steps, {"planner": engines}, {"trainer 0": trainers, "trainer 1": []}, 12.5)


def test_figures_add_up() -> None:
    found = figures(hand_made())
    assert found.seconds == 10
    assert found.spread == 0
    shares = (found.rollout_alone, found.both, found.training_alone, found.neither)
    assert shares == pytest.approx((4, 2, 3, 1))
    assert found.engines == pytest.approx(0.6)
    assert found.trainers == pytest.approx(0.25)
    assert found.busiest_trainer == pytest.approx(0.5)


def test_a_row_of_one_step_is_measured_whole() -> None:
    run = hand_made()
    found = figures(replace(run, steps=run.steps[1:2]))
    assert found.seconds == 10
    assert found.rollout_alone == pytest.approx(4)
    # The last step of `async` is not measured, since no later step overlaps with it.
    late = replace(run, mode=modes()[-1])
    assert window(late) == (100, 110)
    assert figures(late).seconds == 10


def test_the_table_shows_ratios_with_published_and_target_values() -> None:
    serial, sync, micro_batch, late = modes()
    found = figures(hand_made())
    rows: list[report.Row] = [
        (replace(hand_made(), mode=mode), replace(found, seconds=seconds))
        for mode, seconds in ((serial, 100.0), (sync, 18.0), (micro_batch, 10.0), (late, 8.0))
    ]
    assert report.speedups(rows) == {
        "micro_batch_over_serial": 10.0,
        "micro_batch_over_sync": 1.8,
        "async_over_micro_batch": 1.25,
        "async_over_sync": 2.25,
    }
    told = report.as_json([(MA, rows), (CA, rows)], [])
    assert told["targets"]["micro_batch_over_sync"] == {
        "setup": "ma",
        "target": 1.8,
        "measured": 1.8,
    }
    assert told["targets"]["async_over_micro_batch"]["setup"] == "ca"
    assert report.ratio_table(MA, rows).row_count == 4
    # Without the set-up of a target, the target has no verdict.
    assert set(report.as_json([(CA, rows)], [])["targets"]) == {"async_over_micro_batch"}


def test_the_report_names_what_failed_and_what_differs() -> None:
    done, broken = hand_made(), Run(modes()[3], [], {}, {}, failure="no such mode")
    lessons = [
        Lesson("sync", [0.1, 0.2], {"solver": "a" * 32, "checker": "b" * 32}),
        Lesson("micro_batch", [0.1, 0.2], {"solver": "a" * 32, "checker": "c" * 32}),
        Lesson("async", [], {}, "out of order"),
    ]
    rows: list[report.Row] = [(done, figures(done)), (broken, None)]
    found = json.loads(json.dumps(report.as_json([(MA, rows), (CA, rows)], lessons)))
    assert found["setup"] == "ma"
    assert found["serial_s"] == found["setups"]["ca"]["serial_s"] == 10
    assert found["async_s"] is None
    assert found["util"]["serial"]["engines"] == 0.6
    assert found["failures"] == {
        "ma/async": "no such mode",
        "ca/async": "no such mode",
        "learned/async": "out of order",
    }
    assert found["learned"]["micro_batch"]["bitwise_as_sync"] is False
    assert report.agrees(lessons[0], lessons) is None
    same = Lesson("micro_batch", [0.1, 0.2 + 1e-16], lessons[0].checksums)
    assert report.agrees(same, lessons) is True
    off = Lesson("micro_batch", [0.1, 0.2001], lessons[0].checksums)
    assert report.agrees(off, lessons) is False
    assert report.speed_table(MA, rows).row_count == 2
    assert report.lesson_table(lessons).row_count == 3


def test_a_picture_shows_every_lane_and_the_ends_of_steps() -> None:
    run = hand_made()
    text = draw([Panel("serial <1>", run, 100, 120), Panel("again", run, 100, 110)])
    root = ElementTree.fromstring(text)
    names = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("trainer 1") == 2
    assert "serial <1>" in names
    # Three ends of steps in the first panel, two in the second.
    assert text.count('class="e"') == 5
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) == 2


def test_levels_and_blocks() -> None:
    spans = [span("e", "generate", "p", 0, 2, 4), span("e", "generate", "p", 3, 4, 2)]
    assert levels(spans, 0, 4, 4) == [4, 4, 0, 2]
    assert levels(spans, 0, 4, 2) == [4, 1]
    joined = blocks(spans, 0, 10, gap=1.5)
    assert [(one.start, one.end) for one in joined] == [(0, 4)]
    assert len(blocks(spans, 0, 10, gap=0.5)) == 2


def test_spans_come_back_as_they_were_written(tmp_path: Path) -> None:
    one, two = span("a", "train", "p", 1, 3), span("a", "train", "q", 2, 5)
    with Timeline(tmp_path, "worker") as timeline:
        timeline.add(two)
        timeline.add(one)
    with (tmp_path / "worker.jsonl").open("a") as file:
        file.write('{"lane": "cut sho')
    assert read_spans(tmp_path) == [one, two]
    assert busy_within([one, two], 0, 10) == 4
    assert busy_within([one, two], 2.5, 4) == 1.5
    with Timeline(None, "nobody") as nothing:
        nothing.add(one)
    assert not nothing.wanted


def test_every_row_is_the_same_job_in_another_mode(tmp_path: Path) -> None:
    for setup in (*SETUPS.values(), quick(MA)):
        made = [job(mode, setup, tmp_path).model_dump() for mode in modes()]
        for one in made:
            del one["name"], one["pipeline"]["mode"], one["pipeline"]["steps"]
            assert all(policy["simulated"] for policy in one["policies"].values())
        assert all(one == made[0] for one in made)
    assert equality.job("sync", 3, tmp_path).pipeline.deterministic
    assert not equality.job("async", 3, tmp_path).pipeline.deterministic


class _Agent:
    def __init__(self, name: str, calls: Counter[str], rng: random.Random) -> None:
        self._name, self._calls, self._rng = name, calls, rng

    async def chat(self, messages: object) -> _Agent:
        self._calls[self._name] += 1
        self.token_ids = (self._rng.randrange(1000),)
        return self


class _Tools:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def call(self, name: str, seconds: float) -> float:
        self.seconds.append(seconds)
        return seconds


async def test_calls_are_skewed_by_zipf_and_latencies_have_a_tail() -> None:
    queries, rng, tools = Queries("train", rounds=3, tool_seconds=0.2), random.Random(0), _Tools()
    by_rank: Counter[int] = Counter()
    total: Counter[str] = Counter()
    for index in range(1500):
        query, calls = queries[index], Counter[str]()
        rewards = await play(query, {name: _Agent(name, calls, rng) for name in AGENTS}, tools)
        assert set(rewards) == {*AGENTS, "team"}
        for rank, name in enumerate(query["agents"], start=1):
            by_rank[rank] += calls[name]
        total += calls
    assert queries[7] == Queries("train", rounds=3, tool_seconds=0.2)[7]
    for rank in (2, 3, 4, 5):
        assert by_rank[rank] / by_rank[1] == pytest.approx(1 / rank, rel=0.1)
    specialists = [count for name, count in total.items() if name != PLANNER]
    assert max(specialists) < 1.15 * min(specialists)
    mean = sum(tools.seconds) / len(tools.seconds)
    assert mean == pytest.approx(0.2, rel=0.15)
    assert max(tools.seconds) > 8 * mean
    draws = [lognormal(rng, 5.0, 0.5) for _ in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(5.0, rel=0.02)
