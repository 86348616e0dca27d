"""Events of trajectories that travel together: a message costs more than most events do.

The trajectories of a step tend to end together, and both sides spend about a tenth of a millisecond
on each message of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from troupe.v1 import rollout_pb2 as pb
from troupe.wire import repeated

# Of one message, unless a single event is longer: far below what gRPC takes, and who listens can
# begin with the first while the next is on its way.
_MOST_BYTES: Final = 2**20


def messages(events: Sequence[pb.TrajectoryEvent]) -> Iterator[bytes]:
    """Serialized `TrajectoryEvent`s that hold `events` in their order, as few as may be.

    The events stay as they are: other streams send them, too.
    """
    parts: list[bytes] = []
    size = 0
    for event in events:
        part = event.SerializeToString()
        if parts and size + len(part) > _MOST_BYTES:
            yield _joined(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[bytes]) -> bytes:
    first, *others = parts
    return b"".join((first, *repeated(pb.TrajectoryEvent.TOGETHER_FIELD_NUMBER, others)))
