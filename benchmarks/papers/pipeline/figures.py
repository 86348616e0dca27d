"""Computation of a row's figures from steps and spans."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from benchmarks.papers.pipeline.measure import Run, StepEnd
from testbed.timeline import TimelineSpan, busy_within, union
from troupe.contracts import metric_names

# Activities that count as an engine's work; loading weights does not.
_WORK = ("generate", "train", "step")


@dataclass(frozen=True)
class Figures:
    """Means per step over `window`.

    The four shares are seconds per step in which engines alone, trainers alone, both or neither
    had work; they add up to `seconds`. Utilizations are busy time over total time.
    """

    seconds: float
    spread: float
    engines: float
    trainers: float
    busiest_trainer: float
    rollout_alone: float
    both: float
    training_alone: float
    neither: float
    staleness: float
    cpu: float


def window(run: Run) -> tuple[float, float]:
    """Return the measured window of a row in wall-clock seconds: all steps except the first and the
    last `Mode.after`, or its only step."""
    first, last = run.steps[0], _steps(run)[-1]
    return first.at - (first.values[metric_names.STEP_SECONDS] if first is last else 0), last.at


def _steps(run: Run) -> list[StepEnd]:
    return run.steps[: max(1, len(run.steps) - run.mode.after)]


def figures(run: Run) -> Figures:
    """Return the figures of a row with at least one step."""
    start, end = window(run)
    steps = _steps(run)
    count = max(1, len(steps) - 1)
    total = end - start
    ends = [start, *(step.at for step in steps if step.at > start)]
    each = [later - earlier for earlier, later in itertools.pairwise(ends)]
    engines = [_work(spans) for spans in run.engines.values()]
    trainers = [_work(spans) for spans in run.trainers.values()]
    rollout = [span for spans in engines for span in spans]
    training = [span for spans in trainers for span in spans]
    in_rollout = busy_within(rollout, start, end)
    in_training = busy_within(training, start, end)
    either = busy_within([*rollout, *training], start, end)
    used = [busy_within(spans, start, end) / total for spans in trainers]
    stale = [step.values.get(metric_names.STALENESS_MEAN, 0.0) for step in steps[-count:]]
    return Figures(
        seconds=total / count,
        spread=statistics.pstdev(each),
        engines=statistics.fmean(busy_within(spans, start, end) / total for spans in engines),
        trainers=statistics.fmean(used),
        busiest_trainer=max(used),
        rollout_alone=(either - in_training) / count,
        both=(in_rollout + in_training - either) / count,
        training_alone=(either - in_rollout) / count,
        neither=(total - either) / count,
        staleness=statistics.fmean(stale),
        cpu=run.cpu,
    )


def _work(spans: list[TimelineSpan]) -> list[TimelineSpan]:
    return [span for span in spans if span.what in _WORK]


def levels(spans: list[TimelineSpan], start: float, end: float, buckets: int) -> list[float]:
    """Return the mean `level` of `spans` in equal buckets of [start, end]."""
    width = (end - start) / buckets
    found = [0.0] * buckets
    for span in spans:
        first = max(0, int((span.start - start) / width))
        last = min(buckets - 1, int((span.end - start) / width))
        for bucket in range(first, last + 1):
            left = start + bucket * width
            shared = min(span.end, left + width) - max(span.start, left)
            found[bucket] += span.level * max(0.0, shared) / width
    return found


def blocks(spans: list[TimelineSpan], start: float, end: float, gap: float) -> list[TimelineSpan]:
    """Return `spans` within [start, end], joining spans of one policy that are at most `gap` s
    apart."""
    joined: list[TimelineSpan] = []
    for policy in sorted({span.policy for span in spans}):
        own = [
            TimelineSpan(s.lane, "", policy, s.start, s.end + gap)
            for s in spans
            if s.policy == policy
        ]
        joined += [
            TimelineSpan("", "", policy, since, until - gap)
            for since, until in union(own, start, end)
        ]
    return joined
