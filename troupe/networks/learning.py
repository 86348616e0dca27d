"""`Learner`: what updates one policy's network on fragments; `make_learner` makes the one that a
specification names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from troupe.networks.fragments import Fragment
from troupe.networks.spec import NetworkSpec
from troupe.networks.vector import Spaces

Tensors = dict[str, torch.Tensor]


class Learner(Protocol):
    """One policy's networks, optimizers and, off-policy, replay buffer.

    All that it will do is a function of `state()` and of the fragments that follow, bit for bit on
    one kind of machine with one number of threads.
    """

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """One step of training on what was committed; on-policy, on all of it together.

        Metrics by name. Raises InvalidArgument for fragments that are not of its agents or spaces;
        then nothing has moved.
        """
        ...

    def state(self) -> Tensors:
        """All of it, flat: `weights.*`, `optimizer.*`, `target.*`, `buffer.*`, `random.*` and
        `count.*`; not copies where it can be avoided. Names and dtypes stay."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on exactly from a `state()`. Raises InvalidArgument naming the tensor that is missing
        or does not fit; then nothing has moved."""
        ...

    def published(self) -> Tensors:
        """What actors load (`Actor.load`): copies, names as in `ActingNetwork`."""
        ...


def make_learner(
    spec: NetworkSpec, spaces: Spaces, agents: Sequence[str], seed: int, policy: str = ""
) -> Learner:
    """The learner of one policy that plays `agents`, its first weights drawn by `seed`.

    Raises InvalidArgument for a paradigm that cannot train on these spaces. Weights are those that
    `Actor` expects of the same arguments.
    """
    raise NotImplementedError
