"""PSRO with learned best responses against OpenSpiel's: DQN on both sides, exact payoffs."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import psutil
import torch

from benchmarks.papers.psro.theirs import iterations, report_iteration
from troupe.job.sections.network import NetworkSpec, QLearningSpec
from troupe.populations.psro import LearnedPsro, Oracle

# Episodes of each of OpenSpiel's best responses: a fifth of its example's, with which it is faster.
EPISODES: Final = 2_000
# By game: the goal, updates of each of Troupe's best responses, games at once.
GAMES: Final = {"kuhn_poker": (0.1, 24, 512), "leduc_poker": (1.5, 60, 1024)}
_ITERATIONS: Final = 60
# CPU seconds for either side and each game, without OpenSpiel's time for measuring NashConv.
_CPU_SECONDS: Final = 90.0


@dataclass(frozen=True)
class Learned:
    """The result of one side, and its cost."""

    nash_conv: float
    """The lowest NashConv of all iterations."""
    iteration: int
    cpu: float
    wall: float


def oracle(updates: int, copies: int) -> Oracle:
    """Return networks like OpenSpiel's, with two hidden layers of 64."""
    learning = QLearningSpec(
        lr=2e-3,
        gamma=1.0,
        buffer=20_000,
        batch=512,
        updates=8,
        tau=0.05,
        epsilon=(1.0, 0.1),
        epsilon_episodes=copies * updates // 2,
    )
    return Oracle(NetworkSpec(hidden=(64, 64), learning=learning), copies, updates)


def ours(game: str, target: float, updates: int, copies: int, seconds: float) -> Learned:
    """Run Troupe's PSRO, with both players' best responses in parallel processes of one thread."""
    context = get_context("spawn")
    with ProcessPoolExecutor(
        2, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        began, clock = _cpu(), time.perf_counter()
        best = None
        psro = LearnedPsro(game, oracle(updates, copies), seed=1, workers=pool.map)
        for one in psro.run(_ITERATIONS):
            cpu, wall = _cpu() - began, time.perf_counter() - clock
            report_iteration("Troupe, learned", game, one.number, one.nash_conv, cpu)
            if best is None or one.nash_conv < best.nash_conv:
                best = Learned(one.nash_conv, one.number, cpu, wall)
            if one.nash_conv <= target or cpu > seconds:
                break
    assert best is not None
    return best


def openspiels(python: Path, game: str, target: float, episodes: int, seconds: float) -> Learned:
    """Run OpenSpiel's PSRO until `target`, or for `seconds` CPU seconds."""
    points = iterations(python, "openspiel_learned", game, target, seconds, episodes, 1)
    best = min(points, key=lambda one: float(one["nash_conv"]))
    return Learned(best["nash_conv"], best["iteration"], best["seconds"], best["wall"])


def compare(python: Path, quick: bool) -> tuple[list[str], dict[str, float]]:
    """Return the lines of a table, and the JSON keys."""
    lines = [
        f"{'game':12} {'side':10} {'NashConv':>9} {'iteration':>10} {'CPU s':>8} {'wall s':>8}"
    ]
    found: dict[str, float] = {}
    for game, (target, updates, copies) in GAMES.items():
        if quick and game != "kuhn_poker":
            continue
        seconds = 10.0 if quick else _CPU_SECONDS
        own = ours(game, target, updates, copies, seconds)
        theirs = openspiels(python, game, target, 500 if quick else EPISODES, seconds)
        short = game.removesuffix("_poker")
        for side, key, one in (("Troupe", "", own), ("OpenSpiel", "openspiel_", theirs)):
            lines.append(
                f"{game:12} {side:10} {one.nash_conv:>9.3f} {one.iteration:>10} {one.cpu:>8.1f} "
                f"{one.wall:>8.1f}"
            )
            found[f"{key}{short}_learned_nashconv"] = one.nash_conv
            found[f"{key}{short}_learned_seconds"] = one.cpu
            found[f"{key}{short}_learned_wall_seconds"] = one.wall
    return lines, found


def _cpu() -> float:
    """Return the CPU seconds of this process and its descendants."""
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in [me, *me.children(recursive=True)])
