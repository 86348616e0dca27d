"""Newer kernels of attention, which no machine without a GPU has: torch's registry of them is real,
kernels and devices are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _registry

from services.trainer.learning.kernels import flash

CUDA = torch.device("cuda", 0)
CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32)


def model(device: torch.device = CUDA) -> Any:
    parameters = [SimpleNamespace(device=device)]
    config = SimpleNamespace(get_text_config=lambda: CONFIG)
    return SimpleNamespace(config=config, parameters=lambda: iter(parameters))


class Kernels:
    """The installed kernels, and the error that a kernel adds to the right values."""

    def __init__(self) -> None:
        self.installed = {"flash_attn_interface"}
        self.error, self.activated, self.trials = 0.0, 0, 0
        self.raises: Exception | None = None

    def activate(self) -> Any:
        self.activated += 1
        if self.raises is not None:
            raise self.raises
        return SimpleNamespace(remove=lambda: None)

    def trial(self, shape: flash.AttentionShape, device: torch.device) -> tuple[torch.Tensor, ...]:
        assert (shape, device) == (flash.AttentionShape(4, 2, 8), CUDA)
        self.trials += 1
        newer = attention.current_flash_attention_impl() is not None
        return (torch.ones(3) + (self.error if newer else 0.0),)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    some = Kernels()
    monkeypatch.setattr(flash, "trial", some.trial)
    monkeypatch.setattr(flash, "_installed", some.installed.__contains__)
    monkeypatch.setattr(flash, "_failed", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", some.activate)
    yield some
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def test_an_installed_kernel_that_agrees_is_activated(kernels: Kernels) -> None:
    assert flash.use_flash_attention(model()) == "FA3"
    assert attention.current_flash_attention_impl() == "FA3"
    assert flash.use_flash_attention(model(torch.device("cpu"))) == ""


def test_torch_has_the_kernels_that_are_asked_for() -> None:
    names = {name for some in flash._KERNELS.values() for name, _ in some}
    assert names <= set(attention.list_flash_attention_impls())


@pytest.mark.parametrize(
    ("changes", "activated"),
    [
        ({"installed": set()}, 0),
        ({"error": 0.1}, 1),
        ({"error": float("nan")}, 1),
        ({"raises": RuntimeError("does not expose FA3 kernels")}, 1),
    ],
)
def test_torchs_own_kernel_stays_where_no_other_is_usable(
    kernels: Kernels, changes: dict[str, Any], activated: int
) -> None:
    """Also for the next model, without another trial."""
    kernels.installed.intersection_update(changes.pop("installed", kernels.installed))
    vars(kernels).update(changes)
    for _ in range(2):
        assert flash.use_flash_attention(model()) == ""
        assert attention.current_flash_attention_impl() is None
    assert kernels.activated == activated
