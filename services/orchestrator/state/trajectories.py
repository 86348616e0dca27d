"""The newest trajectories of a job, kept in Redis for inspection."""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from services.orchestrator.state.records import not_a_page
from services.orchestrator.state.redis import TRAJECTORY_KINDS, JobKeys, RedisAccess
from troupe.contracts import metric_names
from troupe.rpc import NotFound
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

# Bytes below which trajectories are not compressed, and compressed bytes above which messages are
# cut.
_COMPRESS_BYTES: Final = 16 * 2**10
_LARGEST_BYTES: Final = 256 * 2**10
_CLIP_CHARS: Final = 1000
_PLAIN, _COMPRESSED = b"p", b"z"
# Average number of turns per trajectory whose trained tokens are kept.
_TURNS_WITH_TOKENS: Final = 16


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


def repeat_shared(turns: Sequence[rollout_pb.Turn]) -> None:
    """Give every turn all messages of its prompt, including messages of earlier turns."""
    whole: dict[int, rollout_pb.Turn] = {}
    for turn in turns:
        if turn.shared_messages and turn.shared_turn in whole:
            shared = whole[turn.shared_turn].messages[: turn.shared_messages]
            own = list(turn.messages)
            del turn.messages[:]
            turn.messages.extend([*shared, *own])
        turn.ClearField("shared_turn")
        turn.ClearField("shared_messages")
        whole[turn.turn] = turn


def pack(full: orchestrator_pb.GetTrajectoryResponse) -> bytes:
    """Pack a trajectory for storage. Long ones are compressed; if still too large, long messages
    lose their middle."""
    data = full.SerializeToString()
    if len(data) < _COMPRESS_BYTES:
        return _PLAIN + data
    packed = zlib.compress(data, 1)
    if len(packed) > _LARGEST_BYTES:
        shorter = orchestrator_pb.GetTrajectoryResponse()
        shorter.CopyFrom(full)
        for turn in shorter.turns:
            turn.response = _clip(turn.response)
            for message in turn.messages:
                message.content = _clip(message.content)
        packed = zlib.compress(shorter.SerializeToString(), 1)
    return _COMPRESSED + packed


def unpack(stored: bytes) -> orchestrator_pb.GetTrajectoryResponse:
    """Unpack a trajectory from `pack`."""
    data = stored[1:] if stored[:1] == _PLAIN else zlib.decompress(stored[1:])
    return orchestrator_pb.GetTrajectoryResponse.FromString(data)


def _clip(text: str) -> str:
    if len(text) <= 2 * _CLIP_CHARS:
        return text
    left_out = len(text) - 2 * _CLIP_CHARS
    return f"{text[:_CLIP_CHARS]}\n[... {left_out:,} characters ...]\n{text[-_CLIP_CHARS:]}"


