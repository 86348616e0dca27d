"""The trajectories of jobs that are kept for inspection: their conversations in a log in the job's
directory, and the tokens of the newest in Redis."""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.redis import JobKeys, RedisAccess
from troupe.contracts.conversations import (
    CONVERSATIONS,
    ConversationLog,
    Kept,
    Page,
    TrajectoryFilter,
)
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

# Average number of turns per trajectory whose trained tokens are kept.
_TURNS_WITH_TOKENS: Final = 16
# Ended trajectories with texts that wait to be written, at most; they are written twice a second.
_BUFFERED: Final = 512


def summarize(
    event: rollout_pb.TrajectoryEvent, *, step: int, evaluation: bool
) -> orchestrator_pb.TrajectorySummary:
    """Return the summary of an ended trajectory for lists."""
    return orchestrator_pb.TrajectorySummary(
        trajectory_id=event.trajectory_id,
        query_id=event.query_id,
        step=step,
        state=event.state,
        reason=event.reason,
        rewards=event.rewards,
        turns=len(event.turns),
        seconds=event.seconds,
        evaluation=evaluation,
        tokens_kept=any(turn.HasField("tokens") for turn in event.turns),
    )


class KeptTrajectories:
    """The kept trajectories of all jobs: conversations within `max_bytes` per job, and the tokens
    of the newest `tokens_cap` trajectories with tokens."""

    def __init__(
        self,
        redis: RedisAccess,
        log: EventLog,
        data_dir: Path,
        *,
        max_bytes: int,
        tokens_cap: int,
    ) -> None:
        """Conversations are in the job's directory below `data_dir`."""
        self._redis = redis
        self._log = log
        self._data_dir = data_dir
        self._max_bytes = max_bytes
        self._tokens_cap = tokens_cap
        self._logs: dict[str, ConversationLog] = {}
        # Jobs whose users know that conversations cannot be written.
        self._told: set[str] = set()

    def buffer(self, job_id: str, step: int, kind: str) -> TrajectoryBuffer:
        """Return a buffer for the ended trajectories of one step, evaluation or round of matches;
        `kind` is "train", "evaluate" or "match"."""
        return TrajectoryBuffer(self, job_id, step, kind)

    def _of(self, job_id: str) -> ConversationLog:
        if job_id not in self._logs:
            directory = self._data_dir / job_id / CONVERSATIONS
            self._logs[job_id] = ConversationLog(directory, self._max_bytes)
        return self._logs[job_id]

    async def keep(self, job_id: str, found: list[Kept], *, pinned: bool = False) -> None:
        """Store trajectories, oldest first, and drop the oldest beyond the bound unless `pinned`.

        A log that cannot be written costs the conversations, not the job: users get a notice.
        """
        if not found:
            return
        # In a thread: compressing long ones takes a while.
        tokens = await asyncio.to_thread(lambda: [take_tokens(one) for one in found])
        ids = [one.summary.trajectory_id for one in found]
        try:
            await asyncio.to_thread(self._of(job_id).append, found, pinned=pinned)
            self._told.discard(job_id)
        except OSError as error:
            if job_id not in self._told:
                self._told.add(job_id)
                await self._log.notice(
                    job_id,
                    orchestrator_pb.Notice.SEVERITY_WARNING,
                    f"conversations cannot be kept in {error.filename}: {error.strerror}; training "
                    "goes on without them",
                )
        kept = [(one, b"", data) for one, data in zip(ids, tokens, strict=True) if data]
        await self._keep(job_id, "tokens", self._tokens_cap, kept)

    async def keep_trained(self, request: orchestrator_pb.ReportTrainedTokensRequest) -> None:
        """Store a trainer's values per token, even if the tokens have not arrived."""
        kept = [
            (f"{one.trajectory_id}/{one.turn}", b"", zlib.compress(one.SerializeToString(), 1))
            for one in request.turns
        ]
        cap = self._tokens_cap * _TURNS_WITH_TOKENS
        await self._keep(request.job_id, "trained", cap, kept)

    async def _keep(
        self, job_id: str, kind: str, cap: int, found: Iterable[tuple[str, bytes, bytes]]
    ) -> None:
        args = [part for one in found for part in one]
        if args:
            await self._redis.run_script("keep", JobKeys(job_id).trajectories(kind), [cap, *args])

    async def delete(self, job_id: str) -> None:
        """Delete the conversations of a job. Idempotent."""
        await asyncio.to_thread(self._of(job_id).delete)
        del self._logs[job_id]

    async def page(self, request: orchestrator_pb.ListTrajectoriesRequest, size: int) -> Page:
        """Return up to `size` summaries that match, newest first, after the trajectory that the
        page token names."""
        log, wanted = self._of(request.job_id), TrajectoryFilter(request)
        return await asyncio.to_thread(log.page, size, request.page_token, wanted)

    async def find(self, job_id: str, trajectory_ids: Collection[str]) -> list[Kept]:
        """Return the kept ones of the trajectories, unordered."""
        return await asyncio.to_thread(self._of(job_id).find, trajectory_ids)

    async def get(self, job_id: str, trajectory_id: str, *, tokens: bool = False) -> Kept:
        """Return one trajectory with its turns, and with `tokens` their tokens if kept. Raises
        `NotFound`."""
        kept = await asyncio.to_thread(self._of(job_id).get, trajectory_id)
        if tokens and kept.summary.tokens_kept:
            await self._add_tokens(job_id, kept)
        return kept

    async def _add_tokens(self, job_id: str, kept: Kept) -> None:
        name, keys = kept.summary.trajectory_id, JobKeys(job_id)
        data = await self._redis.call("HGET", keys.trajectories("tokens")[2], name)
        if not data:
            return
        places = [f"{name}/{turn.turn}" for turn in kept.turns]
        reported = await self._redis.call("HMGET", keys.trajectories("trained")[2], *places)
        brought = {turn.turn: turn.tokens for turn in _tokens_of(data).turns}
        for turn, report in zip(kept.turns, reported, strict=True):
            if turn.turn not in brought:
                continue
            turn.tokens.CopyFrom(brought[turn.turn])
            if report:
                trained = orchestrator_pb.TrainedTurn.FromString(zlib.decompress(report))
                turn.tokens.advantages.extend(trained.advantages)
                turn.tokens.ratios.extend(trained.ratios)


