"""`python -m benchmarks.papers.twin [--quick] [--json] [--only PART] [--compiled]`

The twin's step times against live runs (docs/twin/live.json, measured by
benchmarks.papers.pipeline), FlexMARL's, RollArt's and ARL-Tangram's tables, and the speed of twin
and decisions at 3,000 devices. PART is live, flexmarl, rollart, tangram, malib, mechanisms, control
or speed. `--compiled`: run the same sources compiled by mypyc. The last line of stdout is the JSON
object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, run_program
from benchmarks.papers.actions import simulated
from benchmarks.papers.pipeline.workload import SETUPS, modes
from benchmarks.papers.twin import (
    compiled,
    control,
    flexmarl,
    malib,
    mechanisms,
    rollart,
    rollart_rows,
    tangram,
)
from benchmarks.papers.twin.live import rehearse, twin_job
from benchmarks.papers.twin.speed import HOSTS, decisions, hour, large_job
from testbed.simulator.trace import CodingLaw, TeacherLaw, coding
from troupe.twin.cluster import Twin, TwinMeans

_LIVE: Final = Path(__file__).resolve().parents[3] / "docs" / "twin" / "live.json"
_PARTS: Final = (
    "live",
    "flexmarl",
    "rollart",
    "tangram",
    "malib",
    "mechanisms",
    "control",
    "speed",
)


def main() -> None:
    """Run the requested parts."""
    flags = {"compiled": "the twin and the live router compiled by mypyc, with the same results"}
    args = options_of(__doc__, None, parts=_PARTS, flags=flags)
    if args.compiled and not compiled.is_compiled():
        compiled.run_compiled("benchmarks.papers.twin", sys.argv[1:])
    parts = [args.only] if args.only else list(_PARTS)
    console = Console(stderr=args.json, width=None if args.json else 140)
    found: dict[str, Any] = {"quick": args.quick, "compiled": compiled.is_compiled()}
    if "live" in parts:
        found["live"] = beside_live(console, quick=args.quick)
    if "flexmarl" in parts:
        found["flexmarl"] = published(console, quick=args.quick)
    if "rollart" in parts:
        found["rollart"] = rolled(console, quick=args.quick)
    if "tangram" in parts:
        found["tangram"] = acted(console, quick=args.quick)
    if "malib" in parts:
        found["malib"] = scaled(console, quick=args.quick)
    if "mechanisms" in parts:
        found["mechanisms"] = valued(console, quick=args.quick)
    if "control" in parts:
        found["control"] = controlled(console, quick=args.quick)
    if "speed" in parts:
        found |= speed(console, quick=args.quick)
    finish(found, quiet=args.json)


def beside_live(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Compare predicted and measured seconds per step of every mode and set-up; return the
    errors."""
    live = json.loads(_LIVE.read_text(encoding="utf-8"))
    table = Table(title=f"Seconds per step: the twin against live runs of {live['date']}")
    for column in ("set-up", "mode", "live", "twin", "error", "rollout alone", "both", "training"):
        table.add_column(column, justify="left" if column in ("set-up", "mode") else "right")
    errors: dict[str, dict[str, float]] = {}
    for name in ("ma",) if quick else tuple(SETUPS):
        for mode, means in predicted(name, quick=quick).items():
            measured = live["setups"][name][mode]
            error = means.seconds / measured["seconds"] - 1
            errors.setdefault(name, {})[mode] = round(error, 4)
            table.add_row(
                name,
                mode,
                f"{measured['seconds']:.2f}",
                f"{means.seconds:.2f}",
                f"{error:+.1%}",
                *(
                    f"{measured[share]:.2f} / {getattr(means, share):.2f}"
                    for share in ("rollout_alone", "both", "training_alone")
                ),
            )
    console.print(table)
    worst = max(abs(one) for setup in errors.values() for one in setup.values())
    return {"errors": errors, "worst_error": worst}


def predicted(name: str, *, quick: bool = False) -> dict[str, TwinMeans]:
    """Return the twin's means of every mode of a set-up, over the steps that the benchmark
    measures."""
    setup = SETUPS[name]
    rows = [mode for mode in modes() if not quick or mode.steps == 1]
    most = max(mode.steps for mode in rows)
    with tempfile.TemporaryDirectory(prefix="troupe-twin-") as directory:
        queries = rehearse(setup, setup.queries_per_step * most, Path(directory))
    return {
        mode.name: Twin(twin_job(mode, setup, queries))
        .run(mode.steps)
        .means(1 if mode.steps > 1 else 0, mode.after)
        for mode in rows
    }


