"""A job on a cluster in simulated time: its steps in one of the pipeline modes, and their
measurements.

`Twin` opens steps, starts waves of trajectories, closes rosters and spreads groups over rollout
workers by `troupe.scheduling.admission`; `services/orchestrator/pipeline` is the live counterpart.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import simpy

from troupe.scheduling import admission
from troupe.twin.batch import BusyClock
from troupe.twin.engines import (
    EngineWatch,
    RoutedTurn,
    TwinBalancer,
    TwinEngine,
    TwinEnvironment,
    TwinRouter,
)
from troupe.twin.job import TwinJob, check
from troupe.twin.trainers import StepTable, TrainingPool
from troupe.twin.workload import TwinTrajectory, TwinTurn

TwinSpan: TypeAlias = tuple[str, str, float, float, float]
# New objects after which garbage is collected in a run.
_COLLECTED_AT = 100_000
_EAGER = frozenset({"micro_batch", "async"})


@dataclass(frozen=True, slots=True)
class TwinStep:
    """Totals at the end of a step: `at` seconds since the start."""

    at: float
    rollout_alone: float
    both: float
    training_alone: float
    neither: float
    engine_seconds: float
    """Busy seconds of all engines together."""
    device_seconds: float
    """Busy seconds of trainers' devices, weighted by the devices of each gang's workers."""
    response_tokens: int
    read_tokens: int
    trained_tokens: int
    trajectories: int
    staleness: float
    """Mean over the step's trajectories, in versions."""
    exposed: float
    """Seconds in which weight updates kept engines from drawing tokens, summed over all engines."""