def take_tokens(full: Kept) -> bytes:
    """Return the tokens of a trajectory as they are stored, taken out of it; empty where it has
    none."""
    found = Kept()
    for turn in full.turns:
        if turn.HasField("tokens"):
            found.turns.add(turn=turn.turn, tokens=turn.tokens)
            turn.ClearField("tokens")
    return zlib.compress(found.SerializeToString(), 1) if found.turns else b""


def _tokens_of(stored: bytes) -> Kept:
    """Return the turns with tokens from `take_tokens`."""
    return Kept.FromString(zlib.decompress(stored))


def as_event(kept: Kept) -> rollout_pb.TrajectoryEvent:
    """Return the event that ended a kept trajectory, without its metrics."""
    summary = kept.summary
    return rollout_pb.TrajectoryEvent(
        query_id=summary.query_id,
        trajectory_id=summary.trajectory_id,
        state=summary.state,
        reason=summary.reason,
        rewards=summary.rewards,
        turns=kept.turns,
        seconds=summary.seconds,
    )


class TrajectoryBuffer:
    """Ended trajectories not written yet."""

    def __init__(self, kept: KeptTrajectories, job_id: str, step: int, kind: str) -> None:
        self._kept = kept
        self._job_id = job_id
        self._step = step
        self._kind = kind
        self._events: OrderedDict[str, rollout_pb.TrajectoryEvent] = OrderedDict()
        self._writing: asyncio.Task[None] | None = None

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Add an ended trajectory if its conversation is kept; others have nothing to show."""
        if event.without_text:
            return
        self._events[event.trajectory_id] = event
        if len(self._events) > _BUFFERED:
            self._events.popitem(last=False)

    async def flush(self) -> None:
        """Write the added trajectories. They are written even if the caller is cancelled meanwhile;
        the next call waits for them."""
        events, self._events = self._events, OrderedDict()
        if not events and self._writing is None:
            return
        writing = self._writing = asyncio.create_task(self._write(events, self._writing))
        await asyncio.shield(writing)
        if self._writing is writing:
            self._writing = None

    async def _write(
        self,
        events: Mapping[str, rollout_pb.TrajectoryEvent],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        found = [
            Kept(
                summary=summarize(event, step=self._step, evaluation=self._kind != "train"),
                turns=event.turns,
            )
            for event in events.values()
        ]
        # Every later evaluation is compared with the one before the first step.
        first = self._kind == "evaluate" and self._step == 0
        await self._kept.keep(self._job_id, found, pinned=first)
