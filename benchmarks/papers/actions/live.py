"""A trace of trajectories played against a reward service in real time.

elastic   the scheduler decides the cores of every action
told      the same, and functions declare a call's duration on one core (`seconds_per`)
fcfs      like elastic, but first come, first served
fixed     every elastic action gets the same number of cores
reserved  a trajectory waits for its own cores and holds them until it ends
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.actions.served import Ran, Reward
from testbed.simulator.trace import SHELL, TESTS, CodingLaw, Trajectory
from testbed.twin.actions import REWARD
from troupe.rpc import new_id
from troupe.scheduling.elastic.order import SHORTEST, Order


@dataclass(frozen=True)
class Result:
    """Figures of one batch. `wait_seconds`: wait for a reservation, mean per action. `service_cpu`:
    seconds of the service itself, without its workers."""

    mode: str
    cores: int
    trajectories: int
    ran: Sequence[Ran]
    wait_seconds: float
    seconds: float
    service_cpu: float

    @property
    def act(self) -> float:
        """Mean action completion time, in seconds; the wait for a reservation is part of it."""
        return sum(one.act for one in self.ran) / len(self.ran) + self.wait_seconds

    @property
    def overhead(self) -> float:
        """Running time beyond the functions' own time: pipes, leases, control groups."""
        return sum(one.run for one in self.ran) / sum(one.own for one in self.ran) - 1

    @property
    def scheduler(self) -> float:
        """CPU of the service over core-seconds of the actions."""
        return self.service_cpu / sum(one.own * max(1, one.cores) for one in self.ran)


@dataclass(frozen=True)
class Mode:
    """A way to assign cores. `fixed`: number for every action that could use more; None: elastic.
    `reservations`: their number; None: without reservations. `order`: the service's order of the
    queue. `job`: the job whose learned durations are known; empty: the mode's name."""

    name: str
    fixed: int | None = None
    reservations: int | None = None
    told: bool = False
    order: Order = SHORTEST
    job: str = ""


async def play(
    reward: Reward, trajectories: Sequence[Trajectory], mode: Mode, cores: int, law: CodingLaw
) -> Result:
    """Play all trajectories, which begin at once, on a service with `cores` cores."""
    suffix = (mode.job or mode.name) if mode.fixed is None else f"{mode.fixed}-cores"
    for name in (SHELL, TESTS, REWARD):
        # A user's guess, not the truth.
        fixed = 1 if name == SHELL else mode.fixed
        given = (1, law.max_cores, 0.9) if fixed is None else (fixed, fixed, 0.0)
        kind = REWARD if name == REWARD else "tool"
        await reward.register(f"{name}-{suffix}", *given, kind=kind, told=mode.told)
    pods = asyncio.Semaphore(mode.reservations) if mode.reservations is not None else None
    ran: list[Ran] = []
    waited = 0.0

    async def one(trajectory: Trajectory) -> None:
        nonlocal waited
        who = (suffix, new_id("trajectory"))
        asked = time.perf_counter()
        async with pods or contextlib.nullcontext():
            waited += time.perf_counter() - asked
            for turn in trajectory:
                await asyncio.sleep(turn.think)
                name = f"{turn.call.function}-{suffix}"
                ran.append(await reward.run(name, turn.call, who))

    began, cpu = time.perf_counter(), reward.cpu_seconds()
    async with asyncio.TaskGroup() as group:
        for trajectory in trajectories:
            group.create_task(one(trajectory))
    seconds = time.perf_counter() - began
    used = reward.cpu_seconds() - cpu
    return Result(mode.name, cores, len(trajectories), ran, waited / len(ran), seconds, used)
