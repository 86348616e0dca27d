"""Interface of a learner to the other ranks of its gang; by default there is one rank.

A learner that is not sharded computes all rows of a micro-batch. A rank of a gang (gang/group.py)
computes its share of the rows and takes part in every pass of the other ranks, which need its shard
of the weights. So all ranks make the same number of passes, and stop together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

import torch

from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.packing import PackedBatch, Slices

S = TypeVar("S")
T = TypeVar("T")
# Why a gradient cannot be used, on ranks whose own could.
ELSEWHERE: Final = "the loss of a micro-batch cannot be used on another rank of the gang"


class Stopped(Exception):
    """Raised when a step is given up while its passes are computed."""


class PassTooLarge(Exception):
    """Raised on all ranks when a pass of one of them ran out of memory."""


# Messages of errors that have no type of their own: torch's allocator on a CPU, cuBLAS.
_NO_MEMORY: Final = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that this process, or its device, has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | PassTooLarge):
        return True
    return isinstance(error, RuntimeError) and any(one in str(error) for one in _NO_MEMORY)


class RankBatches:
    """Iterator over the packed batches of one rank; yields None while only other ranks have more.

    Iteration raises `Stopped` once `stop` is set, and ends once `problem` is set.
    """

    def __init__(self, batches: Sequence[PackedBatch], stop: threading.Event | None) -> None:
        self._left = list(reversed(batches))
        self._stop = stop
        # The reason why the gradients of these batches cannot be used; empty if they can.
        self.problem = ""
        # Whether the pass is one without gradients, for keys and values (`PackedBatch.keeps`). A
        # rank that has no such batch while others do gets None, too.
        self.keeping = False
        # Whether a rank's batch of the pass has payloads. Then every rank gives its model some,
        # if only none (`PackedBatch.payloads`).
        self.seeing = False
        self._losses: torch.Tensor | None = None
        self._last: PackedBatch | None = None

    def note(self, loss: torch.Tensor) -> None:
        """Note the loss of a batch, which is read after the last one: reading waits for the
        device."""
        loss = loss.detach()
        self._losses = loss if self._losses is None else self._losses + loss

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch | None:
        self._settle()
        if self.problem:
            raise StopIteration
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        if not self._left:
            raise StopIteration
        self.keeping = self._left[-1].keeps
        return self._pop()

    def _settle(self) -> None:
        """Finish the last batch: free what no later one reads; after all, read their losses."""
        if self._last is not None:
            self._last.forget()
            self._last = None
        if self._losses is not None and not self._left:
            total, self._losses = self._losses.item(), None
            if not math.isfinite(total):
                self.problem = self.problem or f"the loss of a micro-batch is {total}"

    def _pop(self) -> PackedBatch:
        self._last = self._left.pop()
        return self._last

    def run(self, compute: Callable[[], T], smallest: Callable[[], object]) -> T | None:
        """Return the result of a pass; None if it ran out of memory, which `next` raises on all
        ranks.

        `smallest`: makes a pass over one token, in which this rank joins the collectives that the
        others are still doing.
        """
        try:
            return compute()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
        # Here the error is gone, and with it the tensors that its frames held.
        self._ran_out(message, smallest)
        return None

    def _ran_out(self, message: str, smallest: Callable[[], object]) -> None:
        raise PassTooLarge(message)


class RankGroup:
    """The rank group of a learner that is not sharded: one rank, which computes everything."""

    # Number of ranks.
    size = 1
    # Those that divide the tokens of each pass of this rank; None: it computes rows by itself.
    slices: Slices | None = None
    # Number of replicas of the weights, each with sums of gradients of its own, and this rank's.
    replicas, replica = 1, 0

    def share(self, rows: Sequence[Row]) -> list[int]:
        """Return indices of the rows that this rank computes, of those that all ranks were
        given."""
        return list(range(len(rows)))

    def batches(self, batches: Sequence[PackedBatch], stop: threading.Event | None) -> RankBatches:
        """Make an iterator over `batches`, which contain this rank's rows."""
        return RankBatches(batches, stop)

    def planned(self, make: Callable[[], Sequence[PackedBatch]]) -> Sequence[PackedBatch]:
        """Return the batches that `make` makes for this rank, with the contents of their
        payloads."""
        return make()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `values`, [n] on the CPU."""
        return values

    def summed_over_slices(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values`, [n] on the device, over the ranks that divide this one's
        passes."""
        return values

    def merged(self, sums: S) -> S:
        """Return the fields of `sums` (a dataclass) added up over all ranks."""
        return sums

    def sum_over_replicas(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each tensor over this rank's peers in all replicas, in place."""

    def agreed(self, value: float) -> float:
        """Return the `value` of the first replica, so that all make the same step, bit for bit."""
        return value
