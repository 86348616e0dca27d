"""Rows read where they lie, in the bytes that came.

A row is tens of kilobytes of tokens and some hundred bytes that the store must know. Parsing it as
a message copies all of it, twice where lengths are asked for, and takes longer than all of this.
Only what protobuf writes for a row with nothing unusual in it is known here; whatever else there is
(user-defined columns, fields in another order, names that are long or not ASCII, anything wrong) is
left to the parser.
"""

from __future__ import annotations

import functools
import math
from typing import Final

from google.protobuf.message import DecodeError

from services.experience_store.records import Payload, Row
from services.experience_store.requests import ROW_BYTES
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.wire import repeated, tag, varint

_Sample = store_pb.Sample

# All names of a row, and what stands around them.
_NAMES_BYTES: Final = 512
# What may come behind the tokens, and how long that is at most.
_BEHIND: Final = frozenset(
    {
        "versions",
        "reward",
        "finish_reason",
        "temperature",
        "chain",
        "own_reward",
        "earned",
        "final_reward",
    }
)
_BEHIND_BYTES: Final = 256
# Lengths up to here are one byte.
_SHORT: Final = 0x7F

_SAMPLE, _POLICY, _AGENT, _GROUP, _PROMPT, _RESPONSE, _LOGPROBS = (
    tag(number)[0]
    for number in (
        _Sample.SAMPLE_ID_FIELD_NUMBER,
        _Sample.POLICY_FIELD_NUMBER,
        _Sample.AGENT_FIELD_NUMBER,
        _Sample.GROUP_ID_FIELD_NUMBER,
        _Sample.PROMPT_IDS_FIELD_NUMBER,
        _Sample.RESPONSE_IDS_FIELD_NUMBER,
        _Sample.LOGPROBS_FIELD_NUMBER,
    )
)
_TURN: Final = _Sample.TURN_FIELD_NUMBER << 3
_CHECKSUM: Final = pb.Tensor.CHECKSUM_FIELD_NUMBER << 3 | 1
_CHECKSUM_BYTES: Final = 9
# A tensor's field number and its size, at most; everything in them follows from the size.
_SIZE_BYTES: Final = 6
# What stands before its elements, at most.
_LONGEST_BEGIN: Final = 16


class PlainRows:
    """Reads the rows of one ending."""

    def __init__(self, query: str, trajectory: str) -> None:
        self._query = query.encode()
        self._trajectory = trajectory.encode()
        # In every row, whatever its turn.
        self._ids = b"".join(
            (
                *repeated(_Sample.QUERY_ID_FIELD_NUMBER, [self._query]),
                *repeated(_Sample.TRAJECTORY_ID_FIELD_NUMBER, [self._trajectory]),
            )
        )

    def read(self, payload: Payload) -> Row | None:
        """The row that `payload` is, if nothing is wrong with it and nothing unusual in it."""
        try:
            return self._read(memoryview(payload))
        except (IndexError, UnicodeDecodeError, DecodeError):
            return None

    def _read(self, payload: memoryview) -> Row | None:
        names = bytes(payload[:_NAMES_BYTES])
        if len(payload) > ROW_BYTES:
            return None
        sample, at = _name(names, 0, _SAMPLE)
        policy, at = _name(names, at, _POLICY)
        if not names.startswith(self._ids, at):
            return None
        agent, at = _name(names, at + len(self._ids), _AGENT)
        turn = 0
        if names[at] == _TURN:
            turn, at = names[at + 1], at + 2
            if turn > _SHORT:
                if names[at] > _SHORT:
                    return None
                turn, at = turn & _SHORT | names[at] << 7, at + 1
        group, at = _name(names, at, _GROUP)
        if sample != b"%b_%d_%b" % (self._query, turn, self._trajectory):
            return None
        prompt, at = _vector(payload, at, _PROMPT, pb.DTYPE_INT32)
        response, at = _vector(payload, at, _RESPONSE, pb.DTYPE_INT32)
        logprobs, at = _vector(payload, at, _LOGPROBS, pb.DTYPE_FLOAT32)
        if logprobs != response or len(payload) - at > _BEHIND_BYTES:
            return None
        behind = _behind(bytes(payload[at:]))
        who, role = agent.decode("ascii"), group.decode("ascii")
        if behind is None or not (who.isprintable() and role.isprintable()):
            return None
        version, reward = behind
        return Row(
            sample.decode("ascii"),
            policy.decode("ascii"),
            payload,
            prompt + response,
            turn,
            who,
            role,
            reward,
            (),
            version,
        )


def _name(names: bytes, at: int, field: int) -> tuple[bytes, int]:
    """A name that is not empty, and where it ends. Raises `IndexError` for anything else."""
    size = names[at + 1]
    end = at + 2 + size
    if names[at] != field or not 0 < size <= _SHORT or end >= len(names):
        raise IndexError
    return names[at + 2 : end], end


def _vector(payload: memoryview, at: int, field: int, dtype: pb.Dtype.ValueType) -> tuple[int, int]:
    """Elements of a tensor of one dimension, and where it ends. Raises `IndexError` for anything
    else.
    """
    elements, begin, size = _begin(bytes(payload[at : at + _SIZE_BYTES]), field, dtype)
    end = at + size
    if (
        end > len(payload)
        or bytes(payload[at : at + len(begin)]) != begin
        or payload[end - _CHECKSUM_BYTES] != _CHECKSUM
    ):
        raise IndexError
    return elements, end


@functools.lru_cache(maxsize=4096)
def _begin(text: bytes, field: int, dtype: pb.Dtype.ValueType) -> tuple[int, bytes, int]:
    """Of a vector in field `field` that begins with `text`: how many elements it has, of four bytes
    each, what stands before them, and how long all of it is. Raises `IndexError` where no vector
    begins so.
    """
    size, start = 0, 1
    while True:
        byte = text[start]
        size |= (byte & _SHORT) << 7 * (start - 1)
        start += 1
        if byte <= _SHORT:
            break
    # Each element more makes it longer.
    elements = max(1, (size - _LONGEST_BEGIN - _CHECKSUM_BYTES) // 4)
    while True:
        shape = varint(elements)
        begin = b"".join(
            (
                varint(pb.Tensor.DTYPE_FIELD_NUMBER << 3),
                varint(dtype),
                *repeated(pb.Tensor.SHAPE_FIELD_NUMBER, [shape]),
                tag(pb.Tensor.DATA_FIELD_NUMBER),
                varint(4 * elements),
            )
        )
        found = len(begin) + 4 * elements + _CHECKSUM_BYTES
        if found == size:
            return elements, bytes((field,)) + varint(size) + begin, start + size
        if found > size:
            raise IndexError
        elements += 1


@functools.lru_cache(maxsize=4096)
def _behind(text: bytes) -> tuple[str, float | None] | None:
    """Oldest version and reward of a sample whose last fields are `text`; rows of one job end in
    few different ways. None if there is anything else in it. Raises `DecodeError`.
    """
    sample = _Sample.FromString(text)
    reward = sample.reward if sample.HasField("reward") else None
    versions = [span.version for span in sample.versions]
    if (
        not {field.name for field, _ in sample.ListFields()} <= _BEHIND
        or (reward is not None and not math.isfinite(reward))
        or min(versions, default=0) < 0
    ):
        return None
    return (str(min(versions)) if versions else ""), reward
