"""A small language model learns Kuhn poker by naive self-play, fictitious self-play and PSRO.

    python -m benchmarks.selfplay [--quick] [--json] [--only naive|fictitious|psro] [--out DIR]

Each is a job of examples/self_play, through all services of an embedded cluster, from the same
random weights. What is measured is exploitability: half of NashConv, computed exactly from the
policy's log-probs in every information state (the Score call), under the job's rule for illegal
answers (a random legal move). Of naive self-play it is that of the newest version, with the mean
over the last quarter of the steps beside it; of the others that of the mixture over their pool, a
member being drawn per game: the newer half of all members equally often (fictitious), or the
meta-game's equilibrium (PSRO).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.command import scratch
from benchmarks.end_to_end.troupe_side import cluster
from benchmarks.selfplay.figure import draw
from benchmarks.selfplay.measure import POLICY, Curve, measured
from examples.self_play.model import make_player
from troupe.job import JobSpec

JOBS: Final = ("naive", "fictitious", "psro")
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "self_play"
# Steps of a smoke run, and of its iterations.
_QUICK: Final = (4, 2)


def job(name: str, model: Path, *, quick: bool) -> JobSpec:
    """The example's job, beginning with `model`."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())
    spec["policies"][POLICY]["model"]["path"] = str(model)
    if quick:
        spec["pipeline"] |= {"steps": _QUICK[0], "queries_per_step": 4, "group_size": 4}
        if "population" in spec:
            spec["population"] |= {"iteration_steps": _QUICK[1], "redraw_steps": 0, "slots": 2}
    return JobSpec.model_validate(spec)


async def run(names: Sequence[str], *, quick: bool) -> dict[str, Curve]:
    """One job after the other on one cluster."""
    found = {}
    with scratch("selfplay-") as directory:
        model = make_player(directory / "model")
        async with cluster(directory / "data") as client:
            for name in names:
                found[name] = await measured(client, job(name, model, quick=quick))
    return found


def row(name: str, curve: Curve) -> str:
    """A line of the table."""
    lowest = min(value for _, value in curve.population) if curve.population else None
    lowest = min(curve.newest.values()) if lowest is None else lowest
    return (
        f"{name:12} {curve.newest.get(0, float('nan')):>10.3f} {curve.final:>9.3f} {lowest:>9.3f} "
        f"{tail(curve):>12.3f} {curve.illegal[max(curve.illegal)]:>9.3f} {max(curve.newest):>6} "
        f"{len(curve.newest):>7} {curve.seconds:>8.0f}"
    )


def tail(curve: Curve) -> float:
    """Mean exploitability of single versions of the last quarter of the steps."""
    since = 0.75 * max(curve.newest)
    return statistics.fmean(value for step, value in curve.newest.items() if step >= since)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, print a table and the JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--only", choices=JOBS, help="one of them")
    parser.add_argument("--out", type=Path, help="where curves (JSON, SVG) go")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else list(JOBS)
    curves = asyncio.run(run(names, quick=options.quick))
    first = next(iter(curves.values()))
    result = {
        "untrained": round(first.newest[0], 4) if 0 in first.newest else None,
        **{name: round(curve.final, 4) for name, curve in curves.items()},
    }
    if not options.json:
        print(
            f"{'':12} {'untrained':>10} {'trained':>9} {'lowest':>9} {'last quarter':>12} "
            f"{'illegal':>9} {'steps':>6} {'scored':>7} {'seconds':>8}"
        )
        for name, curve in curves.items():
            print(row(name, curve))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "selfplay.svg").write_text(draw(curves))
        told = {
            name: {
                "newest": sorted(curve.newest.items()),
                "population": curve.population,
                "reported": curve.reported,
                "seconds": round(curve.seconds, 1),
            }
            for name, curve in curves.items()
        }
        (options.out / "selfplay.json").write_text(json.dumps(told) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