def published(console: Console, *, quick: bool = False) -> dict[str, float]:
    """Compare FlexMARL's rows with the twin; errors are of ratios to the row with all
    mechanisms."""
    found: dict[str, float] = {}
    for name in ("ma",) if quick else tuple(flexmarl.SETUPS):
        told = flexmarl.PUBLISHED[name]
        means = flexmarl.table(name, quick=quick)
        table = Table(title=f"FlexMARL {name.upper()}, 48 hosts of 16 devices: seconds per step")
        for column in ("", "published", "twin", "ratio published", "ratio twin", "error"):
            table.add_column(column, justify="right" if column else "left")
        best, worst = means["flexmarl"], 0.0
        for row, one in means.items():
            ratio = one.seconds / best.seconds
            wanted = told[row] / told["flexmarl"]
            worst = max(worst, abs(ratio / wanted - 1))
            found[f"{name}_over_{row}"] = round(ratio, 3)
            table.add_row(
                flexmarl.ROWS[row],
                f"{told[row]:.1f}",
                f"{one.seconds:.1f}",
                f"{wanted:.2f}",
                f"{ratio:.2f}",
                f"{ratio / wanted - 1:+.1%}",
            )
        console.print(table)
        found[f"{name}_error"] = round(worst, 4)
        if "serial" in means:
            used = best.engines / means["serial"].engines
            found[f"{name}_engine_utilization_over_serial"] = round(used, 2)
    return found


