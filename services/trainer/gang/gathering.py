"""Collectives over whole models: tensors that all ranks gather, or that one rank deals out.

Every rank takes part in each of these collectives, but only one has work between them: it writes a
tensor, sends it to a server, or reads the next one from a disk. NCCL counts the timeout of a
collective from the moment at which a rank enqueues it, and a rank without work would enqueue all of
them at once: its watchdog would end the gang while the busy rank still writes. So ranks meet after
every bucket (`in_lockstep`), and until then wait as long as its bytes may take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch.distributed.tensor import DTensor

from troupe.checkpoints.format import Conversion, Read

if TYPE_CHECKING:
    from services.trainer.gang.group import GangGroup

T = TypeVar("T")
# Bytes after which ranks meet: so far may one be ahead of another, and by one more tensor.
BUCKET_BYTES: Final = 256 << 20


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor of a DTensor on all ranks; a collective that all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a whole tensor, of which this rank may have a shard."""
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def in_lockstep(
    group: GangGroup, items: Sequence[T], nbytes: Callable[[T], int]
) -> Iterator[Iterator[T]]:
    """Enter a context of all ranks with an iterator over `items`, equal on all of them. No rank
    takes an item that is more than a bucket ahead of another rank's. `nbytes`: bytes of an item.
    """
    largest = max(map(nbytes, items), default=0)
    with group.waiting_for(BUCKET_BYTES + largest):
        yield _in_lockstep(group, items, nbytes)


def _in_lockstep(
    group: GangGroup, items: Sequence[T], nbytes: Callable[[T], int]
) -> Generator[T, None, None]:
    ahead = 0
    for item in items:
        yield item
        ahead += nbytes(item)
        if ahead >= BUCKET_BYTES:
            group.meet()
            ahead = 0


@contextlib.contextmanager
def gathered(
    group: GangGroup, conversions: Sequence[Conversion], part: Read
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Enter a context of all ranks with an iterator over the tensors that `conversions` make of
    whole ones, on this rank's device, for the rank that needs them. `part`: this rank's part of a
    tensor.

    One conversion is in memory at a time. At the end, also of a body that failed, this rank takes
    part in gathering what is left.
    """
    with in_lockstep(group, conversions, _nbytes) as left:
        named = _converted(left, part)
        try:
            yield named
        finally:
            named.close()
            for one in left:
                for name in one.sources:
                    whole(part(name))


def _converted(
    left: Iterator[Conversion], part: Read
) -> Generator[tuple[str, torch.Tensor], None, None]:
    for one in left:
        sources = {name: whole(part(name)) for name in one.sources}
        yield from one.convert(sources.__getitem__).items()


def _nbytes(one: Conversion) -> int:
    """Bytes of the whole tensors that a conversion makes."""
    return sum(map(nbytes_of, one.layout.values()))
