"""A job in the twin with the mechanisms of published systems and of their baselines.

Beyond the job that the planner runs (`troupe.twin.cluster`): classes of devices, pools of actions,
environments that advance as a batch, steps that begin as whole batches, failing nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import simpy

from testbed.twin.actions import ActingTurn, ActionPool
from testbed.twin.faults import FailingTrainers, FailingTrajectory, NodeFaults, start_faults
from troupe.scheduling.binding import RankWorker
from troupe.scheduling.routing import Rates, classes_for
from troupe.twin.cluster import OpenStep, PlayedTrajectory, QueryGroup, Twin
from troupe.twin.engines import TwinEngine, TwinRouter
from troupe.twin.job import EngineFleet, RoutingRules, TwinJob
from troupe.twin.trainers import TrainingPool
from troupe.twin.workload import TwinTrajectory, TwinTurn


@dataclass(frozen=True, slots=True)
class ClassedFleet(EngineFleet):
    """Engines of one policy on one class of device, of several."""

    device_class: str = ""
    known_rates: Rates | None = None
    """Speed of the engine as the router knows it; None: unknown."""


@dataclass(frozen=True)
class PublishedJob(TwinJob):
    """A job with the mechanisms of published systems."""

    classes_by_domain: tuple[tuple[str, str], ...] = ()
    """(domain, device class) of turns that a class of device fits best."""
    whole_batches: bool = False
    """Whether a step's trajectories begin only when all of the previous step's have ended, and keep
    the weights with which they began (one-step off-policy in mode `async`)."""
    barrier: bool = False
    """Whether environments advance as a batch: no trajectory begins its next turn before all of its
    wave have ended their turns (the baseline of trajectory-level rollout)."""
    actions: Callable[[simpy.Environment], ActionPool] | None = None
    """Factory of the pool in which turns' calls run."""
    faults: NodeFaults | None = None


def check_mechanisms(job: PublishedJob) -> None:
    """Raise ValueError naming the invalid mechanism."""
    turns = (turn for one in job.workload(0) for turn in one.turns)
    calls = any(isinstance(turn, ActingTurn) for turn in turns)
    if calls and job.actions is None:
        raise ValueError("actions: turns call actions, but there is no pool for them")
    if calls and job.barrier:
        raise ValueError("barrier: environments that advance as a batch do not take turns' calls")
    if job.faults is not None and job.faults.mtbf_seconds <= 0:
        raise ValueError(f"faults.mtbf_seconds = {job.faults.mtbf_seconds}: must be above 0")


class _PublishedTrajectory(PlayedTrajectory):
    """A trajectory that has a place in the pool of actions, a barrier, or a broken environment."""

    __slots__ = ("acting", "cluster", "place", "waited")

    def __init__(
        self, cluster: PublishedTwin, group: QueryGroup, key: str, trajectory: TwinTrajectory
    ) -> None:
        super().__init__(cluster, group, key, trajectory)
        self.cluster = cluster
        # In the pool of actions: the running or waiting process, the trajectory's own place, and
        # the seconds that it waited for the place.
        self.acting: simpy.Process | None = None
        self.place: object = None
        self.waited = 0.0

    def begin(self) -> None:
        """Wait for a place in the pool of actions, if the trajectory has none, then begin."""
        pool = self.cluster.actions
        if pool is not None and self.place is None:
            self.acting = self.cluster.env.process(self._enter(pool))
        else:
            super().begin()

    def _enter(self, pool: ActionPool) -> Generator[simpy.Event, object, None]:
        asked = self.cluster.env.now
        try:
            self.place = yield from pool.enter()
        except simpy.Interrupt:
            return
        self.acting = None
        self.waited = self.cluster.env.now - asked
        self.twin.after(self.trajectory.before, self._next)

    def turn_ended(self, turn: TwinTurn) -> None:
        """Run the turn's action, or wait for the environments of all other trajectories."""
        pool, barrier = self.cluster.actions, self.cluster.barrier
        if pool is not None and isinstance(turn, ActingTurn):
            self.acting = self.cluster.env.process(self._act(pool, turn))
        elif barrier is not None:
            barrier.arrive(self, turn.after + self.cluster.control_turn)
        else:
            super().turn_ended(turn)

    def _act(self, pool: ActionPool, turn: ActingTurn) -> Generator[simpy.Event, object, None]:
        asked = self.cluster.env.now
        try:
            yield from pool.run(turn.call, self.place, self.key)
        except simpy.Interrupt:
            return
        self.acting = None
        self.cluster.acted(self.waited + self.cluster.env.now - asked)
        self.waited = 0.0
        self.twin.after(turn.after + self.twin.control_turn, self.advance)

    def trajectory_ended(self) -> None:
        """End, or run again in a new environment if this one broke."""
        if isinstance(self.trajectory, FailingTrajectory):
            self.trajectory = TwinTrajectory(*self.trajectory)
            self.at = 0
            self.previous.clear()
            self.begin()
        else:
            super().trajectory_ended()

    def leave(self, pool: ActionPool) -> None:
        """End the trajectory's action in the pool and free its place."""
        if self.acting is not None:
            self.acting.interrupt()
        if self.place is not None:
            pool.leave(self.place)


