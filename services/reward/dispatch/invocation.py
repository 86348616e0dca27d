"""Invocations without an outcome, one by one and in the chunks that executors run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.reward.call import FunctionCall
from services.reward.executor import CallExecutor
from services.reward.function import LineSplitter, RegisteredFunction
from services.reward.host import OWN_HOST
from services.reward.resources import CORES, WORKERS
from troupe.scheduling.elastic import Action, SpeedUp
from troupe.v1 import reward_pb2 as reward_pb

# Calls queued behind one that takes longer than this are taken back, to run elsewhere.
_RECALL_SECONDS: Final = 0.2


@dataclass(eq=False)
class PendingInvocation:
    """One invocation from its acceptance to its outcome.

    `rank` orders invocations of one job and priority (`troupe.scheduling.elastic.order`); those
    with equal rank run in order of arrival.
    """

    invocation_id: str
    function: RegisteredFunction
    call: FunctionCall
    done: asyncio.Future[reward_pb.InvokeResponse]
    since: float
    rank: tuple[float, int]
    # The executor of its sandbox, on the service's own host; None: it runs in any free executor.
    sandbox_executor: CallExecutor | None = None
    # The chunk with which it was given to a worker; None: it is queued.
    chunk: InvocationChunk | None = None
    host: str = ""
    # Cores that it was given, and what its job was charged for it.
    cores: int = 0
    charged: float = 0.0
    # When its current attempt began (0: queued), and how many attempts there were.
    began: float = 0.0
    attempts: int = 0
    cold_seconds: float = 0.0
    # Splits what it prints into lines; None until it prints.
    lines: LineSplitter | None = None
    # The last result of `action()`, with its inputs.
    _cached: tuple[SpeedUp, int, Action] | None = None

    @property
    def job(self) -> str:
        """The job that it is charged to: shares are fair between jobs."""
        return self.call.job_id

    @property
    def cost(self) -> float:
        """Worker-seconds, times cores, that it is expected to take."""
        return cost(self.function, self.call)

    def action(self, most_cores: int, *, explore: bool = True) -> Action:
        """Return the invocation as the scheduler sees it, by present knowledge of its function.

        `most_cores`: cores of the largest eligible host; 0: no host leases cores. `explore`: it may
        get a number of cores that is new for the function.
        """
        function, cached = self.function, self._cached
        if cached is not None and cached[0] is function.curve and cached[1] == most_cores:
            return cached[2]
        elastic = None
        needs = {WORKERS: 1, **function.needs}
        if most_cores and function.elastic:
            elastic = function.curve.elastic(
                CORES,
                function.levels,
                self.rank[1],
                lowest=self.call.estimated_seconds,
                most=most_cores,
                explore=explore,
            )
        elif most_cores:
            needs[CORES] = function.cores
        action = Action(
            self.invocation_id,
            self.since,
            needs,
            elastic,
            self.call.estimated_seconds or function.seconds,
            function=function.key,
            host=None if self.sandbox_executor is None else OWN_HOST,
        )
        self._cached = (function.curve, most_cores, action)
        return action


def cost(function: RegisteredFunction, call: FunctionCall) -> float:
    """Seconds, times cores, that `call` is expected to take with the fewest cores."""
    return (call.estimated_seconds or function.seconds) * max(1, function.cores)


class InvocationChunk:
    """Invocations that one executor runs in order, until each has an outcome or was taken back."""

    def __init__(
        self,
        invocations: Sequence[PendingInvocation],
        executor: CallExecutor,
        cancel: Callable[[], None],
        recall: Callable[[list[PendingInvocation]], None],
    ) -> None:
        """`cancel` ends the call that runs. `recall` gets those that wait behind a slow one."""
        self.executor, self.cancel = executor, cancel
        self.calls = [one.call for one in invocations]
        # None: it has its outcome, or was taken back.
        self._invocations: list[PendingInvocation | None] = list(invocations)
        self._left = len(invocations)
        # All before this index are None.
        self._first = 0
        self._recall = recall
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    @property
    def behind(self) -> int:
        """How many invocations have not begun."""
        return max(0, self._left - 1)

    @property
    def current(self) -> PendingInvocation | None:
        """The invocation that runs, or is the next to run."""
        while self._first < len(self._invocations):
            if (found := self._invocations[self._first]) is not None:
                return found
            self._first += 1
        return None

    def ended(self, index: int) -> PendingInvocation | None:
        """Remove and return the invocation at `index`, which has an outcome; None if it was taken
        back before."""
        found = self._remove(index)
        self._start_timer()
        return found

    def leave(self, invocation: PendingInvocation) -> None:
        """Take back an invocation that has not begun; should it run nevertheless, its outcome is
        ignored."""
        self._remove(self._invocations.index(invocation))
        invocation.call.dropped = True

    def leave_all(self) -> list[PendingInvocation]:
        """Remove and return all that have no outcome, in order."""
        found = [one for one in self._invocations if one is not None]
        self._invocations, self._left = [], 0
        self._stop_timer()
        return found

    def _remove(self, index: int) -> PendingInvocation | None:
        found, self._invocations[index] = self._invocations[index], None
        self._left -= found is not None
        return found

    def _start_timer(self) -> None:
        self._stop_timer()
        if self.behind:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_RECALL_SECONDS, self._recall_followers)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _recall_followers(self) -> None:
        current = self.current
        behind = [one for one in self._invocations if one is not None and one is not current]
        for one in behind:
            self.leave(one)
        self._recall(behind)
