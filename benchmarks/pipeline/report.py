"""Tables for people and the object for programs."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from benchmarks.pipeline.equality import POLICIES, Lesson
from benchmarks.pipeline.figures import Figures
from benchmarks.pipeline.measure import Run

Row = tuple[Run, Figures | None]


def speed_table(rows: list[Row]) -> Table:
    """Seconds per step, how they pass, and how busy the hardware is."""
    table = Table(
        title="Pipeline modes on the same PACED engines and trainers (modelled time, no GPU)",
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


def lesson_table(lessons: list[Lesson]) -> Table:
    """What was learned, and whether two modes learned bitwise the same."""
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
    """Whether its weights are bitwise those of `sync`; None for sync and async.

    The rewards must agree to rounding: their means are added up as trajectories end.
    """
    sync = next((one for one in lessons if one.mode == "sync" and not one.failure), None)
    if sync is None or lesson.mode in ("sync", "async") or lesson.failure:
        return None
    close = len(lesson.rewards) == len(sync.rewards) and all(
        math.isclose(one, other, abs_tol=1e-9)
        for one, other in zip(lesson.rewards, sync.rewards, strict=True)
    )
    return close and lesson.checksums == sync.checksums


def as_json(rows: list[Row], lessons: list[Lesson]) -> dict[str, Any]:
    """`{mode}_s`, utilization and shares by mode, speed-ups, and what was learned."""
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
    found["share_s"] = {
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
    found["speedup"] = {
        f"{fast}_over_{slow}": round(measured[slow].seconds / measured[fast].seconds, 3)
        for fast, slow in (
            ("micro_batch", "serial"),
            ("micro_batch", "sync"),
            ("async", "micro_batch"),
        )
        if fast in measured and slow in measured
    }
    found["paced"] = True
    found["learned"] = {
        lesson.mode: {
            "rewards": [round(reward, 4) for reward in lesson.rewards],
            "checksums": lesson.checksums,
            "bitwise_as_sync": agrees(lesson, lessons),
        }
        for lesson in lessons
    }
    failures = {run.mode.name: run.failure for run, f in rows if f is None}
    failures |= {f"learned/{one.mode}": one.failure for one in lessons if one.failure}
    if failures:
        found["failures"] = failures
    return found
