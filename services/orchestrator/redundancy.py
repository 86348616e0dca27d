"""What redundant trajectories cost and bias: who was kept, who was cancelled, what was replaced."""

from __future__ import annotations

from collections import Counter
from typing import Final

from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as ro

# Why the experience store ends trajectories whose group is complete without them.
REDUNDANT: Final = "redundant"


class Redundancy:
    """Counts ended trajectories of a job that starts more per query than count.

    Taking the first to complete favours short ones. By how much, the means say: of the kept ones
    over their whole length, of the cancelled ones as far as they came. Those would have become
    longer: where they are the longer ones already, the bias is at least that.
    """

    def __init__(self, redundant: int) -> None:
        self._redundant = redundant
        self._kept = _Lengths()
        self._cancelled = _Lengths()
        # Cancelled before it began: it has no length.
        self._unstarted = 0
        self._failed: Counter[str] = Counter()

    def add(self, event: ro.TrajectoryEvent) -> None:
        """Count an ended trajectory."""
        if event.state == pb.TRAJECTORY_STATE_COMPLETED:
            self._kept.add(event)
        elif event.state == pb.TRAJECTORY_STATE_FAILED:
            self._failed[event.query_id] += 1
        elif event.reason.partition(":")[0] == REDUNDANT:
            if event.seconds > 0:
                self._cancelled.add(event)
            else:
                self._unstarted += 1

    def values(self) -> dict[str, float]:
        """Metrics, `redundancy/...`; none where nothing is redundant. Lengths are means per
        trajectory: generated tokens, turns, seconds."""
        if not self._redundant:
            return {}
        # A query has so many to spare; what fails beyond that makes its group smaller.
        replaced = sum(min(count, self._redundant) for count in self._failed.values())
        found = {
            "redundancy/cancelled": float(self._cancelled.count + self._unstarted),
            "redundancy/unstarted": float(self._unstarted),
            "redundancy/failures_replaced": float(replaced),
        }
        for name, lengths in (("kept", self._kept), ("cancelled", self._cancelled)):
            if lengths.count:
                found[f"redundancy/{name}_tokens"] = lengths.tokens / lengths.count
                found[f"redundancy/{name}_turns"] = lengths.turns / lengths.count
                found[f"redundancy/{name}_seconds"] = lengths.seconds / lengths.count
        return found


class _Lengths:
    """Sums over trajectories."""

    __slots__ = ("count", "seconds", "tokens", "turns")

    def __init__(self) -> None:
        self.count = self.tokens = self.turns = 0
        self.seconds = 0.0

    def add(self, event: ro.TrajectoryEvent) -> None:
        self.count += 1
        self.tokens += sum(turn.response_tokens for turn in event.turns)
        self.turns += len(event.turns)
        self.seconds += event.seconds