@dataclass
class TwinRun:
    """The measurements of a run."""

    job: TwinJob
    steps: list[TwinStep] = field(default_factory=list)
    engines: int = 0
    moves: int = 0
    swaps: int = 0
    events: int = 0
    """Turns that engines have ended: the unit of the twin's work."""
    bound: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    engine_spans: list[TwinSpan] = field(default_factory=list)
    trainer_spans: list[TwinSpan] = field(default_factory=list)

    def means(self, first: int = 1, after: int = 0) -> TwinMeans:
        """Return the means per step from the end of step `first` on (0: from the start), without
        the last `after` steps. Raises ValueError if no step is left."""
        steps = self.steps[: len(self.steps) - after] if after else self.steps
        count = len(steps) - first
        if count < 1:
            raise ValueError(f"first = {first}: none of {len(steps)} steps is left")
        zero = TwinStep(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        start, end = (steps[first - 1] if first else zero), steps[-1]
        total = end.at - start.at
        devices = max(1, sum(one.devices for one in self.job.trainers))
        return TwinMeans(
            seconds=total / count,
            rollout_alone=(end.rollout_alone - start.rollout_alone) / count,
            both=(end.both - start.both) / count,
            training_alone=(end.training_alone - start.training_alone) / count,
            neither=(end.neither - start.neither) / count,
            engines=(end.engine_seconds - start.engine_seconds) / total / max(1, self.engines),
            trainers=(end.device_seconds - start.device_seconds) / total / devices,
            response_tokens_per_second=(end.response_tokens - start.response_tokens) / total,
            trained_tokens_per_second=(end.trained_tokens - start.trained_tokens) / total,
            staleness=sum(one.staleness for one in steps[first:]) / count,
            exposed=(end.exposed - start.exposed) / count / max(1, self.engines),
        )


@dataclass(frozen=True, slots=True)
class TwinMeans:
    """Means per step. The four shares add up to `seconds`; utilizations are busy time over time."""

    seconds: float
    rollout_alone: float
    both: float
    training_alone: float
    neither: float
    engines: float
    trainers: float
    response_tokens_per_second: float
    trained_tokens_per_second: float
    staleness: float
    exposed: float
    """Per engine."""


class QueryGroup:
    """The trajectories of one query in a step, and their rows by policy."""

    __slots__ = ("complete", "index", "name", "open", "rows", "started", "step", "todo", "worker")

    def __init__(self, index: int, step: OpenStep, todo: Sequence[TwinTrajectory]) -> None:
        self.index = index
        self.name = admission.query_id_of(index)
        self.step = step
        self.todo = todo
        self.open = len(todo)
        self.rows: dict[str, list[int]] = {}
        self.complete = False
        self.worker = -1
        # Committed steps of each policy when it started.
        self.started: Mapping[str, int] = {}


class OpenStep:
    """An open step."""

    def __init__(self, env: simpy.Environment, number: int, policies: Sequence[str]) -> None:
        self.number = number
        self.tables = {policy: StepTable(env) for policy in policies}
        self.groups: dict[str, QueryGroup] = {}
        self.closed = False
        self.rolled_out = env.event()
        self.committed = {policy: env.event() for policy in policies}
        self.stale: list[float] = []


class PlayedTrajectory:
    """One trajectory while it runs."""

    __slots__ = ("at", "gone", "group", "key", "previous", "trajectory", "turns", "twin")

    def __init__(self, twin: Twin, group: QueryGroup, key: str, trajectory: TwinTrajectory) -> None:
        self.twin = twin
        self.group = group
        self.key = key
        self.trajectory = trajectory
        self.turns = trajectory.turns
        self.at = 0
        self.previous: dict[str, str | None] = {}
        self.gone = False

    def begin(self) -> None:
        """Reset the environment, then take the first turn."""
        self.twin.after(self.trajectory.before, self._next)

    def _next(self, _: simpy.Event | None = None) -> None:
        if self.gone:
            return
        turn = self.turns[self.at]
        policy = turn.policy
        wanted = RoutedTurn(
            turn,
            self._ended,
            group=self.group.name,
            key=self.key,
            left=self.group.open,
            previous=self.previous.get(policy),
        )
        self.twin.routers[self.group.worker][policy].ask(wanted)

    def _ended(self, routed: RoutedTurn) -> None:
        turn = routed.turn
        assert routed.engine is not None
        self.previous[turn.policy] = routed.engine.engine_id
        self.at += 1
        self.turn_ended(turn)

    def turn_ended(self, turn: TwinTurn) -> None:
        """Continue after the tools and the environment of an ended turn."""
        self.twin.after(turn.after + self.twin.control_turn, self.advance)

    def advance(self, _: simpy.Event | None = None) -> None:
        """Take the next turn, or end."""
        if self.gone:
            return
        if self.at < len(self.turns):
            self._next()
        else:
            self.trajectory_ended()

    def trajectory_ended(self) -> None:
        """Handle the end of the last turn."""
        self.twin.trajectory_ended(self)


class Twin:
    """One job on one cluster. `run` once."""

    def __init__(self, job: TwinJob) -> None:
        """Raises ValueError for a job that cannot run: no engine or trainer for a policy, numbers
        out of range."""
        check(job)
        self._job = job
        self.env = TwinEnvironment()
        self._time = self.env.clock
        self.control_turn = job.control.turn
        self._clock = BusyClock()
        self._shares = [0.0, 0.0, 0.0, 0.0]
        self._shares_at = 0.0
        self._run = TwinRun(job)
        watch = EngineWatch(self._clock, self._account)
        if job.spans:
            watch.spans = self._run.engine_spans
        self._watch = watch
        self._trained = [name for name, one in job.policies.items() if one.trained]
        self._pool = self._make_trainers()
        for name in self._trained:
            one = job.policies[name]
            self._pool.add(name, one.trainer, ranks=one.ranks, size=one.state_bytes)
        self.routers: list[dict[str, TwinRouter]] = []
        self._balancers: list[TwinBalancer] = []
        for worker in range(job.rollout_workers):
            self._add_worker(worker)
        self._run.engines = sum(
            len(router.engines)
            for routers in self.routers
            for router in dict.fromkeys(routers.values())
        )
        # One version after another.
        self._updating = {one: simpy.Resource(self.env) for one in self._trained}
        self._served = dict.fromkeys(self._trained, 0)
        self._committed = dict.fromkeys(self._trained, 0)
        self._alpha = dict.fromkeys(self._trained, 0)
        if job.mode == "async":
            for name in self._trained:
                own = job.policies[name].alpha
                self._alpha[name] = job.alpha if own is None else own
        self._next_step = self._next_query = 0
        self._open: list[OpenStep] = []
        self._waiting: list[QueryGroup] = []
        self._running: list[dict[int, PlayedTrajectory]] = [{} for _ in range(job.rollout_workers)]
        self._in_flight = self._turn = self._ended_trajectories = 0
        self._waving = False
        self._news = self.env.event()
        self._limit = job.in_flight

    def run(self, steps: int) -> TwinRun:
        """Run `steps` steps to their end. Raises RuntimeError if the job cannot continue."""
        if steps < 1:
            raise ValueError(f"steps = {steps} is out of range")
        done = self.env.process(self._window(steps))
        self._start_processes()
        collected_at = gc.get_threshold()
        # There are millions of turns and calls, nearly all of which are freed without the
        # collector.
        gc.set_threshold(_COLLECTED_AT, *collected_at[1:])
        try:
            self._time.run_to(self.env, done)
        finally:
            gc.set_threshold(*collected_at)
        run = self._run
        run.moves = sum(one.moves for one in self._balancers)
        run.swaps, run.bound = self._pool.swaps, self._pool.bound()
        run.events = self._watch.turns
        return run

    def _start_processes(self) -> None:
        """Start the processes that run as long as the job."""
        for balancer in self._balancers:
            self.env.process(balancer.run())

    def after(self, seconds: float, call: Any) -> None:
        """Call `call` with an event after `seconds`."""
        if seconds <= 0:
            call()
            return
        self._time.call(self._time.now + seconds, call)

    def trajectory_ended(self, one: PlayedTrajectory) -> None:
        """Handle the end of a trajectory: its rows, its group, and the trajectories that may start
        now."""
        group = one.group
        self._leave(one)
        self._ended_trajectories += 1
        share = self._job.share_prefixes
        for turn in one.trajectory.turns:
            read = turn.prompt - turn.shared if share else turn.prompt
            group.rows.setdefault(turn.policy, []).append(read + turn.response)
        group.open -= 1
        for router in self.routers[group.worker].values():
            router.regroup(group.name, group.open)
        if group.open == self._job.redundant:
            if group.open:
                self._end_running({group.name})
            self._complete(group)
        self._wake()

    def _leave(self, one: PlayedTrajectory) -> None:
        one.gone = True
        self._in_flight -= 1
        del self._running[one.group.worker][id(one)]

    def _complete(self, group: QueryGroup) -> None:
        step = group.step
        group.complete = True
        step.stale.append(
            max((step.number - group.started.get(one, 0) for one in self._trained), default=0)
        )
        for policy, table in step.tables.items():
            if rows := group.rows.get(policy):
                table.add(rows)
            table.close_group()
        self._move_roster(step)

    def _move_roster(self, step: OpenStep) -> None:
        """Close the step's roster when it is due; the surplus leaves."""
        job = self._job
        if not job.spare:
            over = all(one.complete for one in step.groups.values())
            move = admission.RosterMove(close=over)
        else:
            move = admission.next_move(
                [
                    admission.QueryProgress(one.name, one.complete, one.complete, 1)
                    for one in step.groups.values()
                ],
                wanted=job.queries_per_step,
                spare=job.spare,
                max_refills=0,
                may_close=not step.closed,
                first_k=True,
            )
        if not move.close or step.closed:
            return
        step.closed = True
        leaving = set(move.leave)
        if leaving:
            self._withdraw(step, leaving)
        for table in step.tables.values():
            table.seal()
        self._end_rollout(step)

    def _end_rollout(self, step: OpenStep) -> None:
        step.rolled_out.succeed()

    def _end_running(self, names: set[str]) -> None:
        """End the trajectories of some queries that still run, with their turns."""
        for worker, running in enumerate(self._running):
            leaving = [one for one in running.values() if one.group.name in names]
            if leaving:
                for router in self.routers[worker].values():
                    router.withdraw(names)
            for one in leaving:
                self._leave(one)

    def _withdraw(self, step: OpenStep, names: set[str]) -> None:
        self._end_running(names)
        self._waiting = [one for one in self._waiting if one.name not in names]
        for name in names:
            del step.groups[name]
            for table in step.tables.values():
                table.close_group()
        self._wake()

    def _window(self, steps: int) -> Generator[simpy.Event, Any, None]:
        """Open steps as staleness allows, and end them in order."""
        depth = 1 + max(self._alpha.values(), default=0)
        running: list[tuple[OpenStep, simpy.Process]] = []
        while True:
            while (
                self._next_step < steps
                and len(running) < depth
                and not admission.holding_back(self._next_step, self._served, self._alpha)
                and self._may_open(running[-1][0] if running else None)
            ):
                before = running[-1][0] if running else None
                step = self._open_step()
                running.append((step, self.env.process(self._run_step(step, before))))
            if not running:
                return
            yield running[0][1] | self._news
            while running and not running[0][1].is_alive:
                self._note(running.pop(0)[0])

    def _may_open(self, newest: OpenStep | None) -> bool:
        """Return whether a step may open while the newest step is open."""
        return True

    def _open_step(self) -> OpenStep:
        job = self._job
        step = OpenStep(self.env, self._next_step, self._trained)
        self._next_step += 1
        for _ in range(job.queries_per_step + job.spare):
            group = QueryGroup(self._next_query, step, job.workload(self._next_query))
            self._next_query += 1
            step.groups[group.name] = group
            self._waiting.append(group)
        for table in step.tables.values():
            table.open_groups = len(step.groups)
        self._open.append(step)
        self.after(job.control.step, lambda *_: self._wake())
        return step

    def _run_step(
        self, step: OpenStep, before: OpenStep | None
    ) -> Generator[simpy.Event, Any, None]:
        mode, env = self._job.mode, self.env
        if mode in _EAGER:
            trains = [env.process(self._train(one, step, before)) for one in self._trained]
            yield env.all_of([step.rolled_out, *trains])
            return
        yield step.rolled_out
        if self._job.switch_seconds:
            yield env.timeout(self._job.switch_seconds)
        if mode == "serial":
            for policy in self._trained:
                yield env.process(self._train(policy, step, before))
        else:
            yield env.all_of([env.process(self._train(one, step, before)) for one in self._trained])
        if self._job.switch_seconds:
            yield env.timeout(self._job.switch_seconds)

    def _train(
        self, policy: str, step: OpenStep, before: OpenStep | None
    ) -> Generator[simpy.Event, Any, None]:
        if before is not None and not before.committed[policy].triggered:
            yield before.committed[policy]
        yield from self._pool.train(policy, step.tables[policy], self._job.micro_batch)
        if self._job.control.commit:
            yield self.env.timeout(self._job.control.commit)
        self._committed[policy] = step.number + 1
        step.committed[policy].succeed()
        yield from self._update(policy)
        self._served[policy] = step.number + 1
        self._tell()

    def _update(self, policy: str) -> Generator[simpy.Event, Any, None]:
        """Bring the policy's engines to its newest weights, one version after another."""
        env, overlapping = self.env, self._job.mode == "async"
        with self._updating[policy].request() as turn:
            yield turn
            updates = (one[policy].update(env, overlapping=overlapping) for one in self.routers)
            yield env.all_of([env.process(one) for one in updates])

    def _tell(self) -> None:
        """Let `_window` check again."""
        news, self._news = self._news, self.env.event()
        news.succeed()

    def _note(self, step: OpenStep) -> None:
        now = self.env.now
        self._account(now)
        self._clock.settle(now)
        self._pool.clock.settle(now)
        busy, workers = self._pool.busy, {one.worker_id: one for one in self._job.trainers}
        self._run.steps.append(
            TwinStep(
                at=now,
                rollout_alone=self._shares[0],
                both=self._shares[1],
                training_alone=self._shares[2],
                neither=self._shares[3],
                engine_seconds=self._clock.lane_seconds,
                device_seconds=sum(
                    busy[name] * workers[name].devices for name in busy if name in workers
                ),
                response_tokens=self._watch.response_tokens,
                read_tokens=self._watch.read_tokens,
                trained_tokens=self._pool.trained_tokens,
                trajectories=self._ended_trajectories,
                staleness=sum(step.stale) / len(step.stale) if step.stale else 0.0,
                exposed=self._watch.exposed_seconds,
            )
        )
        self._open.remove(step)

    def _account(self, now: float) -> None:
        """Count the time until now as one of the four shares."""
        engines, trainers = self._clock.busy, self._pool.clock.busy
        kind = 1 if engines and trainers else 0 if engines else 2 if trainers else 3
        self._shares[kind] += now - self._shares_at
        self._shares_at = now

    def _wake(self) -> None:
        if not self._waving and self._waiting:
            self._waving = True
            at = self._time.now + self._job.control.trajectory
            self._time.call(at, self._start_wave)

    def _start_wave(self, _: simpy.Event) -> None:
        self._waving = False
        waiting = self._waiting
        if not waiting:
            return
        limit = self._limit
        if self._job.mode == "serial":  # one query at a time
            limit = 1
        # More than the window cannot start: the rest need no check.
        sizes = [len(one.todo) for one in itertools.islice(waiting, limit)]
        if len(waiting) > len(sizes):
            sizes.append(limit + 1)
        count = admission.due_wave(sizes, in_flight=self._in_flight, limit=limit)
        count = min(count, len(waiting))
        if not count:
            return
        groups, self._waiting = waiting[:count], waiting[count:]
        loads = [
            admission.RolloutWorker(f"{one:06}", len(self._running[one])) for one in self._workers()
        ]
        self._turn += 1
        chosen = admission.spread_queries([len(one.todo) for one in groups], loads, turn=self._turn)
        for group, worker in zip(groups, chosen, strict=True):
            group.worker = int(worker)
            group.started = dict(self._served)
            for number, trajectory in enumerate(group.todo):
                self._begin(group, number, trajectory)

    def _workers(self) -> Sequence[int]:
        """Return the rollout workers that may get trajectories."""
        return range(len(self.routers))

    def _begin(self, group: QueryGroup, number: int, trajectory: TwinTrajectory) -> None:
        self._in_flight += 1
        playing = self._make_player(group, f"{group.name}-t{number}", trajectory)
        self._running[group.worker][id(playing)] = playing
        playing.begin()

    def _make_player(
        self, group: QueryGroup, key: str, trajectory: TwinTrajectory
    ) -> PlayedTrajectory:
        return PlayedTrajectory(self, group, key, trajectory)

    def _make_trainers(self) -> TrainingPool:
        spans = self._run.trainer_spans if self._job.spans else None
        return TrainingPool(self.env, self._job.trainers, changed=self._account, spans=spans)

    def _make_router(self, policy: str, engines: Sequence[TwinEngine]) -> TwinRouter:
        return TwinRouter(policy, engines, self._job.routing)

    def _add_worker(self, worker: int) -> None:
        job, routers = self._job, dict[str, TwinRouter]()
        group_of = {name: group for group in job.groups for name in group}
        for name, policy in job.policies.items():
            if (first := group_of.get(name, (name,))[0]) in routers:
                # One queue, so that the turns of all policies of a group wait alike.
                routers[name] = routers[first]
                continue
            engines = [
                TwinEngine(
                    self.env,
                    f"{worker}/{name}/{part}.{number}",
                    fleet,
                    watch=self._watch,
                    prefix_cache=job.prefix_cache,
                )
                for part, fleet in enumerate(policy.engines)
                for number in range(fleet.count)
            ]
            routers[name] = self._make_router("+".join(group_of.get(name, (name,))), engines)
        self.routers.append(routers)
        own = [router for name, router in routers.items() if name not in group_of]
        if job.balancing is not None and len(own) > 1:
            kinds = {name: [one.rates for one in p.engines] for name, p in job.policies.items()}
            barred = {
                (one, other) for one in kinds for other in kinds if kinds[one] != kinds[other]
            }
            self._balancers.append(
                TwinBalancer(
                    self.env,
                    own,
                    job.balancing,
                    barred=barred | set(job.barred),
                    minimum={name: one.minimum for name, one in job.policies.items()},
                )
            )
