"""The window of open steps: how many overlap, and in which order they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from services.orchestrator.roster import Cursor, Roster
from services.orchestrator.step_rollout import Crew, train_tickets
from services.orchestrator.steps import StepRunner
from troupe.scheduling import admission
from troupe.v1 import experience_store_pb2 as es

# Nothing has to be pushed for a step to be allowed to open: another job may have freed memory.
_LOOK_SECONDS: Final = 1.0
OnFinish = Callable[[int, dict[str, float]], Awaitable[None]]


class Window:
    """Opens the steps of a job, as many at once as its staleness bounds allow, and ends them in
    order. In the on-policy modes that is one at a time.

    `on_finish` is awaited with every step that is over and its metrics.
    """

    def __init__(self, crew: Crew, first: int, on_finish: OnFinish) -> None:
        spec = crew.job.spec
        self._crew = crew
        self._next = first
        self._on_finish = on_finish
        self._alpha = {policy: spec.alpha_of(policy) for policy in spec.trained_policies}
        self._depth = 1 + max(self._alpha.values())
        self._cursor = Cursor()
        self._open: deque[tuple[StepRunner, asyncio.Task[dict[str, float]]]] = deque()
        self._taken_up = False
        # No step from here on may open: something else comes first.
        self._until = first
        self._closing = False
        crew.committed.update(dict.fromkeys(self._alpha, first))
        crew.served.update(crew.committed)

    def close(self) -> None:
        """Open no further step; `run` returns when those that are open are over."""
        self._closing = True
        self._crew.tables.touch()

    async def run(self, until: int) -> None:
        """Return when all steps before `until` are over, or all open ones after `close`.

        What a runner before this one had opened is taken up, whatever `until` says.
        Raises `TroupeError`: a fault of the job.
        """
        self._until = until
        try:
            if not self._taken_up:
                await self._take_up()
            ticker = asyncio.create_task(self._tick())
            try:
                while True:
                    while self._may_open():
                        await self._start(es.GetStepResponse())
                    if not self._open:
                        return
                    await self._wait()
                    await self._finish()
            finally:
                ticker.cancel()
                await asyncio.gather(ticker, return_exceptions=True)
        finally:
            # Only a fault or a cancellation leaves any.
            for _, task in self._open:
                task.cancel()
            await asyncio.gather(*(task for _, task in self._open), return_exceptions=True)
            self._open.clear()

    def _may_open(self) -> bool:
        if self._closing or self._next >= self._until or len(self._open) >= self._depth:
            return False
        if self._open and self._crew.tables.over_high_water:
            return False
        return not admission.holding_back(self._next, self._crew.served, self._alpha)

    def _will_follow(self, step: int) -> bool:
        """Whether a step will open while the one before it is still open."""
        if self._closing or step >= self._until or self._crew.tables.over_high_water:
            return False
        return self._depth > 1

    def _begin_early(self, step: int) -> None:
        """Have the trajectories of a step begun that opens next, if the job asks for it."""
        job = self._crew.job
        if not job.spec.pipeline.early_start or self._closing or step >= self._until:
            return
        limit = job.spec.limits.max_concurrent_trajectories
        plans = Roster(job, step, self._cursor).next_plans(most=limit)
        groups = [train_tickets(plan, ()) for plan in plans]
        count = admission.next_wave([len(one) for one in groups], in_flight=0, limit=limit)
        self._crew.dispatch.early.begin(step, groups[:count])

    async def _take_up(self) -> None:
        """Go on with what was open, and with the cursor where the newest step left it."""
        first = self._next
        if first:
            self._cursor.see(await self._ask(first - 1))
        found = [await self._ask(first)]
        while found[-1].open and len(found) < self._depth:
            found.append(await self._ask(first + len(found)))
        # All of them have seen to the cursor before any takes from it.
        steps = [one for one in found if one.open]
        for one in steps:
            self._cursor.see(one)
        for one in steps:
            await self._start(one)
        self._taken_up = True

    async def _ask(self, step: int) -> es.GetStepResponse:
        request = es.GetStepRequest(job_id=self._crew.job.job_id, step=step)
        return await self._crew.job.shared.experience.GetStep(request)

    async def _start(self, found: es.GetStepResponse) -> None:
        step = self._next
        before = self._open[-1][0] if self._open else None
        runner = StepRunner(
            self._crew,
            step,
            self._cursor,
            before,
            len(self._open),
            lambda: self._will_follow(step + 1),
            partial(self._begin_early, step + 1),
        )
        await runner.open(found)
        self._open.append((runner, asyncio.create_task(runner.run())))
        self._next += 1
        self._crew.tables.touch()

    async def _wait(self) -> None:
        """Until a step is over, has failed, or another may perhaps open."""
        change = asyncio.ensure_future(self._crew.tables.change(_LOOK_SECONDS))
        try:
            await asyncio.wait(
                {change, *(task for _, task in self._open)}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            change.cancel()

    async def _finish(self) -> None:
        """End what is over, oldest first; raise what failed."""
        for _, task in self._open:
            if task.done():
                task.result()
        while self._open and self._open[0][1].done():
            runner, task = self._open.popleft()
            await self._on_finish(runner.step, task.result())

    async def _tick(self) -> None:
        """Tell followers of progress, and write trajectories, now and then."""
        job = self._crew.job
        while True:
            if self._open:
                oldest = self._open[0][0]
                over, total = oldest.progress
                text = oldest.describe()
                if more := len(self._open) - 1:
                    text += f"; {more} more step{'s' if more > 1 else ''} open"
                job.show(text, step=oldest.step + 1, done=over, total=total)
            await asyncio.sleep(job.shared.settings.activity_seconds)
            for runner, _ in list(self._open):
                await runner.flush()