class _Barrier:
    """Environments that advance as a batch: the slowest holds up every trajectory."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.running = 0
        self._arrived: list[_PublishedTrajectory] = []
        self._until = 0.0

    def arrive(self, one: _PublishedTrajectory, seconds: float) -> None:
        """Handle the end of a turn; its environment needs `seconds`."""
        self._arrived.append(one)
        self._until = max(self._until, self._env.now + seconds)
        self.check()

    def check(self) -> None:
        """Let all continue once all have arrived."""
        if self._arrived and len(self._arrived) >= self.running:
            ready, self._arrived = self._arrived, []
            event = self._env.timeout(max(0.0, self._until - self._env.now))
            assert event.callbacks is not None
            self._until = 0.0

            def go(_: simpy.Event) -> None:
                for one in ready:
                    one.advance()

            event.callbacks.append(go)


class AffinityRouter(TwinRouter):
    """The router of a policy whose engines are on several classes of device."""

    def __init__(
        self,
        policy: str,
        engines: Iterable[TwinEngine],
        rules: RoutingRules,
        *,
        classes_by_domain: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._by_domain = dict(classes_by_domain)
        self._rates: dict[str, Rates] = {}
        self.fetched = False
        """Whether all engines have already fetched the weights that they load next."""
        super().__init__(policy, engines, rules)

    def register(self, engine: TwinEngine) -> None:
        """Tell the routing the engine's class of device, and its speed if it is known."""
        fleet = engine.fleet
        if isinstance(fleet, ClassedFleet):
            self.fleet.add(
                engine.engine_id,
                limit=engine.limit,
                device_class=fleet.device_class,
                rates=fleet.known_rates,
            )
        else:
            super().register(engine)
        self._rates = self.fleet.rates

    def remove(self, engine: TwinEngine) -> None:
        """Send the engine no new turns."""
        super().remove(engine)
        self._rates = self.fleet.rates

    def classes(self, turn: TwinTurn) -> Sequence[str]:
        """Return the device classes for a turn: declared for its domain, or inferred."""
        kind, inferred = (turn.domain, turn.policy), None
        if len(self._rates) > 1:
            inferred = self.profiles.fitting(kind, self._rates)
        if not (inferred or self._by_domain):
            return ()
        return classes_for(
            *kind, by_domain=self._by_domain, by_agent={}, default="", inferred=inferred
        )

    def update_of(self, engine: TwinEngine) -> Generator[simpy.Event, object, None]:
        """Return the process that brings one engine to new weights."""
        return engine.load() if self.fetched else engine.update()


