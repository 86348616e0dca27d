"""Trainers in the twin: the store's tables of rows, gangs on trainer workers, a policy's steps.

`TrainingPool` calls `troupe.scheduling.binding.decide` with the same records as the orchestrator's
`TrainerScheduler`, and carries out its moves. A policy's step claims micro-batches as from the
experience store, computes each on its gang, and ends with one optimizer step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import simpy

from troupe.scheduling import binding
from troupe.scheduling.binding import ReadyOrder, ready_micro_batches
from troupe.twin.batch import BusyClock
from troupe.twin.costs import TrainerRates


class StepTable:
    """The rows of one policy and step in the experience store.

    A row becomes claimable when its group is complete. The contents of a claim, and the end of the
    table, follow `services/experience_store/lua/claim.lua`.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._ready: deque[int] = deque()
        self.sealed = False
        self.open_groups = 0
        self.claimed = 0
        self.changed = env.event()

    @property
    def ready(self) -> int:
        """Rows that may be claimed."""
        return len(self._ready)

    @property
    def final(self) -> bool:
        """Whether no further row can come."""
        return self.sealed and not self.open_groups

    def add(self, tokens: Sequence[int]) -> None:
        """Add the rows of a complete group, by their tokens."""
        self._ready.extend(tokens)
        self._tell()

    def seal(self) -> None:
        """Record that no further query joins the step."""
        self.sealed = True
        self._tell()

    def close_group(self) -> None:
        """Close a group that is complete or has left the step."""
        self.open_groups -= 1
        self._tell()

    def claim(self, most: int) -> list[int] | None:
        """Return the rows of one micro-batch; empty: wait; None: exhausted."""
        if len(self._ready) >= most or (self.final and self._ready):
            self.claimed += min(most, len(self._ready))
            return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        return None if self.final else []

    def give_back(self, rows: Sequence[int]) -> None:
        """Make rows with lost gradients claimable again."""
        self._ready.extendleft(reversed(rows))
        self.claimed -= len(rows)
        self._tell()

    def _tell(self) -> None:
        changed, self.changed = self.changed, self._env.event()
        changed.succeed()


class PolicyLease:
    """A policy's claim to trainer workers, like the orchestrator's `TrainerLease`."""

    def __init__(self, env: simpy.Environment, name: str, rates: TrainerRates, ranks: int) -> None:
        self.name = name
        self.rates = rates
        self.ranks = ranks
        self.size = 0
        self.table: StepTable | None = None
        self.micro_batch = 1
        self.arrivals = ReadyOrder()
        self.bound: tuple[str, ...] = ()
        self.bound_at = 0.0
        self.idle_since = 0.0
        self.accumulated = 0
        # Rows whose gradients are accumulated: lost with the gang.
        self.rows: list[int] = []
        self.binding = False
        self.stepping = False
        self.suspending = False
        # Seconds of its last suspension, and of its last resumption.
        self.moved_out = self.moved_in = 0.0
        self.near: tuple[str, ...] = ()
        self.prefetched: tuple[str, ...] = ()
        # Workers to which its state is being moved.
        self.fetching: tuple[str, ...] = ()
        self.seen = False
        self.changed = env.event()

    def tell(self, env: simpy.Environment) -> None:
        changed, self.changed = self.changed, env.event()
        changed.succeed()

    def view(self, now: float) -> binding.Policy:
        """Return the records that `TrainerLease.scheduling_view` builds."""
        work = 0
        if self.table is not None:
            # A claim whose gradient is not accumulated yet counts as work.
            claimed = max(0, self.table.claimed - self.accumulated)
            left = self.table.ready + claimed
            work = ready_micro_batches(left, self.micro_batch, final=self.table.final)
            if self.stepping:
                work = max(work, 1)
        self.arrivals.note(work, now)
        oldest = self.arrivals.oldest
        return binding.Policy(
            self.name,
            work=work,
            since=self.idle_since if oldest is None else oldest,
            wanted=self.table is not None,
            ranks=self.ranks,
            size=self.size,
            bound=self.bound,
            bound_at=self.bound_at,
            busy=self.binding or self.stepping,
            leaving=self.suspending,
            accumulating=self.accumulated > 0,
            near=frozenset(() if self.bound else self.near),
            prefetched=frozenset(self.prefetched),
            swap=self.moved_out + self.moved_in,
        )


