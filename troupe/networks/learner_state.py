"""`NetworkTrainer`, the base class of learners, and their state as flat named tensors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from troupe.networks.acting import ActingNetwork, check_tensors
from troupe.networks.fragments import Fragment
from troupe.rpc.errors import InvalidArgument

Tensors = dict[str, torch.Tensor]

# TorchRL logs every storage that it makes to its own handlers.
logging.getLogger("torchrl").setLevel(logging.WARNING)


class Replay:
    """A replay buffer of the last `capacity` items, sampled uniformly with replacement."""

    def __init__(self, capacity: int, batch: int, generator: torch.Generator) -> None:
        self._capacity, self._batch, self._generator = capacity, batch, generator
        self._buffer = self._empty()

    def __len__(self) -> int:
        return len(self._buffer)

    def extend(self, items: Mapping[str, torch.Tensor]) -> None:
        """Add items, the first axis of every tensor; the oldest are dropped."""
        count = len(next(iter(items.values())))
        # The writer takes at most `capacity` items at once.
        for start in range(max(0, count - self._capacity), count, self._capacity):
            part = {name: tensor[start:] for name, tensor in items.items()}
            self._buffer.extend(TensorDict(part, [count - start]))

    def sample(self) -> Tensors:
        """Return a batch of items, copied."""
        return dict(self._buffer.sample().items())

    def state(self) -> Tensors:
        """Return `cursor` and the items under `item.`, as views."""
        held = self._buffer.storage[:] if len(self) else TensorDict({}, [0])
        items = {f"item.{name}": tensor for name, tensor in held.items()}
        return {"cursor": torch.tensor(self._buffer.writer.state_dict()["_cursor"]), **items}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state()`."""
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


@dataclass
class LearnerTensors:
    """The parts of a learner that make up its state.

    Names of tensors: `weights.MODULE.*`, `target.NAME.*`, `optimizer.NAME.PARAMETER.*`,
    `random.NAME`, `buffer.*`, `count.NAME`. The weights of a MODULE include its buffers."""

    modules: dict[str, nn.Module]
    """Modules by name."""
    optimizers: dict[str, torch.optim.Adam]
    """Optimizers of the parameters of the module of the same name."""
    generator: torch.Generator
    """Source of all random numbers."""
    targets: dict[str, TensorDictBase] = field(default_factory=dict)
    """Parameters of target networks, as TorchRL's losses hold them."""
    replay: Replay | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def state(self) -> Tensors:
        """Return all tensors by name; only the random state and counts are copies."""
        found = self._fixed()
        if self.replay is not None:
            found |= {f"buffer.{name}": value for name, value in self.replay.state().items()}
        return found

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state()`. Raises InvalidArgument naming the tensor at fault; nothing has
        changed then."""
        own = self._fixed()
        given = {n: tensor for n, tensor in state.items() if not n.startswith("buffer.")}
        check_tensors(own, given, "state", "learner")
        if self.replay is not None and "buffer.cursor" not in state:
            raise InvalidArgument("is missing", field="state", value="buffer.cursor")
        with torch.no_grad():
            for name, tensor in own.items():
                if name.startswith(("weights.", "target.")):
                    tensor.copy_(state[name])
        for key, optimizer in self.optimizers.items():
            for name, parameter in self.modules[key].named_parameters():
                prefix = f"optimizer.{key}.{name}."
                optimizer.state[parameter] = {
                    part: state[prefix + part].clone() for part in ("step", "exp_avg", "exp_avg_sq")
                }
        self.generator.set_state(state["random.generator"].clone())
        for name in self.counts:
            self.counts[name] = int(state[f"count.{name}"])
        if self.replay is not None:
            self.replay.restore(
                {
                    name.removeprefix("buffer."): tensor
                    for name, tensor in state.items()
                    if name.startswith("buffer.")
                }
            )

    def _fixed(self) -> Tensors:
        """Return all tensors except the buffer's; their names and shapes are constant."""
        found: Tensors = {}
        for key, module in self.modules.items():
            found |= {f"weights.{key}.{name}": value for name, value in module.state_dict().items()}
        for key, target in self.targets.items():
            flat = target.data.flatten_keys(".")
            found |= {f"target.{key}.{name}": value for name, value in flat.items()}
        for key, optimizer in self.optimizers.items():
            for name, parameter in self.modules[key].named_parameters():
                held = optimizer.state.get(parameter)
                if not held:  # Adam's state before its first step
                    zeros = torch.zeros_like(parameter)
                    held = {
                        "step": torch.tensor(0.0),
                        "exp_avg": zeros,
                        "exp_avg_sq": zeros.clone(),
                    }
                prefix = f"optimizer.{key}.{name}."
                found |= {prefix + part: held[part] for part in ("step", "exp_avg", "exp_avg_sq")}
        found["random.generator"] = self.generator.get_state()
        found |= {f"count.{name}": torch.tensor(count) for name, count in self.counts.items()}
        return found


class NetworkTrainer(ABC):
    """One policy's networks, optimizers and, off-policy, replay buffer.

    Its updates are a function of `state()` and the following fragments, bit for bit on one kind of
    machine with one number of threads.
    """

    _tensors: LearnerTensors
    _acting: ActingNetwork
    """The network that is published."""

    @abstractmethod
    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """Do one training step on the fragments; on-policy learners use all of them together.

        Returns metrics by name. Raises InvalidArgument for fragments of other agents or spaces;
        nothing has changed then.
        """

    def state(self) -> Tensors:
        """Return the whole state as flat tensors (names: `LearnerTensors`), copied only where
        unavoidable. Names, dtypes and shapes are constant, except for `buffer.*`, which grows."""
        return self._tensors.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state()` exactly. Raises InvalidArgument naming a tensor that is missing or
        does not fit; nothing has changed then."""
        self._tensors.restore(state)

    def published(self) -> Tensors:
        """Return weights for `Actor.load`: copies, by the names of `ActingNetwork`."""
        return {name: value.clone() for name, value in self._acting.state_dict().items()}

    def seed(self, seed: int) -> None:
        """Seed all random numbers of training."""
        self._tensors.generator.manual_seed(seed)
