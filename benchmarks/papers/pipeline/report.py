"""Tables for people and the object for programs."""

from __future__ import annotations

import math
from typing import Any, Final

from rich.table import Table

from benchmarks.papers.pipeline.equality import POLICIES, Lesson
from benchmarks.papers.pipeline.figures import Figures
from benchmarks.papers.pipeline.measure import Run
from benchmarks.papers.pipeline.workload import CA, MA, Setup

Row = tuple[Run, Figures | None]
Measured = tuple[Setup, list[Row]]

# FlexMARL's claims are judged where training takes as long as rollout, the claim for `async` where
# tails make the rollout long: one workload cannot show both (docs/benchmarks/pipeline.md).
JUDGED: Final = {
    "micro_batch_over_serial": (MA.name, 5.0),
    "micro_batch_over_sync": (MA.name, 1.8),
    "async_over_micro_batch": (CA.name, 1.2),
}
_RATIOS: Final = (*JUDGED, "async_over_sync")


def speed_table(setup: Setup, rows: list[Row]) -> Table:
    """Return the table of seconds per step, their division, and utilizations."""
    table = Table(
        title=f"Pipeline modes on the same SIMULATED engines and trainers (modelled time, no GPU); "
        f"{setup.name}: {setup.stands_for}",
        caption="Seconds are per step, mean of the steady state. Everything but the models' "
        "arithmetic is real: services, messages, claims, commits, weight updates.",
    )
    table.add_column("mode")
    for column in (
        "s/step",
        "± s",
        "x faster",
        "rollout alone",
        "both",
        "training alone",
        "neither",
        "engines",
        "trainers",
        "busiest",
        "CPU",
    ):
        table.add_column(column, justify="right")
    slowest = next((f.seconds for _, f in rows if f is not None), 0.0)
    for run, f in rows:
        if f is None:
            table.add_row(run.mode.label, f"failed: {run.failure}")
            continue
        table.add_row(
            run.mode.label,
            f"{f.seconds:.2f}",
            f"{f.spread:.2f}",
            f"{slowest / f.seconds:.2f}",
            *(f"{s:.2f}" for s in (f.rollout_alone, f.both, f.training_alone, f.neither)),
            *(f"{100 * s:.0f} %" for s in (f.engines, f.trainers, f.busiest_trainer)),
            f"{f.cpu:.0f} %",
        )
    return table


def ratio_table(setup: Setup, rows: list[Row]) -> Table:
    """Return the table of ratios between modes, with published and target ratios."""
    table = Table(title=f"{setup.name}: ratios of seconds per step")
    for column in ("", "here", "published", "target"):
        table.add_column(column, justify="right" if column else "left")
    for name, ratio in speedups(rows).items():
        where, target = JUDGED.get(name, ("", 0.0))
        published = setup.published.get(name)
        table.add_row(
            name.replace("_over_", " over "),
            f"{ratio:.2f}",
            "" if published is None else f"{published:g}",
            f"{target:g}" if where == setup.name else "",
        )
    return table


def speedups(rows: list[Row]) -> dict[str, float]:
    """Return the ratios of seconds per step between modes that both have figures."""
    measured = {run.mode.name: f for run, f in rows if f is not None}
    pairs = {name: name.split("_over_") for name in _RATIOS}
    return {
        name: round(measured[slow].seconds / measured[fast].seconds, 3)
        for name, (fast, slow) in pairs.items()
        if fast in measured and slow in measured
    }


def lesson_table(lessons: list[Lesson]) -> Table:
    """Return the table of learning, and of its bitwise equality between modes."""
    table = Table(title="What is learned: REAL engines and trainers, a tiny team")
    for column in ("mode", "team reward, first step", "last step", *POLICIES, "as sync"):
        table.add_column(column)
    for lesson in lessons:
        if lesson.failure:
            table.add_row(lesson.mode, f"failed: {lesson.failure}")
            continue
        same = agrees(lesson, lessons)
        table.add_row(
            lesson.mode,
            f"{lesson.rewards[0]:.3f}",
            f"{lesson.rewards[-1]:.3f}",
            *(lesson.checksums[policy][:12] for policy in POLICIES),
            "" if same is None else "bitwise" if same else "NO",
        )
    return table


def agrees(lesson: Lesson, lessons: list[Lesson]) -> bool | None:
    """Return whether its weights equal those of `sync` bit for bit; None for sync and async.

    The rewards must agree up to rounding, since their means are summed in the order of
    trajectories' ends.
    """
    sync = next((one for one in lessons if one.mode == "sync" and not one.failure), None)
    if sync is None or lesson.mode in ("sync", "async") or lesson.failure:
        return None
    close = len(lesson.rewards) == len(sync.rewards) and all(
        math.isclose(one, other, abs_tol=1e-9)
        for one, other in zip(lesson.rewards, sync.rewards, strict=True)
    )
    return close and lesson.checksums == sync.checksums


def as_json(tables: list[Measured], lessons: list[Lesson]) -> dict[str, Any]:
    """Return seconds per step and utilization of the main set-up, all figures of both set-ups, the
    targets, and the lessons."""
    setups = {setup.name: _one(setup, rows) for setup, rows in tables}
    # `ma`, unless it was left out.
    first = next(iter(setups), "")
    found: dict[str, Any] = {"setup": first, **_brief(setups.get(first, {})), "setups": setups}
    found["targets"] = {
        name: {"setup": where, "target": target, "measured": setups[where]["speedup"][name]}
        for name, (where, target) in JUDGED.items()
        if where in setups and name in setups[where]["speedup"]
    }
    found["simulated"] = True
    found["learned"] = {
        lesson.mode: {
            "rewards": [round(reward, 4) for reward in lesson.rewards],
            "checksums": lesson.checksums,
            "bitwise_as_sync": agrees(lesson, lessons),
        }
        for lesson in lessons
    }
    failures = {
        f"{setup.name}/{run.mode.name}": run.failure
        for setup, rows in tables
        for run, f in rows
        if f is None
    }
    failures |= {f"learned/{one.mode}": one.failure for one in lessons if one.failure}
    if failures:
        found["failures"] = failures
    return found


def _brief(setup: dict[str, Any]) -> dict[str, Any]:
    wanted = ("util", "speedup")
    return {key: one for key, one in setup.items() if key.endswith("_s") or key in wanted}


def _one(setup: Setup, rows: list[Row]) -> dict[str, Any]:
    measured = {run.mode.name: f for run, f in rows if f is not None}
    found: dict[str, Any] = {
        f"{run.mode.name}_s": None if f is None else round(f.seconds, 3) for run, f in rows
    }
    found["util"] = {
        name: {
            "engines": round(f.engines, 3),
            "trainers": round(f.trainers, 3),
            "busiest_trainer": round(f.busiest_trainer, 3),
        }
        for name, f in measured.items()
    }
    found["shares"] = {
        name: {
            "rollout_alone": round(f.rollout_alone, 3),
            "both": round(f.both, 3),
            "training_alone": round(f.training_alone, 3),
            "neither": round(f.neither, 3),
        }
        for name, f in measured.items()
    }
    found["bound"] = {
        run.mode.name: {
            lane: sorted({span.policy for span in spans}) for lane, spans in run.trainers.items()
        }
        for run, f in rows
        if f is not None
    }
    found["cpu_percent"] = {name: f.cpu for name, f in measured.items()}
    found["speedup"] = speedups(rows)
    found["published"] = setup.published
    found["stands_for"] = setup.stands_for
    return found
