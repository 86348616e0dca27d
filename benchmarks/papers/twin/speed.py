"""The speed of the twin, and of the live decisions, at 3,000 GPUs."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.command import quantile
from testbed.twin.cluster import PublishedJob
from troupe.devices import Device
from troupe.scheduling import admission, balancing, binding
from troupe.scheduling.devices import DeviceHost, DeviceRequest, plan
from troupe.scheduling.routing import Fleet, TurnQueue, Work
from troupe.twin.cluster import Twin
from troupe.twin.costs import DEVICES, engine_rates, model_shape, trainer_rates
from troupe.twin.job import ControlPlane, EngineFleet, TwinPolicy
from troupe.twin.workload import Lengths, TeamWorkload

GPUS: Final = 3000
HOSTS: Final = 375
_ENGINE_HOSTS: Final = 250
_HOUR: Final = 3600.0


@dataclass(frozen=True)
class HourSpeed:
    """A simulated hour: seconds of one core, and their division per turn."""

    simulated_seconds: float
    cpu_seconds: float
    steps: int
    turns: int

    @property
    def hour(self) -> float:
        """Processor seconds of a simulated hour."""
        return self.cpu_seconds * _HOUR / self.simulated_seconds


def large_job(trajectories: int = 8000, turns: int = 10) -> PublishedJob:
    """Return an agentic job on 3,000 H800: 2,000 generate (500 engines of four), 1,000 train one
    policy of 32B; steps of about two minutes."""
    shape, device = model_shape("Qwen3-32B"), DEVICES["H800"]
    context = 4000.0
    engine = engine_rates(shape, device, tensor_parallel=4, context=context)
    trainer = trainer_rates(shape, device, ranks=1000, context=context)
    fleet = EngineFleet(2, engine, limit=64, devices=4)
    group = 8
    workload = TeamWorkload(
        agents=("solver",),
        rounds=Lengths(turns, 0.3, 60),
        prompt=Lengths(400, 0.5),
        response=Lengths(300, 0.8, 4096),
        wait=Lengths(3.0, 0.8, 60),
        group_size=group,
    )
    return PublishedJob(
        policies={"solver": TwinPolicy((fleet,), trainer, ranks=1000)},
        workload=workload,
        trainers=[
            binding.RankWorker(f"t{n:04}", devices=8, device="cuda", host=f"h{n:04}")
            for n in range(HOSTS - _ENGINE_HOSTS)
        ],
        mode="async",
        queries_per_step=trajectories // group,
        micro_batch=256,
        in_flight=10_000,
        rollout_workers=_ENGINE_HOSTS,
        share_prefixes=True,
        control=ControlPlane(turn=0.01, trajectory=0.01, commit=0.1, step=0.1),
    )


def hour(*, quick: bool = False) -> HourSpeed:
    """Run some steps of the large job, whose length gives the time of a whole hour."""
    job = large_job(800 if quick else 8000)
    steps = 2 if quick else 5
    began = time.process_time()
    run = Twin(job).run(steps)
    return HourSpeed(run.steps[-1].at, time.process_time() - began, steps, run.events)


def decisions(*, quick: bool = False) -> dict[str, float]:
    """Return the p99 of each live decision at 3,000 devices and 10,000 trajectories, in
    milliseconds."""
    repeat = 30 if quick else 300
    cases = {
        "routing (500 engines)": _routing(),
        "queue of turns (10,000 wait)": _queueing(),
        "next wave (1,250 groups wait)": _wave(),
        "spread 1,250 groups (250 workers)": _spread(),
        "roster of a step (1,250 queries)": _roster(),
        "moves of engines (750 engines, 8 policies)": _balancing(),
        "binding (375 workers, 16 policies)": _binding(slots=2),
        "binding, more policies than fit": _binding(slots=1, policies=24),
        "placement (375 hosts, 3,000 devices)": _placing(),
        "placement on a busy cluster": _placing(running=True),
    }
    # As in the services: imported objects are excluded from garbage collection.
    gc.freeze()
    found = {}
    for name, decide in cases.items():
        times = []
        for _ in range(repeat):
            began = time.thread_time()
            decide()
            times.append(1000 * (time.thread_time() - began))
        found[name] = round(quantile(times, 0.99), 3)
    return found


def _routing() -> Callable[[], Any]:
    fleet, rng = Fleet(), random.Random(0)
    for number in range(500):
        fleet.add(f"e{number}", limit=64)
    placed: list[tuple[str, float]] = []

    def decide() -> None:
        work = Work(400, rng.lognormvariate(5.5, 0.8))
        engine = fleet.choose(work, lambda _: True)
        assert engine is not None
        placed.append((engine, fleet.give(engine, work)))
        if len(placed) > 10_000:
            fleet.take_back(*placed.pop(rng.randrange(len(placed))))

    for _ in range(10_000):
        decide()
    return decide


def _queueing() -> Callable[[], Any]:
    queue: TurnQueue[int] = TurnQueue()
    numbers = itertools.count()

    def push() -> None:
        number = next(numbers)
        queue.push(number, group=f"q{number % 1250}", left=number % 8, places=32_000)

    def decide() -> None:
        push()
        queue.regroup(f"q{next(numbers) % 1250}", 1)
        queue.pop()

    for _ in range(10_000):
        push()
    return decide


def _wave() -> Callable[[], Any]:
    sizes = [8] * 1250
    return lambda: admission.due_wave(sizes, in_flight=100, limit=10_000)


def _spread() -> Callable[[], Any]:
    workers = [admission.RolloutWorker(f"w{n}", n % 40) for n in range(_ENGINE_HOSTS)]
    return lambda: admission.spread_queries([8] * 1250, workers, turn=7)


def _roster() -> Callable[[], Any]:
    queries = [admission.QueryProgress(f"q{n}", n % 3 == 0, n % 4 == 0, n % 5) for n in range(1250)]
    return lambda: admission.next_move(
        queries, wanted=1000, spare=250, max_refills=100, first_k=True
    )


def _balancing() -> Callable[[], Any]:
    rng = random.Random(0)
    demands = [balancing.Demand(f"p{n}", rng.uniform(0, 4000)) for n in range(8)]
    engines = [
        balancing.EngineAssignment(f"e{n}", f"p{n % 8}", work=rng.uniform(0, 64))
        for n in range(GPUS // 4)
    ]
    rules = balancing.BalancingRules(sustain_seconds=0.0)
    return lambda: balancing.decide(rules, balancing.Memory(), demands, engines, 100.0)


def _binding(*, slots: int, policies: int = 16) -> Callable[[], Any]:
    workers = [
        binding.RankWorker(
            f"t{n:04}", slots=slots, memory=80 << 30, device="cuda", devices=8, host=f"h{n:04}"
        )
        for n in range(HOSTS)
    ]
    team = [
        binding.Policy(f"p{n}", work=n % 5, since=float(n), ranks=64 << n % 3, size=8 << 30)
        for n in range(policies)
    ]
    first = binding.decide(binding.BindingRules(), team, workers, 100.0)
    bound = {one.policy: one.workers for one in first.moves if isinstance(one, binding.Bind)}
    team = [
        replace(one, bound=bound[one.policy]) if one.policy in bound and n % 2 else one
        for n, one in enumerate(team)
    ]
    return lambda: binding.decide(binding.BindingRules(), team, workers, 101.0)


def _placing(*, running: bool = False) -> Callable[[], Any]:
    devices = tuple(
        Device(n, "H800", 80 << 30, tuple(m for m in range(8) if m != n)) for n in range(8)
    )
    hosts = [DeviceHost(f"h{n:04}", devices) for n in range(HOSTS)]
    requests = [DeviceRequest(f"engine{n}", "engine", 60, 4) for n in range(8)]
    requests += [DeviceRequest(f"trainer{n}", "trainer", 128) for n in range(8)]
    held = plan(hosts, requests[::2]).members if running else None
    return lambda: plan(hosts, requests, held)
