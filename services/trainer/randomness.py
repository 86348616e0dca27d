"""A policy's random generators, as tensors.

A process has one set of generators and may train several policies: each policy's own are put in
while it computes, so that what it draws depends neither on its neighbours nor on the order in
which they came. Nothing in a step draws today (dropout is off). They are kept with the training
state all the same, so that a resumed policy goes on exactly where it was whatever a model draws
one day.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

Generators = dict[str, torch.Tensor]
# What they are called.
NAMES = frozenset({"torch", "numpy", "numpy_gauss", "cuda"})


def capture(device: torch.device) -> Generators:
    """What torch (on the CPU and on `device`) and numpy would draw next; a copy."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numbers = np.concatenate([np.asarray(keys, np.int64), [position, has_gauss]])
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numbers),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(generators: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Inverse of `capture`; generators that are not in it stay as they are."""
    if "torch" in generators:
        torch.set_rng_state(generators["torch"])
    if "numpy" in generators:
        numbers = generators["numpy"].numpy()
        gauss = float(generators["numpy_gauss"])
        keys, (position, has_gauss) = numbers[:-2].astype(np.uint32), map(int, numbers[-2:])
        np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    if "cuda" in generators and device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], device)


def seeded(value: int, device: torch.device) -> Generators:
    """Generators that start from `value`; the process' own stay as they are."""
    before = capture(device)
    try:
        torch.manual_seed(value)
        np.random.seed(value % (1 << 32))
        return capture(device)
    finally:
        restore(before, device)


class Randomness:
    """The generators of one policy: `committed` with its version, and where its step is."""

    def __init__(self, generators: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._device = device
        self.committed: Generators = dict(generators)
        self.now: Generators = dict(generators)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """What is drawn inside comes from this policy's generators. In the compute thread."""
        before = capture(self._device)
        restore(self.now, self._device)
        try:
            yield
        finally:
            self.now = capture(self._device)
            restore(before, self._device)

    def commit(self) -> None:
        """The step that drew was committed."""
        self.committed = self.now

    def rewind(self) -> None:
        """The step that drew is given up: go back to the version's."""
        self.now = self.committed
