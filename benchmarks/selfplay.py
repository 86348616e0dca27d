"""A small language model learns Kuhn poker by naive self-play, fictitious self-play and PSRO.

    python -m benchmarks.selfplay [--quick] [--json] [--only JOB] [--seed N] [--out DIR]

Each JOB (naive, fictitious, psro) is one of examples/self_play, through all services of an embedded
cluster, from the same random weights. The measure is exploitability: half of NashConv, which the
job itself computes exactly (`population.game`) from its members' log-probs in every information
state, under its rule for illegal answers (a random legal move). For naive self-play it is the
newest version's, for the others an equilibrium's between their members. A job takes about three
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.command import finish, progress, run_program, scratch
from benchmarks.end_to_end.troupe_side import cluster
from examples.self_play.model import make_player
from troupe.client import AsyncClient
from troupe.job import JobSpec
from troupe.recipes.curves import Mark, draw_curves
from troupe.rpc import TroupeError, connect
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

JOBS: Final = ("naive", "fictitious", "psro")
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "self_play"
POLICY: Final = "player"
# The naive job has no pool; here it has one for measuring, from which no opponents are drawn.
_NAIVE: Final = {
    "algorithm": "self_play",
    "meta_solver": "latest",
    "iteration_steps": 8,
    "slots": 2,
}
# Steps of a smoke run, and of its iterations.
_QUICK: Final = (4, 2)
# Only for progress: the measurements are read at the end of the job.
_LOOK_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 60.0


@dataclass
class Curve:
    """The result of one job. Exploitability is half of NashConv: the payoff per game of a best
    response, averaged over the seats; a player that changes seats has a game value of 0."""

    points: list[tuple[int, float]] = field(default_factory=list)
    """Steps done, and the exploitability of the meta-solver's mixture of members: the newest one
    for naive self-play, otherwise an equilibrium between them."""
    seconds: float = 0.0

    @property
    def untrained(self) -> float:
        """Exploitability before the first step."""
        step, value = self.points[0]
        if step:
            raise ValueError(f"the first of these members was made after step {step}")
        return value

    @property
    def final(self) -> float:
        """Exploitability after the last step."""
        return self.points[-1][1]

    @property
    def tail(self) -> float:
        """Mean over the last quarter of the steps."""
        since = 0.75 * self.points[-1][0]
        return statistics.fmean(value for step, value in self.points if step >= since)


def points_of(population: orchestrator_pb.Population) -> list[tuple[int, float]]:
    """Return the job's curve so far."""
    return [
        (one.step, one.nash_conv / 2) for one in population.history if one.HasField("nash_conv")
    ]


async def measured(
    client: AsyncClient, spec: JobSpec, tell: Callable[[str], None] = progress
) -> Curve:
    """Train `spec` to its end. Raises `JobFailed`."""
    began = time.monotonic()
    channel = connect(client.address)
    api = orchestrator_grpc.OrchestratorStub(channel)
    handle = await client.submit(spec)
    asked = orchestrator_pb.GetPopulationRequest(job_id=handle.id)

    async def look() -> list[tuple[int, float]]:
        answer = await api.GetPopulation(asked, timeout=_CALL_SECONDS)
        return points_of(answer.population)

    async def keep_telling() -> None:
        told = 0
        while True:
            with contextlib.suppress(TroupeError):  # there is no curve before it has begun
                found = await look()
                for step, value in found[told:]:
                    tell(f"{spec.name}: step {step}, exploitability {value:.3f}")
                told = len(found)
            await asyncio.sleep(_LOOK_SECONDS)

    telling = asyncio.create_task(keep_telling())
    try:
        await handle.result()
        seconds = time.monotonic() - began
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    curve = Curve(await look(), seconds)
    await channel.close(None)
    return curve


def draw(curves: Mapping[str, Curve]) -> str:
    """Return an SVG document of exploitability over steps, from `Curve.points`."""
    return draw_curves(
        {name: [curve.points] for name, curve in curves.items()},
        title="exploitability on Kuhn poker: the mixture of the pool, or the newest version",
        axis="optimizer steps",
        mark=Mark("a third of the untrained value", next(iter(curves.values())).untrained / 3),
    )


def job(name: str, model: Path, *, quick: bool, seed: int = 0) -> JobSpec:
    """Return the example's job, starting from `model`."""
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
    """Run one job after the other on one cluster."""
    found = {}
    with scratch() as directory:
        model = make_player(directory / "model", seed=seed)
        async with cluster(directory / "data") as client:
            for name in names:
                found[name] = await measured(client, job(name, model, quick=quick, seed=seed))
    return found


def row(name: str, curve: Curve) -> str:
    """Return a line of the table."""
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
    parser.add_argument("--only", choices=JOBS, help="run only this job")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and the jobs")
    parser.add_argument("--out", type=Path, help="directory for the curves (JSON, SVG)")
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
