"""Data parallelism over CPU threads: each thread computes whole passes over its own rows.

The operators of a small model take tens of microseconds. Split over threads (torch's intra-op
parallelism), they spend as long waiting for each other, a thousand times per pass, and far longer
while another process occupies a core. Passes on separate threads wait only once, at the end.
"""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from services.trainer.learning.samples import Row

# Size limit of models: each thread has its own gradients, which cost more than is gained for a
# larger model, whose operators are long enough for intra-op parallelism.
_GRADIENT_BYTES: Final = 64 << 20
# Maximum threads: they share the memory bandwidth for the weights, and the interpreter lock.
_MOST: Final = 4

T = TypeVar("T")


class CpuThreads:
    """A pool of `size` threads, the caller's included, that share the caller's torch threads."""

    def __init__(self, threads: int) -> None:
        """Divide `threads` torch threads evenly among at most four members."""
        self.size = min(threads, _MOST)
        self._each = threads // self.size
        self._pool = concurrent.futures.ThreadPoolExecutor(
            max(1, self.size - 1),
            "passes",
            initializer=torch.set_num_threads,
            initargs=(self._each,),
        )

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run at most `size` calls, one per thread, and return their results in order.

        Raises, after all have ended, the error of a failed one.
        """
        others = [self._pool.submit(call) for call in calls[1:]]
        before = torch.get_num_threads()
        torch.set_num_threads(self._each)
        try:
            first = calls[0]()
        finally:
            torch.set_num_threads(before)
            concurrent.futures.wait(others)
        return [first, *(other.result() for other in others)]


def worth_splitting(parameters: Sequence[torch.nn.Parameter], threads: int) -> bool:
    """Return whether a model with these parameters trains faster with passes on threads of their
    own."""
    small = sum(p.nbytes for p in parameters) <= _GRADIENT_BYTES
    return threads > 1 and small and all(p.device.type == "cpu" for p in parameters)


def twin(module: Any) -> Any:
    """Return a second module over the same memory, with hooks and gradients of its own."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        own = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = own
    return copy.deepcopy(module, memo)


def split_rows(rows: Sequence[Row], members: int) -> list[list[int]]:
    """Split rows into at most `members` parts of about equally many tokens; return the indices of
    each part.

    Rows of one group stay together, so that their common prefix is computed once. Deterministic.
    No part is empty.
    """
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group or row.sample_id, []).append(i)
    sizes = {name: sum(len(rows[i].ids) for i in found) for name, found in groups.items()}
    parts: list[list[int]] = [[] for _ in range(members)]
    loads = [0] * members
    for name in sorted(groups, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        parts[least] += groups[name]
        loads[least] += sizes[name]
    return [sorted(part) for part in parts if part]