class TrainingPool:
    """The trainer workers of a cluster and the policies that take turns on them."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[binding.RankWorker],
        *,
        changed: Any,
        spans: list[tuple[str, str, float, float, float]] | None = None,
    ) -> None:
        """`changed`: called with the time just before a worker starts or stops computing."""
        self._env = env
        self.workers = {one.worker_id: one for one in workers}
        self._rules = binding.BindingRules()
        self._leases: dict[str, PolicyLease] = {}
        # Policies that share a worker alternate by micro-batch, as in its one compute thread.
        self._compute = {one: simpy.Resource(env) for one in self.workers}
        self._pending = False
        self._again = math.inf
        self._changed = changed
        self._spans = spans
        self.clock = BusyClock()
        self.busy: dict[str, float] = dict.fromkeys(self.workers, 0.0)
        self.swaps = 0
        self.swap_seconds = 0.0
        self.trained_tokens = 0

    def add(self, policy: str, rates: TrainerRates, *, ranks: int = 1, size: int = 0) -> None:
        """Schedule a policy from now on. `size`: bytes of its state on each device."""
        lease = PolicyLease(self._env, policy, rates, ranks)
        lease.size = size
        self._leases[policy] = lease

    def bound(self) -> Mapping[str, tuple[str, ...]]:
        """Return the workers that each policy is bound to."""
        return {one.name: one.bound for one in self._leases.values()}

    def train(
        self, policy: str, table: StepTable, micro_batch: int
    ) -> Generator[simpy.Event, Any, None]:
        """Run one step of a policy: all micro-batches of its table, then the optimizer step."""
        env, lease = self._env, self._leases[policy]
        lease.table, lease.micro_batch = table, micro_batch
        lease.accumulated, lease.rows = 0, []
        table_told = env.process(self._follow(table))
        self.touch()
        while True:
            while not lease.bound or lease.binding or lease.suspending:
                yield lease.changed
            rows = table.claim(micro_batch)
            if rows is None:
                break
            if not rows:
                yield table.changed | lease.changed
                continue
            group = lease.bound
            tokens = sum(rows)
            seconds = tokens / lease.rates.backward_tokens_per_second
            whole = yield from self._work(lease, seconds + lease.rates.micro_batch_seconds, tokens)
            if whole and lease.bound == group:
                lease.accumulated += len(rows)
                lease.rows += rows
                self.trained_tokens += tokens
            else:
                table.give_back(rows)
            self.touch()
        lease.stepping = True
        if lease.accumulated:
            yield from self._work(lease, lease.rates.step_seconds, 0)
        lease.stepping = False
        lease.table, lease.accumulated, lease.rows = None, 0, []
        lease.idle_since = env.now
        if table_told.is_alive:
            table_told.interrupt()
        self.touch()

    def touch(self) -> None:
        """Decide again after all events of this instant."""
        if not self._pending:
            self._pending = True
            event = self._env.timeout(0)
            assert event.callbacks is not None
            event.callbacks.append(self._decide)

    def _follow(self, table: StepTable) -> Generator[simpy.Event, Any, None]:
        """Decide whenever the table changes, until the step is over."""
        try:
            while not table.final:
                yield table.changed
                self.touch()
        except simpy.Interrupt:
            return

    def _decide(self, _: simpy.Event | None = None) -> None:
        self._pending = False
        now = self._env.now
        policies = [one.view(now) for one in self._leases.values()]
        plan = binding.decide(self._rules, policies, list(self.workers.values()), now)
        for move in plan.moves:
            lease = self._leases[move.policy]
            match move:
                case binding.Bind():
                    self._env.process(self._bind(lease, move.workers))
                case binding.Suspend():
                    self._env.process(self._suspend(lease))
                case binding.Prefetch():
                    self._env.process(self._prefetch(lease, move.workers))
                case binding.Release():
                    lease.bound, lease.near = (), lease.bound
                    lease.tell(self._env)
        if math.isfinite(plan.again) and plan.again < self._again:
            self._again = plan.again
            event = self._env.timeout(max(0.0, plan.again - now))
            assert event.callbacks is not None
            event.callbacks.append(self._on_again)

    def _on_again(self, _: simpy.Event) -> None:
        self._again = math.inf
        self._decide()

    def _bind(
        self, lease: PolicyLease, workers: tuple[str, ...]
    ) -> Generator[simpy.Event, Any, None]:
        lease.bound, lease.binding = workers, True
        lease.bound_at = self._env.now
        ready = set(workers) <= set(lease.prefetched)
        seconds = 0.0 if ready else lease.rates.swap_seconds
        if lease.seen:
            self.swaps += 1
            self.swap_seconds += seconds
            lease.moved_in = seconds
        seconds += self.rebuilding_seconds(lease.name)
        lease.seen, lease.prefetched, lease.fetching = True, (), ()
        if seconds:
            yield self._env.timeout(seconds)
        lease.binding, lease.bound_at = False, self._env.now
        lease.tell(self._env)
        self.touch()

    def rebuilding_seconds(self, policy: str) -> float:
        """Return the seconds that a policy's gang needs beyond the transfer of its state."""
        return 0.0

    def _prefetch(
        self, lease: PolicyLease, workers: tuple[str, ...]
    ) -> Generator[simpy.Event, Any, None]:
        if lease.fetching == workers:
            return
        lease.fetching = workers
        yield self._env.timeout(lease.rates.swap_seconds)
        if lease.fetching == workers:
            lease.fetching = ()
            if not lease.bound:
                lease.prefetched = workers
                self.touch()

    def _suspend(self, lease: PolicyLease) -> Generator[simpy.Event, Any, None]:
        """Move weights, moments and gradients off the devices between two micro-batches."""
        lease.suspending = True
        leader = lease.bound[0]
        with self._compute[leader].request() as turn:
            yield turn
            if lease.bound and lease.rates.swap_seconds:
                yield self._env.timeout(lease.rates.swap_seconds)
                self.swap_seconds += lease.rates.swap_seconds
                lease.moved_out = lease.rates.swap_seconds
        lease.near, lease.bound, lease.suspending = lease.bound, (), False
        lease.idle_since = self._env.now
        lease.tell(self._env)
        self.touch()

    def _work(
        self, lease: PolicyLease, seconds: float, tokens: int
    ) -> Generator[simpy.Event, Any, bool]:
        """Compute on the gang's leader; return whether the gang survived to the end."""
        group = lease.bound
        with self._compute[group[0]].request() as turn:
            yield turn
            if lease.bound != group:
                return False
            began = self._env.now
            self._changed(began)
            self.clock.change(1, began)
            yield self._env.timeout(seconds)
            now = self._env.now
            self._changed(now)
            self.clock.change(-1, now)
        for worker in group:
            if worker in self.busy:
                self.busy[worker] += now - began
        if self._spans is not None:
            self._spans.append((group[0], lease.name, began, now, float(tokens)))
        return lease.bound == group


def single_rank_workers(count: int) -> list[binding.RankWorker]:
    """Return workers of one device each, on separate hosts, which bind any number of policies."""
    one = binding.RankWorker("", device="cpu")
    return [replace(one, worker_id=f"trainer {n}") for n in range(count)]
