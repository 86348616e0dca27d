"""The answer to a claim, as the bytes that travel.

Rows are long and kept serialized, and so is the answer: what lies between them is written around
them, and they are not parsed and serialized once more (test_store_delivery.py compares the two).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.experience_store.records import Payload, Record
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.wire import tag, varint

Response = store_pb.ClaimMicroBatchResponse

_SAMPLES: Final = tag(Response.SAMPLES_FIELD_NUMBER)
_SAMPLE: Final = tag(store_pb.ClaimedSample.SAMPLE_FIELD_NUMBER)


@dataclass(frozen=True)
class Delivery:
    """The answer to a claim."""

    outcome: store_pb.ClaimMicroBatchResponse.Outcome.ValueType
    message: bytes
    """A serialized ClaimMicroBatchResponse."""
    samples: int = 0

    @staticmethod
    def of(outcome: store_pb.ClaimMicroBatchResponse.Outcome.ValueType) -> Delivery:
        """One without samples."""
        return Delivery(outcome, Response(outcome=outcome).SerializeToString())

    @staticmethod
    def claimed(
        claim: str, rows: Iterable[tuple[Payload, Record, int]], rewards: Sequence[Sequence[float]]
    ) -> Delivery:
        """Samples: the payload of each, its record, and which of `rewards` are its group's."""
        ends = [
            store_pb.ClaimedSample(group_rewards=values).SerializeToString() for values in rewards
        ]
        outcome = Response.OUTCOME_CLAIMED
        parts: list[Payload] = [Response(outcome=outcome, claim_id=claim).SerializeToString()]
        count = 0
        for payload, record, group in rows:
            # Serialized messages behind one another merge when they are parsed.
            moved, end = record.moved(), ends[group]
            begin = _SAMPLE + varint(len(payload) + len(moved))
            size = len(begin) + len(payload) + len(moved) + len(end)
            parts += (_SAMPLES, varint(size), begin, payload, moved, end)
            count += 1
        return Delivery(outcome, b"".join(parts), count)
