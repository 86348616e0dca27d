"""Threads of a CPU that compute passes side by side, instead of each operator together.

The operators of a small model take tens of microseconds. Split over threads, they spend as long
waiting for each other, some thousand times per pass, and for good while another process has one of
the cores. Passes side by side wait once, when all of them are done.
"""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from services.trainer.learning.samples import Row

# Every member has gradients of its own: of a larger model they would cost more than is gained, and
# its operators are long enough to be split.
_GRADIENT_BYTES: Final = 64 << 20
# Members read the same weights, and take turns with the interpreter.
_MOST: Final = 4

T = TypeVar("T")


class CpuThreads:
    """The caller's thread and others, each with a share of the caller's torch threads."""

    def __init__(self, threads: int) -> None:
        """At least one of `threads` for each member."""
        self.size = min(threads, _MOST)
        self._each = threads // self.size
        self._pool = concurrent.futures.ThreadPoolExecutor(
            max(1, self.size - 1),
            "crew",
            initializer=torch.set_num_threads,
            initargs=(self._each,),
        )

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Results of at most `size` calls, each made by a member. Raises what one of them raised,
        when all have ended."""
        others = [self._pool.submit(call) for call in calls[1:]]
        before = torch.get_num_threads()
        torch.set_num_threads(self._each)
        try:
            first = calls[0]()
        finally:
            torch.set_num_threads(before)
            concurrent.futures.wait(others)
        return [first, *(other.result() for other in others)]


def pays(parameters: Sequence[torch.nn.Parameter], threads: int) -> bool:
    """Whether passes over a model with these parameters are computed side by side."""
    small = sum(p.nbytes for p in parameters) <= _GRADIENT_BYTES
    return threads > 1 and small and all(p.device.type == "cpu" for p in parameters)


def twin(module: Any) -> Any:
    """A second module over the same memory: neither hooks nor gradients of one reach the other."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        own = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = own
    return copy.deepcopy(module, memo)


def dealt(rows: Sequence[Row], members: int) -> list[list[int]]:
    """Indices of the rows of each member, about equally many tokens; none is without rows.

    Rows of one group stay together: what they have in common is computed once. The same rows are
    always dealt alike.
    """
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group or row.sample_id, []).append(i)
    sizes = {name: sum(len(rows[i].ids) for i in found) for name, found in groups.items()}
    hands: list[list[int]] = [[] for _ in range(members)]
    loads = [0] * members
    for name in sorted(groups, key=lambda name: -sizes[name]):
        least = loads.index(min(loads))
        hands[least] += groups[name]
        loads[least] += sizes[name]
    return [sorted(hand) for hand in hands if hand]
