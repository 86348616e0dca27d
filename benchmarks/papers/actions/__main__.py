"""Actions scheduled one by one, against a reservation for every trajectory.

    python -m benchmarks.papers.actions [--quick] [--json] [--only real|paced|simulated|decisions]

On a busy machine, run it under `chrt -r 3`: the live parts then take precedence, and pause for
other work.

`real`: a reward service assigns this machine's cores to actions that use them fully. `paced`: it
assigns cores of a larger host, and actions sleep for their time there. `simulated`: the same
decisions in simulated time, at the published sizes. `decisions`: the time of one decision. The last
line is one JSON object with the results of the parts that ran:

- `act_elastic_s`, `act_told_s`, `act_fcfs_s`, `act_fixed_s`, `act_static_s`: mean action completion
  time of the largest batch on this machine's cores; `real_gain`, `_told`, `_fcfs`: static over
  elastic by number of trajectories, and `_most`: static over a lower bound for all schedules. In
  `elastic` the service learns the durations of actions, which are drawn so that single ones are
  unpredictable; `told`: functions declare them by their arguments (`seconds_per`), like
  ARL-Tangram's profiles; `fcfs`: first come, first served. `service_cpu`: CPU of the service over
  core-seconds of the actions. `overhead`: the service's running time of an action over the
  function's own time.
- `real_gain_alike`: static over elastic of the largest batch with groups of 8 trajectories, if the
  query determines `Plan.alike` of the spread of durations: `learned`, `again` (the same queries a
  second time), `told`.
- `gain_by_likeness`: simulated, on two cores, mean of several draws, by this part of the spread.
- `gain_by_cores`: simulated, such trajectories on more cores, mean of several draws.
- `paced_act_...`, `paced_gain`: the same on the paced host, with reservations as in the published
  set-up. `paced_saved`: the part of the cores that elastic actions save, according to the
  simulator, at the speed of reservations that are no larger than each action's use;
  `paced_saved_act`: the ACT with the remaining cores over the one with fixed shares and no wait.
- `resources_saved`: the same in simulated time, for the smallest batch; `saved_of_all`: as a part
  of all cores that the baseline reserves.
- `twin_error`: the largest relative difference of simulated and paced elastic ACT.
- `simulated_gain`: static over elastic ACT by batch. `queue_s`: mean wait of an elastic action.
- `gpus_for_equal_latency`: shared GPUs as fast as 36 dedicated ones; at other loads `gpus_at_busy`.
- `decision_p99_ms`: CPU of a decision with 4,096 queued actions of 64 levels on 15 hosts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Console

from benchmarks.command import finish, options_of, run_program
from benchmarks.papers.actions import report, simulated
from benchmarks.papers.actions.decisions import decision_seconds
from benchmarks.papers.actions.live import Mode, Result, play
from benchmarks.papers.actions.served import breathe, modestly, started
from testbed.simulator.rollout import BatchResult
from testbed.simulator.trace import CodingLaw, TeacherLaw, Trajectory, coding
from troupe.scheduling.elastic.order import FCFS, SHORTEST

_SEED: Final = 1
_PARTS: Final = ("real", "paced", "simulated", "decisions")


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    real: tuple[int, ...] = (4, 16, 64)
    # Trajectories played, and learned from, in advance.
    before: int = 32
    by_cores: tuple[int, ...] = (2, 4, 8, 16, 24, 32, 48, 64)
    draws: int = 4
    # Part of the spread of durations that the query determines: with similar trajectories, and
    # simulated.
    alike: float = 0.9
    likeness: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9)
    likeness_draws: int = 8
    paced: tuple[int, ...] = (16, 64)
    paced_workers: int = 64
    # Seconds here per second of the trace, as real work and as sleep.
    real_scale: float = 1 / 500
    paced_scale: float = 1 / 50
    turns: float = 8.0
    sizes: tuple[int, ...] = (256, 512, 768, 1024, 1280, 1536)
    beyond: tuple[int, ...] = (2048, 2560, 3072)
    pools: tuple[int, ...] = (8, 12, 16, 20, 24, 28, 32, 36, 40)
    steps: int = 10
    queued: int = 4096
    decisions: int = 2000


FULL = Plan()
QUICK = Plan(
    real=(1, 2),
    before=2,
    by_cores=(2, 8),
    draws=1,
    likeness=(0.9,),
    likeness_draws=1,
    paced=(4, 8),
    paced_workers=10,
    real_scale=1 / 1000,
    paced_scale=1 / 400,
    turns=3.0,
    sizes=(256, 512),
    beyond=(),
    pools=(12, 36),
    steps=1,
    queued=512,
    decisions=20,
)
# Cores of a host a sixteenth as large as the published ones.
_PACED_CORES: Final = simulated.HOSTS * simulated.HOST_CORES // 16


def _small(plan: Plan, cores: int) -> CodingLaw:
    """Return the law for few cores: actions use at most these, and a reservation is one core."""
    most = min(CodingLaw().max_cores, cores)
    law = CodingLaw(turns=plan.turns / 2, reward_seconds=60.0, max_cores=most, duty_cores=1)
    return law.scaled(plan.real_scale)


async def real(plan: Plan, console: Console) -> dict[str, Any]:
    """Measure on the cores of this machine."""
    cores = len(os.sched_getaffinity(0))
    law = _small(plan, cores)
    modes = [Mode("elastic"), Mode("told", told=True), Mode("fcfs", order=FCFS)]
    modes += [Mode("fixed", cores), Mode("reserved", 1, cores)]
    before = coding(plan.before, law, _SEED + 1)
    rows: list[tuple[Result, BatchResult]] = []
    for order in (SHORTEST, FCFS):
        async with started(cores, 4 * cores, paced=False, order=order) as reward:
            for mode in (mode for mode in modes if mode.order == order):
                await breathe()
                if mode.fixed is None and mode.order == SHORTEST:
                    await play(reward, before, mode, cores, law)
                for count in plan.real:
                    trajectories = coding(count, law, _SEED)
                    result = await play(reward, trajectories, mode, cores, law)
                    rows.append((result, _twin(trajectories, mode, cores, before)))
    alike = await _alike(plan, law, cores)
    report.live(console, "For real: the cores of this machine", [*rows, *alike])
    results = [result for result, _ in rows]
    most = {}
    for result in results:
        if result.mode == "reserved":
            least = simulated.least(coding(result.trajectories, law, _SEED), cores)
            most[f"{result.trajectories}"] = round(result.act / least, 2)
    largest = _of(rows, "elastic", plan.real[-1])
    return {
        **_acts(rows, "", plan.real[-1]),
        "real_gain": _gains(results),
        "real_gain_told": _gains(results, "told"),
        "real_gain_fcfs": _gains(results, "fcfs"),
        "real_gain_most": most,
        "real_gain_alike": {
            result.mode.split(", ")[1]: round(alike[-1][0].act / result.act, 2)
            for result, _ in alike[:-1]
        },
        "overhead": round(largest.overhead, 4),
        "service_cpu": round(largest.scheduler, 4),
    }


async def _alike(plan: Plan, law: CodingLaw, cores: int) -> list[tuple[Result, BatchResult]]:
    """Measure the largest batch with similar calls of a query; the last row has reservations."""
    law, count = replace(law, alike=plan.alike), plan.real[-1]
    before, first = coding(plan.before, law, _SEED + 1), coding(count, law, _SEED)
    again = coding(count, law, _SEED, epoch=1)
    learned, told = Mode("alike, learned", job="alike"), Mode("alike, told", told=True)
    rows: list[tuple[Result, BatchResult]] = []
    async with started(cores, 4 * cores, paced=False) as reward:
        for mode, trajectories, known in (
            (learned, first, before),
            (replace(learned, name="alike, again"), again, [*before, *first]),
            (told, first, before),
        ):
            await breathe()
            if mode.name != "alike, again":
                await play(reward, before, mode, cores, law)
            result = await play(reward, trajectories, mode, cores, law)
            rows.append((result, _twin(trajectories, mode, cores, known)))
        await breathe()
        static = Mode("alike, reserved", 1, cores)
        rows.append((await play(reward, first, static, cores, law), _twin(first, static, cores)))
    return rows


async def paced(plan: Plan, console: Console) -> dict[str, Any]:
    """Measure on a host of more cores, whose actions sleep."""
    law = CodingLaw(turns=plan.turns).scaled(plan.paced_scale)
    parallelism, reservations = simulated.POD_PARALLELISM, _PACED_CORES // simulated.POD_CORES
    modes = (
        Mode("elastic"),
        Mode("fixed", parallelism),
        Mode("reserved", parallelism, reservations),
    )
    rows: list[tuple[Result, BatchResult]] = []
    async with started(_PACED_CORES, plan.paced_workers, paced=True) as reward:
        for count in plan.paced:
            trajectories = coding(count, law, _SEED)
            for mode in modes:
                await breathe()
                result = await play(reward, trajectories, mode, _PACED_CORES, law)
                rows.append((result, _twin(trajectories, mode, _PACED_CORES)))
    # The fewest cores that, according to the simulator, are as fast as separate shares.
    trajectories = coding(plan.paced[-1], law, _SEED)
    tight = parallelism * plan.paced[-1]
    fewer, _ = simulated.cores_for(simulated.tight(trajectories).act, trajectories, 2, tight)
    async with started(fewer, plan.paced_workers, paced=True) as reward:
        result = await play(reward, trajectories, modes[0], fewer, law)
    rows.append((result, _twin(trajectories, modes[0], fewer)))
    async with started(tight, plan.paced_workers, paced=True) as reward:
        own = await play(reward, trajectories, Mode("own", parallelism), tight, law)
    rows.append((own, _twin(trajectories, Mode("own", parallelism), tight)))
    saved = {
        "paced_saved": round(1 - fewer / tight, 3),
        "paced_saved_act": round(result.act / own.act, 2),
    }
    report.live(console, "Paced: the service for real, actions asleep", rows)
    errors = [abs(twin.act / r.act - 1) for r, twin in rows if r.mode == "elastic"]
    return {
        **_acts(rows, "paced_", plan.paced[-1]),
        **saved,
        "paced_gain": _gains([result for result, _ in rows]),
        "twin_error": round(max(errors), 3),
    }


def simulate(plan: Plan, console: Console) -> dict[str, Any]:
    """Measure in simulated time."""
    law = CodingLaw()
    rows = simulated.batches(plan.sizes, plan.beyond, law, _SEED)
    report.batches(console, rows)
    several = [
        simulated.several(
            cores, plan.real[-1], _small(plan, cores), range(_SEED, _SEED + plan.draws)
        )
        for cores in plan.by_cores
    ]
    report.several(console, several)
    likeness = {
        alike: simulated.several(
            2,
            plan.real[-1],
            replace(_small(plan, 2), alike=alike),
            range(_SEED, _SEED + plan.likeness_draws),
        )
        for alike in plan.likeness
    }
    report.likeness(console, likeness)
    count, total = rows[0].trajectories, simulated.HOSTS * simulated.HOST_CORES
    trajectories = coding(count, law, _SEED)
    tight = count * simulated.POD_PARALLELISM
    own = simulated.tight(trajectories)
    cores, fewer = simulated.cores_for(own.act, trajectories, 8, tight)
    console.print(
        f"{count} trajectories with {simulated.POD_PARALLELISM} cores each, without any wait for "
        f"cores: {tight} cores, ACT {own.act:.2f} s. Elastic with {cores} cores: "
        f"{fewer.act:.2f} s"
    )
    enough: dict[str, int | None] = {}
    for busy in (0.03, 0.07):
        each, shared = simulated.pools(plan.pools, plan.steps, TeacherLaw(busy=busy), _SEED)
        report.pools(console, busy, each, shared)
        first = shared[0]
        foreseen, free = simulated.ideal(first.gpus, plan.steps, TeacherLaw(busy=busy), _SEED)
        report.ideal(console, each, first, foreseen, free)
        least = simulated.enough(each, shared)
        enough[f"{busy:.2f}"] = None if least is None else least.gpus
    return {
        "resources_saved": round(1 - cores / tight, 3),
        "saved_of_all": round(1 - cores / total, 3),
        "gain_by_cores": {f"{one.cores}": round(one.elastic, 2) for one in several},
        "gain_by_likeness": {
            f"{alike}": {"learned": round(one.elastic, 2), "again": round(one.again, 2)}
            | {"told": round(one.told, 2), "most": round(one.most, 2)}
            for alike, one in likeness.items()
        },
        "simulated_gain": {f"{r.trajectories}": round(r.gain, 1) for r in rows if r.static},
        "queue_s": {f"{r.trajectories}": round(r.elastic.wait, 3) for r in rows},
        "gpus_for_equal_latency": enough["0.03"],
        "gpus_at_busy": enough,
    }


def _twin(
    trajectories: Sequence[Trajectory],
    mode: Mode,
    cores: int,
    before: Sequence[Trajectory] = (),
) -> BatchResult:
    """Return the same in simulated time."""
    if mode.reservations is not None:
        pod, parallelism = cores // mode.reservations, mode.fixed or 1
        return simulated.reserved(
            trajectories, [cores], pod=pod, parallelism=parallelism, kubernetes=False
        )
    if mode.fixed is not None:
        return simulated.fixed(trajectories, [cores], mode.fixed)
    return simulated.elastic(trajectories, [cores], order=mode.order, told=mode.told, before=before)


def _of(rows: Sequence[tuple[Result, BatchResult]], mode: str, count: int) -> Result:
    return next(r for r, _ in rows if (r.mode, r.trajectories) == (mode, count))


def _acts(rows: Sequence[tuple[Result, BatchResult]], prefix: str, count: int) -> dict[str, float]:
    """Return the mean ACT of `count` trajectories, by mode."""
    modes = dict.fromkeys(r.mode for r, _ in rows)
    names = {mode: "static" if mode == "reserved" else mode for mode in modes}
    return {f"{prefix}act_{n}_s": round(_of(rows, m, count).act, 4) for m, n in names.items()}


def _gains(results: Sequence[Result], mode: str = "elastic") -> dict[str, float]:
    """Return static over elastic ACT, by number of trajectories."""
    static = {r.trajectories: r.act for r in results if r.mode == "reserved"}
    elastic = {r.trajectories: r.act for r in reversed(results) if r.mode == mode}
    return {f"{count}": round(act / elastic[count], 2) for count, act in static.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print tables, and the JSON object last."""
    options = options_of(__doc__, arguments, parts=_PARTS)
    plan = QUICK if options.quick else FULL
    console = Console(quiet=options.json, width=140)
    parts = (options.only,) if options.only else _PARTS
    found: dict[str, Any] = {}
    with modestly():
        if "decisions" in parts:
            spent = decision_seconds(plan.queued, plan.decisions, _SEED)
            found |= report.decisions(console, *spent)
        if "simulated" in parts:
            found |= simulate(plan, console)
    if "paced" in parts:
        found |= asyncio.run(paced(plan, console))
    if "real" in parts:
        found |= asyncio.run(real(plan, console))
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
