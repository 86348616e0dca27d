"""Troupe's sampling: `python -m benchmarks.papers.sampling.ours WORLD WORKERS COPIES`.

WORKERS processes with COPIES copies each, one torch thread per process; an actor plays whole
episodes of all copies. Only steps that have reached the driver as fragments count.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from benchmarks.papers.sampling.clock import serve
from benchmarks.papers.sampling.worlds import AGENTS, CALL, STEPS
from troupe.job.sections.network import NetworkSpec
from troupe.networks.actor import Actor, Seat
from troupe.networks.environments.openspiel import GameCopies
from troupe.networks.jobs import make_learner
from troupe.networks.vector import Actions, Observed, Stepped, VectorEnvironment, make_environment

_JOIN_SECONDS = 20.0


class Leduc(GameCopies):
    """Like `worlds.Leduc`: all moves are offered, and an illegal one is a call."""

    def reset(self, seed: int) -> Observed:
        """Begin a new game in every copy."""
        return self._offered(super().reset(seed))

    def step(self, actions: Actions) -> Stepped:
        """Move the first player, then all others."""
        may = np.take_along_axis(self._may[:, 0], np.asarray(actions, np.int64), axis=1)
        stepped = super().step(np.where(may, actions, CALL))
        return stepped._replace(observed=self._offered(stepped.observed))

    def _offered(self, observed: Observed) -> Observed:
        assert observed.legal is not None
        self._may = observed.legal
        return observed._replace(legal=None)


def environment(world: str, copies: int) -> VectorEnvironment:
    """Return `copies` copies of the environment."""
    if world == "leduc":
        return Leduc(copies)
    return make_environment("simple_spread", copies, agents=AGENTS, steps=STEPS)


def work(world: str, copies: int, seed: int, out: Connection) -> None:
    """Play until the reader is gone."""
    torch.set_num_threads(1)
    played, spec = environment(world, copies), NetworkSpec(hidden=(64, 64), activation="tanh")
    actor = Actor(played, {"p": Seat(spec, played.agents)})
    learner = make_learner(spec, played.spaces, played.agents, 0)
    actor.load("p", learner.published(), 0)
    try:
        while True:
            seed += 1
            out.send(actor.sample(seed).fragments["p"])
    except (BrokenPipeError, ConnectionResetError):
        return


def main() -> None:
    """Measure on request."""
    world, workers, copies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Workers inherit all imports from this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.papers.sampling.ours"])
    processes, ends = [], []
    for number in range(workers):
        end, out = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(world, copies, number << 32, out))
        process.start()
        out.close()
        processes.append(process)
        ends.append(end)
    for end in ends:  # all workers play
        end.recv()

    def collect(some: int) -> int:
        # A worker that is not read from stops.
        ready: list[Any] = wait(ends[:some] if some else ends)
        return sum(end.recv().steps for end in ready)

    try:
        serve(collect)
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(_JOIN_SECONDS)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    main()
