"""Protobuf messages as frozen dataclasses (`Record.of`) and as JSON values (`to_json`).

The message's descriptor drives both: a record names and annotates the fields that it wants, and the
annotations determine how values are converted.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from troupe.rpc.errors import TroupeError

_Read = Callable[[Any], Any]


class Record:
    """Base of frozen dataclasses that are made from messages.

    Each field of the record is read from the message's field of the same name. `id_from` names the
    field that `id` is read from. `part` names a nested message that is searched for the fields that
    the message itself lacks: `class Worker(Record, id_from="worker_id", part="trainer")`. The
    annotation determines how a value is converted:

    - `datetime`, `TroupeError` and other records are made from messages,
    - `str` and `StrEnum` are made from enums, in the form of `word`,
    - `tuple[X, ...]` is made from repeated fields, `dict` from maps,
    - `X | None` is None where the field, or its part, is absent.
    """

    _id_from: ClassVar[str] = "id"
    _part: ClassVar[str] = ""

    def __init_subclass__(cls, id_from: str = "id", part: str = "") -> None:
        cls._id_from = id_from
        cls._part = part

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire; `given` are the fields that are not read from `message`."""
        readers = _readers(cls, type(message))  # type: ignore[arg-type]
        values = {name: read(message) for name, read in readers.items() if name not in given}
        return cls(**values, **given)


@cache
def _readers(kind: Any, message: Any) -> dict[str, _Read]:
    """Return a reader for each field of the record; fields that the message lacks are left out."""
    hints = get_type_hints(kind)
    own = message.DESCRIPTOR.fields_by_name
    part = own[kind._part].message_type.fields_by_name if kind._part else {}
    readers = {}
    for one in fields(kind):
        name = kind._id_from if one.name == "id" else one.name
        if name in own:
            readers[one.name] = _reader("", own[name], hints[one.name])
        elif name in part:
            readers[one.name] = _reader(kind._part, part[name], hints[one.name])
    return readers


def _reader(part: str, field: Any, hint: Any) -> _Read:
    """Return a function that reads `field` of a message, or of the message's field `part`."""
    optional = get_origin(hint) in (Union, types.UnionType)
    convert = _converter(field, get_args(hint)[0] if optional else hint)
    name, has_presence = field.name, field.has_presence

    def read(message: Any) -> Any:
        if part:
            if optional and not message.HasField(part):
                return None
            message = getattr(message, part)
        if optional and has_presence and not message.HasField(name):
            return None
        value = getattr(message, name)
        return value if convert is None else convert(value)

    return read


def _converter(field: Any, hint: Any) -> _Read | None:
    """Return the converter from a value of the field to the annotated type; None: not needed."""
    origin = get_origin(hint)
    if origin is dict:
        values = _values_of_map(field)
        value = None if values is None else _converter(values, get_args(hint)[1])
        if value is None:
            return dict
        return lambda found: {key: value(item) for key, item in found.items()}
    if origin is tuple:
        each = _converter(field, get_args(hint)[0])
        return tuple if each is None else lambda values: tuple(map(each, values))
    if not isinstance(hint, type):
        return None
    if issubclass(hint, Record):
        return hint.of
    if issubclass(hint, datetime):
        return when
    if issubclass(hint, TroupeError):
        return TroupeError.from_problem
    if field.enum_type is not None:
        words = {
            number: word(field.enum_type, number) for number in field.enum_type.values_by_number
        }
        if issubclass(hint, StrEnum):
            return lambda number: hint(words.get(number) or "unspecified")
        return lambda number: words.get(number, "")
    return None


def _values_of_map(field: Any) -> Any:
    """Return the descriptor of a map's values; None if the field is not a map."""
    kind = field.message_type
    is_map = kind is not None and kind.GetOptions().map_entry
    return kind.fields_by_name["value"] if is_map else None


def when(stamp: Timestamp) -> datetime:
    """Return a protobuf timestamp as a datetime in UTC."""
    return stamp.ToDatetime(tzinfo=UTC)


def word(enum: EnumDescriptor, number: int) -> str:
    """Return an enum's value without its prefix, in lower case: "running", "micro_batch".

    The unspecified value, and numbers that only a newer server knows, become "".
    """
    value = enum.values_by_number.get(number)
    if number == 0 or value is None:
        return ""
    prefix: str = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix).lower()


def numbers_by_word(enum: EnumDescriptor) -> dict[str, int]:
    """Return the numbers of an enum by `word`, without the unspecified one."""
    return {word(enum, number): number for number in enum.values_by_number if number}


def to_json(message: Message) -> dict[str, Any]:
    """Return a message as JSON values: proto field names, zeros kept, absent optionals None.

    Enum values become words and 64-bit integers become numbers; protobuf's own JSON mapping offers
    neither.
    """
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if (each := _values_of_map(field)) is not None:
            out[field.name] = {key: _json_value(each, item) for key, item in value.items()}
        elif field.is_repeated:
            out[field.name] = [_json_value(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            out[field.name] = None
        else:
            out[field.name] = _json_value(field, value)
    return out


def _json_value(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return to_json(value)
    if field.enum_type is not None:
        return word(field.enum_type, value) or "unspecified"
    if isinstance(value, bytes):
        return value.hex()
    return value