class RecentTrajectories:
    """The newest `cap` trajectories per job and kind (training, evaluation, matches), and the
    tokens of the newest `tokens_cap` trajectories with tokens."""

    def __init__(self, redis: RedisAccess, cap: int, tokens_cap: int) -> None:
        self._redis = redis
        self._cap = cap
        self._tokens_cap = tokens_cap

    def buffer(self, job_id: str, step: int, kind: str) -> TrajectoryBuffer:
        """Return a buffer for the ended trajectories of one step, evaluation or round of matches;
        `kind` is one of `TRAJECTORY_KINDS`."""
        return TrajectoryBuffer(self, job_id, step, kind, self._cap)

    async def keep(
        self, job_id: str, kind: str, found: list[orchestrator_pb.GetTrajectoryResponse]
    ) -> None:
        """Store trajectories, oldest first, and drop the oldest ones beyond the cap."""
        if not found:
            return
        # In a thread: compressing long ones takes a while.
        tokens = await asyncio.to_thread(lambda: [take_tokens(one) for one in found])
        packed = await asyncio.to_thread(lambda: [pack(one) for one in found])
        ids = [one.summary.trajectory_id for one in found]
        told = [one.summary.SerializeToString() for one in found]
        await self._keep(job_id, kind, self._cap, zip(ids, told, packed, strict=True))
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

    async def page(
        self, job_id: str, size: int, token: str, wanted: TrajectoryFilter | None = None
    ) -> tuple[list[orchestrator_pb.TrajectorySummary], str]:
        """Return up to `size` summaries, newest first, after the trajectory `token`; the next
        token."""
        listed: list[orchestrator_pb.TrajectorySummary] = []
        full: dict[str, str] = {}
        for kind in TRAJECTORY_KINDS:
            order, summaries, _ = JobKeys(job_id).trajectories(kind)
            ids = await self._redis.call("LRANGE", order, 0, -1)
            if ids:
                found = await self._redis.call("HMGET", summaries, *reversed(ids))
                summaries_ = [
                    orchestrator_pb.TrajectorySummary.FromString(one) for one in found if one
                ]
                listed += summaries_
                full |= {one.trajectory_id: kind for one in summaries_}
        # The evaluation after n steps comes before training step n. Sorting is stable.
        listed.sort(key=lambda one: (one.step, not one.evaluation), reverse=True)
        start = 0
        if token:
            at = [n for n, one in enumerate(listed) if one.trajectory_id == token]
            if not at:
                raise not_a_page(token, "is not (or no longer) a page of this list")
            start = at[0] + 1
        if wanted is None or not wanted.given:
            page = listed[start : start + size]
            more = start + size < len(listed)
            return page, page[-1].trajectory_id if page and more else ""
        page = []
        for one in listed[start:]:
            if not wanted.fits(one):
                continue
            if wanted.reads:
                key = JobKeys(job_id).trajectories(full[one.trajectory_id])[2]
                data = await self._redis.call("HGET", key, one.trajectory_id)
                if not data or not await asyncio.to_thread(wanted.reads_in, unpack(data)):
                    continue
            if len(page) == size:
                return page, page[-1].trajectory_id
            page.append(one)
        return page, ""

    async def find(
        self, job_id: str, trajectory_ids: Collection[str]
    ) -> list[orchestrator_pb.GetTrajectoryResponse]:
        """Return the records of kept training trajectories, unordered."""
        if not trajectory_ids:
            return []
        full = JobKeys(job_id).trajectories("train")[2]
        found = await self._redis.call("HMGET", full, *trajectory_ids)
        return [unpack(one) for one in found if one]

    async def get(
        self, job_id: str, trajectory_id: str, *, tokens: bool = False
    ) -> orchestrator_pb.GetTrajectoryResponse:
        """Return one trajectory with its turns, and with `tokens` their tokens if kept. Raises
        `NotFound`."""
        for kind in TRAJECTORY_KINDS:
            full = JobKeys(job_id).trajectories(kind)[2]
            found = await self._redis.call("HGET", full, trajectory_id)
            if found:
                kept = unpack(found)
                # In a thread, since the prompts of many turns are long in total.
                await asyncio.to_thread(repeat_shared, kept.turns)
                if tokens and kept.summary.tokens_kept:
                    await self._add_tokens(job_id, kept)
                return kept
        raise NotFound(
            f"job {job_id} has no such trajectory, or it is older than the newest {self._cap}, or "
            "its conversation was not kept (`logging.trajectories`)",
            field="trajectory_id",
            value=trajectory_id,
            remedy="`ListTrajectories` names the kept trajectories.",
        )

    async def _add_tokens(self, job_id: str, kept: orchestrator_pb.GetTrajectoryResponse) -> None:
        name, keys = kept.summary.trajectory_id, JobKeys(job_id)
        data = await self._redis.call("HGET", keys.trajectories("tokens")[2], name)
        if not data:
            return
        places = [f"{name}/{turn.turn}" for turn in kept.turns]
        reported = await self._redis.call("HMGET", keys.trajectories("trained")[2], *places)
        brought = {turn.turn: turn.tokens for turn in unpack(data).turns}
        for turn, report in zip(kept.turns, reported, strict=True):
            if turn.turn not in brought:
                continue
            turn.tokens.CopyFrom(brought[turn.turn])
            if report:
                trained = orchestrator_pb.TrainedTurn.FromString(zlib.decompress(report))
                turn.tokens.advantages.extend(trained.advantages)
                turn.tokens.ratios.extend(trained.ratios)


