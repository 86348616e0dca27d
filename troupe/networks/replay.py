"""`Replay`: what an off-policy learner remembers: TorchRL's storage, writer and sampler, and all of
it as flat tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

Tensors = dict[str, torch.Tensor]

# TorchRL tells of every storage that it makes, past whatever its users log with.
logging.getLogger("torchrl").setLevel(logging.WARNING)


class Replay:
    """The last `capacity` items, drawn uniformly with replacement by the generator."""

    def __init__(self, capacity: int, batch: int, generator: torch.Generator) -> None:
        self._capacity, self._batch, self._generator = capacity, batch, generator
        self._buffer = self._empty()

    def __len__(self) -> int:
        return len(self._buffer)

    def extend(self, items: Mapping[str, torch.Tensor]) -> None:
        """Add items, which are the first axis of every tensor; the oldest make room."""
        count = len(next(iter(items.values())))
        # The writer takes no more than fit at once.
        for start in range(max(0, count - self._capacity), count, self._capacity):
            part = {name: tensor[start:] for name, tensor in items.items()}
            self._buffer.extend(TensorDict(part, [count - start]))

    def sample(self) -> Tensors:
        """A batch of items, copied."""
        return dict(self._buffer.sample().items())

    def state(self) -> Tensors:
        """`cursor`, and under `item.` what is remembered, where it is: views, not copies."""
        held = self._buffer.storage[:] if len(self) else TensorDict({}, [0])
        items = {f"item.{name}": tensor for name, tensor in held.items()}
        return {"cursor": torch.tensor(self._buffer.writer.state_dict()["_cursor"]), **items}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Remember what `state` gave."""
        self._buffer = self._empty()
        items = {
            name.removeprefix("item."): tensor
            for name, tensor in state.items()
            if name.startswith("item.")
        }
        if items:
            self.extend(items)
        writer = self._buffer.writer
        writer.load_state_dict(writer.state_dict() | {"_cursor": int(state["cursor"])})

    def _empty(self) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(self._capacity),
            sampler=RandomSampler(),
            batch_size=self._batch,
            generator=self._generator,
        )
