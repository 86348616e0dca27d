"""Random messages of any type, by their descriptors, out of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

NASTY: Final = (
    "",
    " ",
    "x",
    "a\n",
    "\x00",
    "../../etc",
    "a/b",
    "a/b/weights@1",
    "a/b/weights@" + "9" * 30,
    "@",
    "%s{0}",
    "*",
    "}:{",
    "\u202eright to left",
    "\U0001f600" * 200,
    "9" * 5000,
    "-1",
    "1e400",
    "NaN",
    "x" * 100_000,
)
JSON: Final = (
    "",
    "null",
    "{}",
    "[]",
    "1",
    '"x"',
    "NaN",
    "{",
    '{"a": 1e400}',
    '{"a": "\\ud800"}',
    "[" * 10_000,
    '{"a": ' * 3000 + "1" + "}" * 3000,
    '{"name": 1, "pipeline": []}',
)
_WHOLE: Final = (0, 1, 2, 3, 7, 100, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_REAL: Final = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-320, 1e308, -1e308, float("inf"), float("nan"))
_F = FieldDescriptor
_BOUNDS: Final = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_DEEP: Final = 5


class MessageMaker:
    """Fills messages. `words` are texts that mean something to who gets them, such as ids of jobs
    that there are: with random ones alone every call would end at the first check."""

    def __init__(self, rng: random.Random, words: Sequence[str]) -> None:
        self._rng = rng
        self._words = words

    def fill(self, message: Message, depth: int = 0) -> Message:
        """Set fields of `message`, and return it."""
        filled = 0.75 if depth == 0 else 0.5
        for field in message.DESCRIPTOR.fields:
            if depth < _DEEP and self._rng.random() < filled:
                self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._set_map(target, field.message_type.fields_by_name, depth)
        elif field.is_repeated:
            for _ in range(self._rng.choice((0, 1, 1, 2, 3))):
                if field.message_type is None:
                    target.append(self._value(field))
                else:
                    self.fill(target.add(), depth + 1)
        elif isinstance(target, Timestamp):
            target.seconds = self._rng.choice((0, 1, 2_000_000_000, -(2**40), 2**62))
            target.nanos = self._rng.choice((0, 1, -1, 2**31 - 1))
        elif isinstance(target, Message):
            target.SetInParent()
            self.fill(target, depth + 1)
        else:
            setattr(message, field.name, self._value(field))

    def _set_map(self, target: Any, fields: Any, depth: int) -> None:
        for _ in range(self._rng.choice((0, 1, 2))):
            key = self._value(fields["key"])
            if fields["value"].message_type is not None:
                self.fill(target[key], depth + 1)
            else:
                target[key] = self._value(fields["value"])

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.cpp_type == _F.CPPTYPE_STRING and field.type == _F.TYPE_BYTES:
            return rng.choice((b"", b"\x00", rng.randbytes(8), rng.randbytes(4096)))
        if field.cpp_type == _F.CPPTYPE_STRING:
            if field.name.endswith("_json") and rng.random() < 0.8:
                return rng.choice(JSON)
            return rng.choice(self._words if rng.random() < 0.7 else NASTY)
        if field.cpp_type == _F.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if field.cpp_type == _F.CPPTYPE_ENUM:
            known = [one.number for one in field.enum_type.values]
            return rng.choice([*known, 99, -1])
        if field.cpp_type in (_F.CPPTYPE_DOUBLE, _F.CPPTYPE_FLOAT):
            return rng.choice(_REAL)
        low, high = _BOUNDS[field.cpp_type]
        number = rng.choice(_WHOLE) * rng.choice((1, 1, 1, -1))
        return min(max(number, low), high)
