"""Payloads: content other than text, such as an image, that tokens of a prompt stand for.

A workflow puts a `Payload` among the content parts of a message. In the prompt the tokens that the
policy's engine declares for its kind stand for it (`PayloadKinds`), and from there on it travels
with the token ids (`TokenIds.payloads`): to the engine, into the sample, and to the forward pass of
the trainer, whose model declares the kinds that it takes. Everything between passes payloads on
without looking into them. A payload is known by the hash of its content.

A model of the trainer has the kinds in `payload_kinds`, and its `forward` gets a pass's payloads as
`payloads`. In a gang a rank may get an empty tuple, when only other ranks have payloads in a pass:
the ranks gather the weights of each module together, so the model then runs the modules that only
payloads pass through, such as an encoder of images, on a stand-in that changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from troupe.v1 import experience_store_pb2 as store_pb

# Larger contents and columns go through the transfer layer: Redis' memory is not for values that
# are read once.
INLINE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """A content of some kind, equal to others with the same kind, media type and bytes."""

    kind: str
    """The kind that models and engines declare, such as "image"."""
    media_type: str
    """As in HTTP, such as "image/png"."""
    data: bytes = field(compare=False, repr=False)
    digest: bytes = b""
    """SHA-256 of `data`; computed unless it is given."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.data).digest())


@dataclass(frozen=True, slots=True)
class PlacedPayload:
    """A payload in a sequence: `tokens` tokens from `position` on stand for it."""

    payload: Payload
    position: int
    tokens: int

    def moved(self, by: int) -> PlacedPayload:
        """The same, `by` tokens further on."""
        return PlacedPayload(self.payload, self.position + by, self.tokens)


PayloadKinds: TypeAlias = Mapping[str, Callable[[Payload], Sequence[int]]]
"""The kinds that an engine takes; each with the tokens that stand for a payload in its prompts."""

Marks: TypeAlias = Mapping[str, tuple[Payload, Sequence[int]]]
"""By the text that takes a payload's place until it is tokenised (`mark_of`): the payload, and the
tokens that stand for it."""

Payloads: TypeAlias = tuple[PlacedPayload, ...]


def mark_of(payload: Payload) -> str:
    """Return the text that takes a payload's place in a message. It begins with a character that
    conversations hardly have, and only marks of the conversation's own payloads are read."""
    return f"\x02{payload.kind} {payload.digest.hex()}\x03"


def common_tokens(one: Payloads, other: Payloads, most: int) -> int:
    """Return how many of the first `most` tokens, which are equal in two sequences, have the same
    payloads as well."""
    if one == other:
        return most
    differing = set(one) ^ set(other)
    return min([most, *(placed.position for placed in differing)])


def add_payloads(
    sample: store_pb.Sample, payloads: Payloads, ref_of: Callable[[Payload], str]
) -> None:
    """Add payloads to a sample; `ref_of` gives the transfer key of one that is too large for a
    row."""
    for placed in payloads:
        payload = placed.payload
        large = len(payload.data) > INLINE_BYTES
        sample.payloads.add(
            kind=payload.kind,
            media_type=payload.media_type,
            digest=payload.digest,
            position=placed.position,
            tokens=placed.tokens,
            **({"ref": ref_of(payload)} if large else {"data": payload.data}),
        )


def places_of(messages: Iterable[store_pb.Payload]) -> Payloads:
    """Return the payloads of a sample without their contents."""
    return tuple(
        PlacedPayload(Payload(one.kind, one.media_type, b"", one.digest), one.position, one.tokens)
        for one in messages
    )


def from_protos(
    messages: Iterable[store_pb.Payload], load: Callable[[str], np.ndarray[Any, Any]]
) -> Payloads:
    """Return the payloads of a sample; `load` gets the value behind a reference.

    Raises `DataLoss` of kind "payload_changed" for other bytes than the digest says, and what
    `load` raises.
    """
    found = []
    for message in messages:
        data = load(message.ref).tobytes() if message.HasField("ref") else message.data
        payload = Payload(message.kind, message.media_type, data)
        if payload.digest != message.digest:
            from troupe.rpc.errors import DataLoss  # workflows import this file, and no gRPC

            raise DataLoss(
                f"a payload of kind {message.kind} has other bytes than were appended",
                kind="payload_changed",
                field="payloads",
                value=message.digest.hex(),
            )
        found.append(PlacedPayload(payload, message.position, message.tokens))
    return tuple(found)