def rolled(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Compare RollArt's rows and mechanisms with the twin."""
    steps = 1 if quick else 4
    means = rollart_rows.rows(steps)
    best = means["rollart"].seconds
    table = Table(title="RollArt: seconds per step, and over the last row")
    for column in ("", "twin", "ratio", "published", "engines", "exposed per version", "staleness"):
        table.add_column(column, justify="right" if column else "left")
    found: dict[str, Any] = {}
    for row, one in means.items():
        told = rollart_rows.PUBLISHED.get(row)
        if told is not None:
            found[f"over_{row}"] = round(one.seconds / best, 3)
        table.add_row(
            rollart_rows.ROWS[row],
            f"{one.seconds:.1f}",
            f"{one.seconds / best:.2f}",
            f"{told or 1:.2f}",
            f"{one.engines:.0%}",
            f"{one.exposed:.1f} s",
            f"{one.staleness:.2f}",
        )
    console.print(table)
    found["exposed_pull_s"] = [round(means[row].exposed, 2) for row in ("areal", "rollart")]
    sigmas = (1, 10) if quick else (1, 3, 10)
    found["trajectory_level"] = {f"{s}": round(rollart.environments(s), 2) for s in sigmas}
    if not quick:
        fleets = {"affinity": rollart.one_class(steps)}
        fleets["affinity_published_fleets"] = rollart_rows.affinity(steps)
        for key, taken in fleets.items():
            mapped = taken.pop("both")
            found[key] = {name: round(one / mapped, 3) for name, one in taken.items()}
        found["alpha_6"] = round(best / rollart_rows.bound(6, steps), 3)
        spare = rollart.redundancy()
        found["redundancy"] = round(spare[0] / spare[2], 3)
    large, steps = large_job(100 if quick else 400), 4 if quick else 14
    for hosts in (2,) if quick else (0, 2):
        lost = rollart.goodput(large, HOSTS, steps, spare=hosts)
        found[f"goodput_{hosts}_spare"] = {
            "failures": lost.failures,
            "lost_s_per_failure": round(lost.lost_seconds, 1),
            "failures_per_day": round(lost.per_day, 2),
            "share": round(lost.share, 5),
        }
    console.print_json(data=found)
    return found


def valued(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Print the gain of each mechanism, alone and together, by devices of the cluster."""
    found: dict[str, Any] = {}
    sizes = ((64, 0.5, 8, 4), (512, 0.25, 4, 4), (3000, 0.1, 2, 1))
    for devices, share, overlapping, apart in ((64, 0.1, 2, 1),) if quick else sizes:
        one = mechanisms.worth(
            devices, overlapping=overlapping, apart=apart, queries_per_device=share
        )
        table = Table(
            title=f"{devices} devices: {one.none:.0f} s per step, {one.all:.0f} s with all"
        )
        for column in ("mechanism", "alone, x faster", "without it, x slower than all"):
            table.add_column(column)
        for name, said in mechanisms.MECHANISMS.items():
            alone, without = one.none / one.alone[name], one.without[name] / one.all
            table.add_row(said, f"{alone:.2f}", f"{without:.2f}")
            found[f"{devices}_{name}"] = [round(alone, 3), round(without, 3)]
        console.print(table)
        found[f"{devices}_all"] = round(one.none / one.all, 3)
    return found


def scaled(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Print MALib's claims: sampling by workers, and PSRO by best responses trained at once."""
    workers = malib.WORKERS[:4] if quick else malib.WORKERS
    table = Table(title="Sampling: throughput relative to one worker")
    table.add_column("")
    for column in ("one worker, per s", *map(str, workers), "a process saturates at, per s"):
        table.add_column(column, justify="right")
    sampling: dict[str, dict[str, float]] = {}
    for name, case in malib.CASES.items():
        rates = malib.scale_out(name, workers)
        sampling[name] = {f"{count}": round(rate / rates[1], 1) for count, rate in rates.items()}
        table.add_row(
            case.title,
            f"{rates[1]:,.1f} {case.unit}",
            *map(str, sampling[name].values()),
            f"{case.most * case.units:,.0f} {case.unit}",
        )
    console.print(table)
    game = malib.PsroCase(members=16) if quick else malib.PsroCase()
    learners = [one for one in malib.LEARNERS if one <= game.members]
    runs = {one: malib.psro(one, game) for one in learners}
    table = Table(
        title=f"PSRO: hours until {game.members} best responses are in the population, "
        f"{runs[1].played:,} matches"
    )
    for column in ("at once", "hours", "speed-up", "training", "matches", "loads", "solving, s"):
        table.add_column(column, justify="right")
    for one, run in runs.items():
        hours = (run.seconds, run.training, run.matches, run.loads)
        total, *parts = (f"{seconds / 3600:.2f}" for seconds in hours)
        speedup = runs[1].seconds / run.seconds
        table.add_row(f"{one}", total, f"{speedup:.1f}", *parts, f"{run.solving:.2f}")
    console.print(table)
    speedups = {f"{one}": round(runs[1].seconds / run.seconds, 2) for one, run in runs.items()}
    return {"sampling": sampling, "psro": speedups, "psro_matches": runs[1].played}


def controlled(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Print the cores that each service needs, and the devices at which its only process
    saturates."""
    found: dict[str, Any] = {}
    for name, load in control.loads(quick=quick).items():
        one: dict[str, Any] = {
            "turns_per_second": round(load.turns, 1),
            "tokens_per_second": round(load.tokens),
            "mb_per_second": round(load.bytes / 1e6, 2),
        }
        table = Table(
            title=f"{name}: {load.turns:.0f} turns/s, {load.tokens:,.0f} tokens/s, "
            f"{load.bytes / 1e6:.2f} MB/s of rows"
        )
        for column in ("service", "cores, quiet", "busy", "saturated at devices, quiet", "busy"):
            table.add_column(column, justify="left" if column == "service" else "right")
        rates = {"quiet": control.QUIET, "busy": control.BUSY}
        cores = {kind: load.cores(rate) for kind, rate in rates.items()}
        full = {kind: load.full_at(rate) for kind, rate in rates.items()}
        for service in control.QUIET:
            table.add_row(
                service,
                *(f"{cores[kind][service]:.3f}" for kind in rates),
                *(f"{full[kind][service]:,.0f}" if service in full[kind] else "" for kind in rates),
            )
        console.print(table)
        for kind, rate in rates.items():
            first, devices = next(iter(full[kind].items()))
            one[kind] = {
                "cores": {service: round(used, 4) for service, used in cores[kind].items()},
                "rollout_workers": load.rollout_workers(rate),
                "full_first": first,
                "full_at_devices": {service: round(at) for service, at in full[kind].items()},
            }
            console.print(
                f"{kind}: {load.rollout_workers(rate)} rollout workers; "
                f"{first} saturates first, at {devices:,.0f} devices"
            )
        found[name] = one
    return found


def acted(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Print ARL-Tangram's claims: reservations over elastic actions by size of the batch, with pods
    held until their trajectory or their query's group ends; and devices of model services."""
    sizes = (256, 512) if quick else (256, 768, 1536)
    hosts = [simulated.HOST_CORES] * simulated.HOSTS
    trajectories = coding(sizes[-1], CodingLaw(), 1)
    table = Table(title="ARL-Tangram: mean completion time of actions, reserved over elastic")
    for column in ("trajectories", "elastic, s", "gain", "gain, pods held by groups", "published"):
        table.add_column(column, justify="right")
    told = {256: "3.1", 1536: "27.7"}
    gains: dict[str, dict[str, float]] = {"gain": {}, "gain_by_groups": {}}
    for size in sizes:
        part = trajectories[:size]
        ours = simulated.elastic(part, hosts).act
        alone = simulated.reserved(part, hosts).act / ours
        grouped = simulated.reserved(part, hosts, held_by=CodingLaw().group).act / ours
        gains["gain"][f"{size}"] = round(alone, 1)
        gains["gain_by_groups"][f"{size}"] = round(grouped, 1)
        table.add_row(
            f"{size}", f"{ours:.2f}", f"{alone:.1f}", f"{grouped:.1f}", told.get(size, "")
        )
    console.print(table)
    each, shared = simulated.pools((8, 12, 36), 2 if quick else 10, TeacherLaw(busy=0.03), 1)
    least = simulated.enough(each, shared)
    gpus = None if least is None else least.gpus
    return {**gains, "gpus_for_equal_latency": gpus, **coding_steps(console, quick=quick)}


def coding_steps(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Print the steps of a job of coding agents, by batch and by kind of action pool."""
    table = Table(title="Steps of coding agents, seconds of which rollout; mean action; engines")
    for column in ("batch", "hosts of cores", "actions", "step", "rollout", "action", "busy"):
        table.add_column(column, justify="left" if column == "actions" else "right")
    found: dict[str, dict[str, float]] = {"step_pods_over_elastic": {}, "step_by_hosts": {}}
    for batch in (128,) if quick else (256, 768, tangram.BATCH):
        last = batch == tangram.BATCH
        rows = [(kind, simulated.HOSTS) for kind in tangram.POOLS]
        rows += [("elastic", hosts) for hosts in (8, 4, 3)] if last else []
        ran: dict[tuple[str, int], tangram.CodingStep] = {}
        for kind, hosts in rows:
            one = ran[kind, hosts] = tangram.step(kind, batch, hosts)
            table.add_row(
                f"{batch:,}",
                "" if kind == "enough" else f"{hosts}",
                tangram.POOLS[kind],
                f"{one.seconds:,.0f}",
                f"{one.rollout:,.0f}",
                f"{one.act:.2f}",
                f"{one.engines:.0%}",
            )
        best = ran["elastic", simulated.HOSTS].seconds
        pods = ran["pods", simulated.HOSTS].seconds
        found["step_pods_over_elastic"][f"{batch}"] = round(pods / best, 2)
        if last:
            found["step_by_hosts"] = {
                f"{hosts}": round(one.seconds / best, 3)
                for (kind, hosts), one in ran.items()
                if kind == "elastic"
            }
    console.print(table)
    return found


def speed(console: Console, *, quick: bool = False) -> dict[str, Any]:
    """Measure a simulated hour of 3,000 GPUs, and the decisions at that size."""
    ran, times = hour(quick=quick), decisions(quick=quick)
    table = Table(title="Live decisions at 3,000 devices and 10,000 trajectories")
    table.add_column("decision")
    table.add_column("p99, ms of processor time", justify="right")
    for name, milliseconds in times.items():
        table.add_row(name, f"{milliseconds:.2f}")
    console.print(table)
    console.print(
        f"An hour of 3,000 GPUs{' with a tenth of the trajectories' if quick else ''} takes "
        f"{ran.hour:.0f} s of one core: {ran.steps} steps of "
        f"{ran.simulated_seconds / ran.steps:.0f} s with {ran.turns:,} turns took "
        f"{ran.cpu_seconds:.1f} s, {1e6 * ran.cpu_seconds / ran.turns:.0f} microseconds per turn"
    )
    # A quick run has a tenth of the trajectories.
    whole = {} if quick else {"hour_of_3000_seconds": round(ran.hour, 1)}
    return {
        **whole,
        "microseconds_per_turn": round(1e6 * ran.cpu_seconds / ran.turns, 1),
        "decision_p99_ms": max(times.values()),
        "decisions_ms": times,
    }


if __name__ == "__main__":
    run_program(main)
