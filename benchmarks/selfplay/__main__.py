"""A small language model learns Kuhn poker by naive self-play, fictitious self-play and PSRO.

    python -m benchmarks.selfplay [--quick] [--json] [--only JOB] [--seed N] [--out DIR]

Each JOB (naive, fictitious, psro) is one of examples/self_play, through all services of an embedded
cluster, from the same random weights. What is measured is exploitability: half of NashConv, which
the job itself computes exactly (`population.game`) from the log-probs of its members in every
information state, under its rule for illegal answers (a random legal move): of naive self-play that
of the newest version, of the others that of an equilibrium between their members. About three
minutes a job.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.command import finish, run_program, scratch
from benchmarks.end_to_end.troupe_side import cluster
from benchmarks.selfplay.figure import draw
from benchmarks.selfplay.measure import Curve, measured
from examples.self_play.model import make_player
from troupe.job import JobSpec

JOBS: Final = ("naive", "fictitious", "psro")
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "self_play"
POLICY: Final = "player"
# The naive job has no pool; here it has one that is measured, and that nobody is drawn from.
_NAIVE: Final = {
    "algorithm": "self_play",
    "meta_solver": "latest",
    "iteration_steps": 8,
    "slots": 2,
}
# Steps of a smoke run, and of its iterations.
_QUICK: Final = (4, 2)


def job(name: str, model: Path, *, quick: bool, seed: int = 0) -> JobSpec:
    """The example's job, beginning with `model`."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())
    spec["policies"][POLICY]["model"]["path"] = str(model)
    spec["seed"] = seed
    population = spec.setdefault("population", dict(_NAIVE))
    population |= {"game": "kuhn_poker", "matches": {"least": 0}}
    if quick:
        spec["pipeline"] |= {"steps": _QUICK[0], "queries_per_step": 4, "group_size": 4}
        population |= {"iteration_steps": _QUICK[1], "redraw_steps": 0, "slots": 2}
    return JobSpec.model_validate(spec)


async def run(names: Sequence[str], *, quick: bool, seed: int) -> dict[str, Curve]:
    """One job after the other on one cluster."""
    found = {}
    with scratch() as directory:
        model = make_player(directory / "model", seed=seed)
        async with cluster(directory / "data") as client:
            for name in names:
                found[name] = await measured(client, job(name, model, quick=quick, seed=seed))
    return found


def row(name: str, curve: Curve) -> str:
    """A line of the table."""
    lowest = min(value for _, value in curve.points)
    return (
        f"{name:12} {curve.untrained:>10.3f} {curve.final:>9.3f} {lowest:>9.3f} "
        f"{curve.tail:>12.3f} {curve.points[-1][0]:>6} {curve.seconds:>8.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print a table and the JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--only", choices=JOBS, help="one of them")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the jobs")
    parser.add_argument("--out", type=Path, help="where curves (JSON, SVG) go")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else list(JOBS)
    curves = asyncio.run(run(names, quick=options.quick, seed=options.seed))
    first = next(iter(curves.values()))
    result = {
        "untrained": round(first.untrained, 4),
        **{name: round(curve.final, 4) for name, curve in curves.items()},
    }
    if not options.json:
        print(
            f"{'':12} {'untrained':>10} {'trained':>9} {'lowest':>9} {'last quarter':>12} "
            f"{'steps':>6} {'seconds':>8}"
        )
        for name, curve in curves.items():
            print(row(name, curve))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "selfplay.svg").write_text(draw(curves))
        told = {
            name: {"points": curve.points, "seconds": round(curve.seconds, 1)}
            for name, curve in curves.items()
        }
        (options.out / "selfplay.json").write_text(json.dumps(told) + "\n")
    finish(result, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
