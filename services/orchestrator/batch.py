"""A batch: the trajectories of one step or one evaluation, as the dispatch runs them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from services.orchestrator.faults import Patience
from troupe.rpc import TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as ro


class Batch:
    """What is waited for together. Tickets may be added until it is `sealed`.

    `on_end` sees each trajectory's first ending; what it raises ends the batch. `ended` asks the
    experience store which trajectories have ended although nobody said so. A worker may run them
    when it serves at least the versions `floors` (None: exactly the newest ones). What runs `aside`
    starts when nothing else waits.
    """

    def __init__(
        self,
        step: int,
        patience: Patience,
        on_end: Callable[[ro.TrajectoryEvent], None],
        *,
        floors: Mapping[str, int] | None = None,
        ended: Callable[[], Awaitable[Collection[str]]] | None = None,
        aside: bool = False,
    ) -> None:
        self.step = step
        self.aside = aside
        self.patience = patience
        self.floors = floors
        # Trajectories that ended, says the store, while whoever ran them could not tell.
        self.unseen = 0
        # Trajectories that ended, says who ran them.
        self.told = 0
        # By query: the oldest version of each policy that its trajectories started with.
        self.started: dict[str, dict[str, int]] = {}
        self._on_end = on_end
        self._ask = ended
        self._open: set[str] = set()
        # By query: trajectories that completed, as far as was told; of groups that are complete and
        # of which not all members were told, how many there are, and who may be one.
        self._completed: Counter[str] = Counter()
        self._parting: dict[str, tuple[int, set[str]]] = {}
        self._sealed = False
        self._fault: TroupeError | None = None
        self._changed = asyncio.Event()

    @property
    def open(self) -> int:
        """Trajectories that have not ended."""
        return len(self._open)

    def add(self, trajectory_ids: Collection[str]) -> None:
        """These are waited for, too."""
        self._open.update(trajectory_ids)

    def remove(self, trajectory_ids: Collection[str]) -> None:
        """These are not waited for any more."""
        self._open.difference_update(trajectory_ids)
        self._changed.set()

    def seal(self) -> None:
        """Nothing will be added."""
        self._sealed = True
        self._changed.set()

    def note_started(self, query_id: str, versions: Mapping[str, int]) -> None:
        """A trajectory of the query began with these versions."""
        if versions:
            oldest = self.started.setdefault(query_id, {})
            for policy, version in versions.items():
                oldest[policy] = min(version, oldest.get(policy, version))

    def end(self, event: ro.TrajectoryEvent) -> None:
        """A trajectory has ended."""
        self.remove((event.trajectory_id,))
        self._tell(event)

    def complete(self, query_id: str, running: Collection[str], members: int) -> None:
        """The store has all `members` of a query's group. Which of those that are `running` are
        members it does not say: a member's ending may be told after that of the last one."""
        if running and self._completed[query_id] < members:
            self._parting[query_id] = (members, set(running))

    def end_withdrawn(self, event: ro.TrajectoryEvent) -> None:
        """A trajectory has ended whose group was complete; its last words count."""
        self._tell(event)
        self._part(event.query_id, event.trajectory_id)

    def end_untold(self, query_id: str, trajectory_id: str) -> None:
        """Nobody will say any more how a trajectory ended whose group was complete."""
        self.unseen += 1
        self._part(query_id, trajectory_id)

    def _part(self, query_id: str, trajectory_id: str) -> None:
        if (parting := self._parting.get(query_id)) is None:
            return
        members, running = parting
        running.discard(trajectory_id)
        if not running or self._completed[query_id] >= members:
            del self._parting[query_id]
            self._changed.set()

    def _tell(self, event: ro.TrajectoryEvent) -> None:
        self.told += 1
        self._completed[event.query_id] += event.state == pb.TRAJECTORY_STATE_COMPLETED
        try:
            self._on_end(event)
        except TroupeError as error:
            self.fail(error)

    def end_unseen(self, trajectory_id: str) -> None:
        """A trajectory has ended, and how is not known here."""
        self.remove((trajectory_id,))
        self.unseen += 1

    def fail(self, error: TroupeError) -> None:
        """A fault of the job, not of a worker."""
        self._fault = error
        self._changed.set()

    async def ended(self) -> Collection[str]:
        """What has ended although nobody said so, as far as the store can be asked."""
        if self._ask is None:
            return ()
        try:
            return await self._ask()
        except TroupeError:
            return ()  # running one twice is safe: the store takes the first ending only

    async def finished(self, describe: Callable[[], str]) -> None:
        """Return when all trajectories have ended, what ended is known, and none can be added.

        Raises `TroupeError`: a fault of the job, or the deadline with what `describe` says.
        """
        while True:
            if self._fault is not None:
                raise self._fault
            if self._sealed and not self._open and not self._parting:
                return
            self._changed.clear()
            try:
                await self.patience.wait(self._changed.wait())
            except TroupeError:
                self.patience.say(describe())
                raise self.patience.exhausted() from None


@dataclass
class Flight:
    """A trajectory that has not ended, and whose it is."""

    batch: Batch
    ticket: ro.Ticket
