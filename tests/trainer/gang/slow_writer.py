"""A gloo rank of a gang whose rank 0 is slow to write what all ranks gather.

Run as a module with torchrun's variables and the arguments SPEC.json DIRECTORY CASE. The cases:

- `bucket`: ranks meet after every bucket, whose tensors are written well within the gang's timeout;
  all of them are not.
- `ahead`: the same, with a bucket that has room for the whole model.
- `large`: one tensor takes longer to write than the gang's timeout, but not longer than its bytes
  may take.

In the first two, rank 1 gathers as with NCCL: a collective is enqueued without waiting for others,
and a watchdog ends the process when one is not over within the timeout since then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.gang import gathering, group, rank_learner
from services.trainer.gang.group import GangGroup
from tests.trainer.gang.ranks import join_ranks
from troupe.job import JobSpec

# How long ranks wait for one another; how long rank 0 takes to write a tensor, or the large one.
TIMEOUT, TENSOR, LARGE = 20.0, 1.2, 25.0
ENDED_BY_WATCHDOG = 6


class Stream:
    """A stream of collectives, and NCCL's watchdog over them."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._call, self._thread = call, ThreadPoolExecutor(1)
        self._enqueued: list[tuple[Future[torch.Tensor], float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def enqueue(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return before the tensor is whole; this rank does not look at it."""
        self._enqueued.append((self._thread.submit(self._call, tensor), time.monotonic()))
        return tensor

    def _watch(self) -> None:
        while True:
            time.sleep(0.05)
            for future, began in list(self._enqueued):
                if not future.done() and time.monotonic() - began > TIMEOUT:
                    os._exit(ENDED_BY_WATCHDOG)


def slow_file(case: str) -> Any:
    write_file = rank_learner.safetensors_file  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def opened(*arguments: Any) -> Iterator[Any]:
        with write_file(*arguments) as write:
            written = 0

            def slow(name: str, tensor: torch.Tensor) -> Any:
                nonlocal written
                written += 1
                seconds = TENSOR if case != "large" else LARGE if written == 3 else 0.0
                time.sleep(seconds)
                return write(name, tensor)

            yield slow

    return opened


def main() -> None:
    """Gather the published tensors; rank 0 prints how many seconds that took."""
    spec = JobSpec.model_validate_json(Path(sys.argv[1]).read_text())
    directory, case = Path(sys.argv[2]), sys.argv[3]
    mesh, control = join_ranks()
    ranks = GangGroup(mesh, control, lambda: False, Path(), timeout_seconds=TIMEOUT)
    policy = rank_learner.RankLearner(spec, "solver", ranks, torch.device("cpu"))
    changed: Any = gathering
    # Every second or third tensor of the small model.
    changed.BUCKET_BYTES = 1 << 40 if case == "ahead" else 1 << 14
    if case == "large":
        # Its few bytes may take a minute on such a disk.
        fields: Any = group
        fields.SLOWEST_BYTES_PER_SECOND = 100
    elif dist.get_rank():
        changed.whole = Stream(gathering.whole).enqueue
    ranks._set_limit()
    ranks.meet()
    rank_learner.safetensors_file = slow_file(case)  # type: ignore[attr-defined]
    began = time.monotonic()
    policy.gather("published", directory / "file" if dist.get_rank() == 0 else None)
    with ranks.waiting_for(100 * group.SLOWEST_BYTES_PER_SECOND):
        ranks.meet()
    if dist.get_rank() == 0:
        print(time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