class PublishedTwin(Twin):
    """One job with the mechanisms of published systems on one cluster. `run` once."""

    def __init__(self, job: PublishedJob) -> None:
        """Raises ValueError for a job that cannot run."""
        self._published = job
        self._serving = set(range(job.rollout_workers))
        self._failing: FailingTrainers | None = None
        super().__init__(job)
        check_mechanisms(job)
        self.failures = 0
        self.barrier = _Barrier(self.env) if job.barrier else None
        self.actions = job.actions(self.env) if job.actions is not None else None
        self._acts, self._act_seconds = 0, 0.0
        self.acts: list[tuple[int, float]] = []
        """By step: actions that have ended in the pool, and their seconds from request to end,
        waits for a pod included; totals since the start."""

    def acted(self, seconds: float) -> None:
        """Count an action that ended `seconds` after its request."""
        self._acts += 1
        self._act_seconds += seconds

    def lose_worker(self, worker: int) -> bool:
        """Kill a rollout worker with its engines and trajectories, which restart elsewhere. The
        last worker does not die, since nothing could continue without it. Return whether the worker
        died."""
        if len(self._serving) < 2:
            return False
        self.failures += 1
        self._serving.discard(worker)
        engines = [e for router in self.routers[worker].values() for e in router.engines]
        for engine in engines:
            engine.serving = engine.alive = False
            engine.take_turns()
        again: dict[int, QueryGroup] = {}
        lost: dict[int, list[TwinTrajectory]] = {}
        for one in list(self._running[worker].values()):
            self._leave(one)
            again[id(one.group)] = one.group
            lost.setdefault(id(one.group), []).append(one.trajectory)
        for key, group in again.items():
            group.todo = lost[key]
        # Lost trajectories come first, since they belong to the oldest steps.
        self._waiting = sorted([*again.values(), *self._waiting], key=lambda one: one.step.number)
        self._wake()
        return True

    def restore_worker(self, worker: int) -> None:
        """Restore a lost rollout worker, with new engines."""
        replaced: dict[str, TwinRouter] = {}
        for name, router in self.routers[worker].items():
            fresh = [
                TwinEngine(
                    self.env,
                    f"{engine.engine_id}+",
                    engine.fleet,
                    watch=self._watch,
                    prefix_cache=engine.prefix_cache,
                )
                for engine in router.engines
            ]
            replaced[name] = self._make_router(name, fresh)
        self.routers[worker] = replaced
        self._serving.add(worker)
        self._wake()

    def lose_trainer(self, trainer: RankWorker) -> None:
        """Kill a trainer worker, with the gradients of its gangs."""
        assert self._failing is not None
        self.failures += 1
        self._failing.lose(trainer.worker_id)

    def restore_trainer(self, trainer: RankWorker) -> None:
        """Restore a lost trainer worker."""
        assert self._failing is not None
        self._failing.join(trainer)

    def _start_processes(self) -> None:
        super()._start_processes()
        if self._published.faults is not None:
            start_faults(self.env, self, self._job.trainers, self._published.faults)

    def _workers(self) -> Sequence[int]:
        return sorted(self._serving)

    def _make_player(
        self, group: QueryGroup, key: str, trajectory: TwinTrajectory
    ) -> PlayedTrajectory:
        if self.barrier is not None:
            self.barrier.running += 1
        return _PublishedTrajectory(self, group, key, trajectory)

    def _make_trainers(self) -> TrainingPool:
        faults = self._published.faults
        if faults is None:
            return super()._make_trainers()
        self._failing = FailingTrainers(
            self.env,
            self._job.trainers,
            changed=self._account,
            restart_seconds=faults.restart_seconds,
            spans=self._run.trainer_spans if self._job.spans else None,
        )
        return self._failing

    def _make_router(self, policy: str, engines: Sequence[TwinEngine]) -> TwinRouter:
        return AffinityRouter(
            policy,
            engines,
            self._job.routing,
            classes_by_domain=self._published.classes_by_domain,
        )

    def _leave(self, one: PlayedTrajectory) -> None:
        if self.actions is not None:
            assert isinstance(one, _PublishedTrajectory)
            one.leave(self.actions)
        super()._leave(one)
        if self.barrier is not None:
            self.barrier.running -= 1
            self.barrier.check()

    def _may_open(self, newest: OpenStep | None) -> bool:
        whole = self._published.whole_batches
        return not (whole and newest is not None and not newest.rolled_out.triggered)

    def _end_rollout(self, step: OpenStep) -> None:
        super()._end_rollout(step)
        if self._published.whole_batches:
            self._tell()

    def _update(self, policy: str) -> Generator[simpy.Event, object, None]:
        if not self._published.whole_batches:
            yield from super()._update(policy)
            return
        env, newest = self.env, self._open[-1]
        # Between whole batches all engines load at once the weights that they fetched while
        # serving.
        fetched = not newest.rolled_out.processed
        if fetched:
            fetches = (one.rates.fetch_seconds for one in self._job.policies[policy].engines)
            yield newest.rolled_out & env.timeout(max(fetches))
        with self._updating[policy].request() as turn:
            yield turn
            updates = []
            for routers in self.routers:
                router = routers[policy]
                assert isinstance(router, AffinityRouter)
                router.fetched = fetched
                updates.append(env.process(router.update(env, overlapping=False)))
            yield env.all_of(updates)

    def _note(self, step: OpenStep) -> None:
        super()._note(step)
        self.acts.append((self._acts, self._act_seconds))
