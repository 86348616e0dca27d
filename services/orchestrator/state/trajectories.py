"""The newest trajectories of a job, kept in Redis for inspection."""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from services.orchestrator.state.records import not_a_page
from services.orchestrator.state.redis import TRAJECTORY_KINDS, JobKeys, RedisAccess
from troupe.rpc import NotFound
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro

# Smaller ones are not compressed; messages of those that are larger when compressed are cut.
_COMPRESS_BYTES: Final = 16 * 2**10
_LARGEST_BYTES: Final = 256 * 2**10
_CLIP_CHARS: Final = 1000
_PLAIN, _COMPRESSED = b"p", b"z"


def summarize(event: ro.TrajectoryEvent, *, step: int, evaluation: bool) -> orch.TrajectorySummary:
    """The summary of an ended trajectory for lists."""
    return orch.TrajectorySummary(
        trajectory_id=event.trajectory_id,
        query_id=event.query_id,
        step=step,
        state=event.state,
        reason=event.reason,
        rewards=event.rewards,
        turns=len(event.turns),
        seconds=event.seconds,
        evaluation=evaluation,
    )


def pack(full: orch.GetTrajectoryResponse) -> bytes:
    """A trajectory as it is stored. A long one is compressed, since every turn repeats its history;
    one that is still too large loses the middle of its long messages."""
    data = full.SerializeToString()
    if len(data) < _COMPRESS_BYTES:
        return _PLAIN + data
    packed = zlib.compress(data, 1)
    if len(packed) > _LARGEST_BYTES:
        shorter = orch.GetTrajectoryResponse()
        shorter.CopyFrom(full)
        for turn in shorter.turns:
            turn.response = _clip(turn.response)
            for message in turn.messages:
                message.content = _clip(message.content)
        packed = zlib.compress(shorter.SerializeToString(), 1)
    return _COMPRESSED + packed


def unpack(stored: bytes) -> orch.GetTrajectoryResponse:
    """The trajectory that `pack` packed."""
    data = stored[1:] if stored[:1] == _PLAIN else zlib.decompress(stored[1:])
    return orch.GetTrajectoryResponse.FromString(data)


def _clip(text: str) -> str:
    if len(text) <= 2 * _CLIP_CHARS:
        return text
    left_out = len(text) - 2 * _CLIP_CHARS
    return f"{text[:_CLIP_CHARS]}\n[... {left_out:,} characters ...]\n{text[-_CLIP_CHARS:]}"


class RecentTrajectories:
    """Keeps the newest `cap` trajectories per job and kind: training, evaluation, matches."""

    def __init__(self, redis: RedisAccess, cap: int) -> None:
        self._redis = redis
        self._cap = cap

    def buffer(self, job_id: str, step: int, kind: str) -> TrajectoryBuffer:
        """A buffer for the ended trajectories of one step, evaluation or round of matches; `kind`
        is one of `TRAJECTORY_KINDS`."""
        return TrajectoryBuffer(self, job_id, step, kind, self._cap)

    async def keep(self, job_id: str, kind: str, found: list[orch.GetTrajectoryResponse]) -> None:
        """Stores trajectories, oldest first, and drops the oldest ones beyond the cap."""
        if not found:
            return
        # In a thread: compressing long ones takes a while.
        packed = await asyncio.to_thread(lambda: [pack(one) for one in found])
        args = [
            part
            for one, full in zip(found, packed, strict=True)
            for part in (one.summary.trajectory_id, one.summary.SerializeToString(), full)
        ]
        await self._redis.run_script("keep", JobKeys(job_id).trajectories(kind), [self._cap, *args])

    async def page(
        self, job_id: str, size: int, token: str
    ) -> tuple[list[orch.TrajectorySummary], str]:
        """Up to `size` summaries, newest first, after the trajectory `token`; the next token."""
        listed: list[orch.TrajectorySummary] = []
        for kind in TRAJECTORY_KINDS:
            order, summaries, _ = JobKeys(job_id).trajectories(kind)
            ids = await self._redis.call("LRANGE", order, 0, -1)
            if ids:
                found = await self._redis.call("HMGET", summaries, *reversed(ids))
                listed += [orch.TrajectorySummary.FromString(one) for one in found if one]
        # The evaluation after n steps comes before training step n. Sorting is stable.
        listed.sort(key=lambda one: (one.step, not one.evaluation), reverse=True)
        start = 0
        if token:
            at = [n for n, one in enumerate(listed) if one.trajectory_id == token]
            if not at:
                raise not_a_page(token, "is not (or no longer) a page of this list")
            start = at[0] + 1
        page = listed[start : start + size]
        more = start + size < len(listed)
        return page, page[-1].trajectory_id if page and more else ""

    async def find(
        self, job_id: str, trajectory_ids: Collection[str]
    ) -> list[orch.GetTrajectoryResponse]:
        """Records of the training trajectories that are still kept, in no order."""
        if not trajectory_ids:
            return []
        full = JobKeys(job_id).trajectories("train")[2]
        found = await self._redis.call("HMGET", full, *trajectory_ids)
        return [unpack(one) for one in found if one]

    async def get(self, job_id: str, trajectory_id: str) -> orch.GetTrajectoryResponse:
        """One trajectory with its turns. Raises `NotFound`."""
        for kind in TRAJECTORY_KINDS:
            full = JobKeys(job_id).trajectories(kind)[2]
            found = await self._redis.call("HGET", full, trajectory_id)
            if found:
                return unpack(found)
        raise NotFound(
            f"job {job_id} has no such trajectory, or it is older than the newest {self._cap}",
            field="trajectory_id",
            value=trajectory_id,
            remedy="`ListTrajectories` names those that are kept.",
        )


def as_event(kept: orch.GetTrajectoryResponse) -> ro.TrajectoryEvent:
    """The event that ended a kept trajectory, without its metrics."""
    summary = kept.summary
    return ro.TrajectoryEvent(
        query_id=summary.query_id,
        trajectory_id=summary.trajectory_id,
        state=summary.state,
        reason=summary.reason,
        rewards=summary.rewards,
        turns=kept.turns,
        seconds=summary.seconds,
    )


class TrajectoryBuffer:
    """Ended trajectories that are not written yet, at most as many as are kept."""

    def __init__(
        self, recent: RecentTrajectories, job_id: str, step: int, kind: str, cap: int
    ) -> None:
        self._recent = recent
        self._job_id = job_id
        self._step = step
        self._kind = kind
        self._cap = cap
        self._events: OrderedDict[str, ro.TrajectoryEvent] = OrderedDict()

    def add(self, event: ro.TrajectoryEvent) -> None:
        """Adds an ended trajectory."""
        self._events[event.trajectory_id] = event
        if len(self._events) > self._cap:
            self._events.popitem(last=False)

    async def flush(self) -> None:
        """Writes what was added."""
        events, self._events = self._events, OrderedDict()
        found = [
            orch.GetTrajectoryResponse(
                summary=summarize(event, step=self._step, evaluation=self._kind != "train"),
                turns=event.turns,
            )
            for event in events.values()
        ]
        await self._recent.keep(self._job_id, self._kind, found)