def take_tokens(full: orchestrator_pb.GetTrajectoryResponse) -> bytes:
    """Return the tokens of a trajectory as they are stored, taken out of it; empty where it has
    none."""
    found = orchestrator_pb.GetTrajectoryResponse()
    for turn in full.turns:
        if turn.HasField("tokens"):
            found.turns.add(turn=turn.turn, tokens=turn.tokens)
            turn.ClearField("tokens")
    return _COMPRESSED + zlib.compress(found.SerializeToString(), 1) if found.turns else b""


class TrajectoryFilter:
    """Filter of kept trajectories for a request."""

    def __init__(self, request: orchestrator_pb.ListTrajectoriesRequest) -> None:
        self._request = request
        self._text = request.text.casefold()
        self.given = bool(request.text or request.agent or request.reason) or (
            request.HasField("from_step")
            or request.HasField("to_step")
            or request.HasField("min_reward")
            or request.HasField("max_reward")
        )
        # Whether the turns must be read, because the summary is not sufficient.
        self.reads = bool(request.text or request.agent)

    def fits(self, one: orchestrator_pb.TrajectorySummary) -> bool:
        """Return whether a summary matches, as far as it can tell."""
        request = self._request
        if request.reason.casefold() not in one.reason.casefold():
            return False
        if request.HasField("from_step") and one.step < request.from_step:
            return False
        if request.HasField("to_step") and one.step > request.to_step:
            return False
        reward = self._reward(one.rewards)
        least = request.min_reward if request.HasField("min_reward") else None
        most = request.max_reward if request.HasField("max_reward") else None
        if reward is None:
            return least is None and most is None
        return (least is None or reward >= least) and (most is None or reward <= most)

    def reads_in(self, full: orchestrator_pb.GetTrajectoryResponse) -> bool:
        """Return whether a trajectory's turns have the text and the agent."""
        agent, text = self._request.agent, self._text
        acts = {turn.agent for turn in full.turns}.union(full.summary.rewards)
        if agent and agent not in acts:
            return False
        return not text or any(
            text in part.casefold()
            for turn in full.turns
            for part in (turn.response, *(message.content for message in turn.messages))
        )

    def _reward(self, rewards: Mapping[str, float]) -> float | None:
        """Return the reward that bounds are for; None: there is none."""
        if self._request.agent:
            return rewards.get(self._request.agent)
        if metric_names.TEAM in rewards:
            return rewards[metric_names.TEAM]
        return sum(rewards.values()) / len(rewards) if rewards else None


def as_event(kept: orchestrator_pb.GetTrajectoryResponse) -> rollout_pb.TrajectoryEvent:
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
    """Ended trajectories not written yet, at most as many as are kept."""

    def __init__(
        self, recent: RecentTrajectories, job_id: str, step: int, kind: str, cap: int
    ) -> None:
        self._recent = recent
        self._job_id = job_id
        self._step = step
        self._kind = kind
        self._cap = cap
        self._events: OrderedDict[str, rollout_pb.TrajectoryEvent] = OrderedDict()

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Add an ended trajectory if its conversation is kept; others have nothing to show."""
        if event.without_text:
            return
        self._events[event.trajectory_id] = event
        if len(self._events) > self._cap:
            self._events.popitem(last=False)

    async def flush(self) -> None:
        """Write the added trajectories."""
        events, self._events = self._events, OrderedDict()
        found = [
            orchestrator_pb.GetTrajectoryResponse(
                summary=summarize(event, step=self._step, evaluation=self._kind != "train"),
                turns=event.turns,
            )
            for event in events.values()
        ]
        await self._recent.keep(self._job_id, self._kind, found)
