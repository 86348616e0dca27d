"""The conversations that a job keeps for people to read: a log of files in the job's directory.

The orchestrator appends to it (`ConversationLog.append`); it and the command line, without a
cluster, read it. Its size is bounded: the oldest conversations are deleted. Nothing else depends on
it, so a conversation that could not be written costs no training.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from troupe.contracts import metric_names
from troupe.rpc.errors import DataLoss, InvalidArgument, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

Kept = orchestrator_pb.GetTrajectoryResponse

# The folder in a job's directory.
CONVERSATIONS: Final = "conversations"
# Bytes below which a conversation is not compressed, and compressed bytes above which its messages
# are cut.
_COMPRESS_BYTES: Final = 16 * 2**10
_LARGEST_BYTES: Final = 256 * 2**10
_CLIP_CHARS: Final = 1000
_PLAIN, _COMPRESSED = b"p", b"z"
# A log has about so many files, of which the oldest is deleted.
_FILES: Final = 64
# The share of a log's bytes that conversations which stay may take.
_PINNED_SHARE: Final = 8
# Conversations whose texts one page reads to find those with a text or an agent.
_MOST_READ: Final = 1000
_SUFFIX, _PINNED = ".conversations", "first-"
# Magic, bytes of the id, of the summary and of the whole, step, whether it is of an evaluation.
_HEAD: Final = struct.Struct("<4sHIIq?")
_MAGIC: Final = b"TrC1"


class Entry(NamedTuple):
    """The place of a conversation in a file, with the keys that order it in lists."""

    step: int
    evaluation: bool
    trajectory_id: str
    summary: tuple[int, int]
    whole: tuple[int, int]


@dataclass(frozen=True)
class Page:
    """Summaries, newest first, and the token of the next page ("" after the last)."""

    summaries: list[orchestrator_pb.TrajectorySummary]
    token: str


class ConversationLog:
    """The log of one job. Writers and readers may be in several processes.

    A writer appends to files of its own, so a file that a crash left incomplete is never
    continued; readers ignore the incomplete end. Conversations are in the order of steps, and of
    files where their steps overlap.
    """

    def __init__(self, directory: Path, max_bytes: int = 0) -> None:
        """`directory` need not exist. A writer passes the log's bound in bytes."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The files that this writer appends to, of conversations that may be deleted or stay.
        self._open: dict[bool, Path] = {}

    def append(self, found: Sequence[Kept], *, pinned: bool = False) -> None:
        """Write conversations, oldest first, and delete the oldest beyond the bound.

        `pinned` ones stay, as far as they take an eighth of the bound. Raises `OSError`.
        """
        data = b"".join(map(_record, found))
        if not data or not self._max_bytes:
            return
        with self._lock:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if pinned:
                there = sum(self._sizes(pinned=True).values())
                pinned = there + len(data) <= self._max_bytes // _PINNED_SHARE
            path = self._open.get(pinned)
            if path is None:
                path = self._open[pinned] = self._new_file(pinned)
            try:
                size = _append(path, data)
            except OSError:
                # Its end may be incomplete.
                del self._open[pinned]
                raise
            if size >= self._max_bytes // _FILES:
                del self._open[pinned]
                self._make_room()

    def _new_file(self, pinned: bool) -> Path:
        self._make_room()
        # Names sort by age; the process id tells orchestrators apart that begin at once.
        name = f"{_PINNED if pinned else ''}{time.time_ns():020d}-{os.getpid()}{_SUFFIX}"
        return self._directory / name

    def _make_room(self) -> None:
        sizes = self._sizes()
        surplus = sum(sizes.values()) - self._max_bytes
        for path in self._files():
            if surplus <= 0:
                return
            if not path.name.startswith(_PINNED) and path not in self._open.values():
                surplus -= sizes.get(path, 0)
                path.unlink(missing_ok=True)

    def _sizes(self, *, pinned: bool = False) -> dict[Path, int]:
        """Return the bytes of every file, or of those that stay."""
        sizes = {}
        for path in self._files():
            if not pinned or path.name.startswith(_PINNED):
                try:
                    sizes[path] = path.stat().st_size
                except FileNotFoundError:  # deleted by another orchestrator
                    continue
        return sizes

    def delete(self) -> None:
        """Delete the log."""
        with self._lock:
            self._open = {}
            shutil.rmtree(self._directory, ignore_errors=True)

    def page(self, size: int, token: str, wanted: TrajectoryFilter) -> Page:
        """Return up to `size` summaries that match, newest first, after the conversation `token`.

        A page that has read many conversations for a text ends early, with a token. Raises
        `InvalidArgument` for a token that is not in the log.
        """
        found: list[orchestrator_pb.TrajectorySummary] = []
        seen: set[str] = set()
        last, read, begun = "", 0, not token
        for data, entries in self._newest_first():
            for one in entries:
                if one.trajectory_id in seen:  # written again after a restart
                    continue
                seen.add(one.trajectory_id)
                if not begun:
                    begun = one.trajectory_id == token
                    continue
                if len(found) == size or read == _MOST_READ:
                    return Page(found, last)
                last = one.trajectory_id
                if not wanted.in_steps(one.step):
                    continue
                summary = orchestrator_pb.TrajectorySummary.FromString(data[slice(*one.summary)])
                if not wanted.fits(summary):
                    continue
                if wanted.reads:
                    read += 1
                    if not wanted.reads_in(unpack(data[slice(*one.whole)])):
                        continue
                found.append(summary)
        if not begun:
            raise InvalidArgument(
                "is not (or no longer) a page of this list",
                field="page_token",
                value=token,
                remedy="Begin with an empty page_token.",
            )
        return Page(found, "")

    def get(self, trajectory_id: str) -> Kept:
        """Return one conversation; every turn has all messages of its prompt. Raises `NotFound`."""
        for one in self.find([trajectory_id]):
            repeat_shared(one.turns)
            return one
        raise NotFound(
            "the job has no such trajectory, or its conversation was not kept "
            "(`logging.trajectories`) or is older than those that are",
            field="trajectory_id",
            value=trajectory_id,
            remedy="`troupe conversations JOB` lists those that are kept.",
        )

    def find(self, trajectory_ids: Collection[str]) -> list[Kept]:
        """Return the kept ones of these conversations as they were written, unordered."""
        left = set(trajectory_ids)
        found = []
        for data, entries in self._newest_first() if left else ():
            for one in entries:
                if one.trajectory_id in left:
                    left.discard(one.trajectory_id)
                    found.append(unpack(data[slice(*one.whole)]))
            if not left:
                break
        return found

    def _newest_first(self) -> Iterator[tuple[mmap.mmap, list[Entry]]]:
        """Yield the content of each file and its entries."""
        for path in reversed(self._files()):
            try:
                with path.open("rb") as file:
                    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # deleted meanwhile, or still empty
                continue
            with data:
                # The evaluation after n steps comes before training step n. Sorting is stable.
                entries = list(_entries(data))[::-1]
                entries.sort(key=lambda one: (one.step, not one.evaluation), reverse=True)
                yield data, entries

    def _files(self) -> list[Path]:
        """Return all files, the oldest first; those that stay are the oldest."""
        found = self._directory.glob(f"*{_SUFFIX}")
        return sorted(found, key=lambda path: (not path.name.startswith(_PINNED), path.name))


def _record(full: Kept) -> bytes:
    name, summary = full.summary.trajectory_id.encode(), full.summary.SerializeToString()
    whole = pack(full)
    head = _HEAD.pack(
        _MAGIC,
        len(name),
        len(summary),
        len(whole),
        full.summary.step,
        full.summary.evaluation,
    )
    return head + name + summary + whole


def _entries(data: mmap.mmap) -> Iterator[Entry]:
    """Yield the entries of a file up to the first that is incomplete."""
    at, end = 0, len(data)
    while at + _HEAD.size <= end:
        magic, *lengths, step, evaluation = _HEAD.unpack_from(data, at)
        name = at + _HEAD.size
        summary = name + lengths[0]
        whole = summary + lengths[1]
        at = whole + lengths[2]
        if magic != _MAGIC or at > end:
            return
        text = data[name:summary].decode(errors="replace")
        yield Entry(step, evaluation, text, (summary, whole), (whole, at))


def _append(path: Path, data: bytes) -> int:
    """Append to a file that only its owner may read; return its size. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "ab") as file:
        # Not fsynced: after a crash of the machine the newest may be missing.
        file.write(data)
        file.flush()
        return os.fstat(descriptor).st_size


def pack(full: Kept) -> bytes:
    """Pack a trajectory for storage. Long ones are compressed; if still too large, long messages
    lose their middle."""
    data = full.SerializeToString()
    if len(data) < _COMPRESS_BYTES:
        return _PLAIN + data
    packed = zlib.compress(data, 1)
    if len(packed) > _LARGEST_BYTES:
        shorter = Kept()
        shorter.CopyFrom(full)
        for turn in shorter.turns:
            turn.response = _clip(turn.response)
            for message in turn.messages:
                message.content = _clip(message.content)
        packed = zlib.compress(shorter.SerializeToString(), 1)
    return _COMPRESSED + packed


def unpack(stored: bytes) -> Kept:
    """Unpack a trajectory from `pack`. Raises `DataLoss` if it is damaged."""
    try:
        data = stored[1:] if stored[:1] == _PLAIN else zlib.decompress(stored[1:])
        return Kept.FromString(data)
    except Exception as error:
        raise DataLoss(f"a stored conversation is damaged: {error}") from error


def _clip(text: str) -> str:
    if len(text) <= 2 * _CLIP_CHARS:
        return text
    left_out = len(text) - 2 * _CLIP_CHARS
    return f"{text[:_CLIP_CHARS]}\n[... {left_out:,} characters ...]\n{text[-_CLIP_CHARS:]}"


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


class TrajectoryFilter:
    """Filter of kept trajectories for a request."""

    def __init__(self, request: orchestrator_pb.ListTrajectoriesRequest) -> None:
        self._request = request
        self._text = request.text.casefold()
        # Whether the turns must be read, because the summary is not sufficient.
        self.reads = bool(request.text or request.agent)

    def in_steps(self, step: int) -> bool:
        """Return whether trajectories of the step are wanted."""
        request = self._request
        if request.HasField("from_step") and step < request.from_step:
            return False
        return not (request.HasField("to_step") and step > request.to_step)

    def fits(self, one: orchestrator_pb.TrajectorySummary) -> bool:
        """Return whether a summary matches, as far as it can tell."""
        request = self._request
        if request.reason.casefold() not in one.reason.casefold() or not self.in_steps(one.step):
            return False
        if request.HasField("evaluation") and one.evaluation != request.evaluation:
            return False
        if request.failed and one.state == common_pb.TRAJECTORY_STATE_COMPLETED:
            return False
        reward = self._reward(one.rewards)
        least = request.min_reward if request.HasField("min_reward") else None
        most = request.max_reward if request.HasField("max_reward") else None
        if reward is None:
            return least is None and most is None
        return (least is None or reward >= least) and (most is None or reward <= most)

    def reads_in(self, full: Kept) -> bool:
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
