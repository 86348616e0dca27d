"""Newer kernels of attention on GPUs: FlashAttention 3 and 4 in place of torch's own, which is 2.

torch 2.13 calls them from other packages, once they are activated for the process
(`torch.nn.attention.activate_flash_attention_impl`): FlashAttention 3 (Shah et al. 2024, arXiv
2407.08608) on Hopper, 4 on Hopper and Blackwell. The trainer activates one that is installed, if a
trial with the model's heads gives the values and gradients of torch's own; both follow
`torch.use_deterministic_algorithms`, as deterministic jobs need.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Final

import structlog
import torch
from torch.nn import attention

log = structlog.get_logger("troupe.trainer")
# By major compute capability: names in torch and the modules of their packages, the best first.
_KERNELS: Final = {
    9: (("FA3", "flash_attn_interface"), ("FA4", "flash_attn.cute.interface")),
    10: (("FA4", "flash_attn.cute.interface"),),
}
# Largest difference from torch's own kernel in a trial, relative to its norm, in bfloat16.
_TOLERANCE: Final = 1e-2
# Rows of a trial: their queries and keys.
_QUERIES: Final = (5, 100, 64)
_KEYS: Final = (5, 130, 64)


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model's queries and of its keys and values, and their size."""

    queries: int
    keys: int
    size: int

    @classmethod
    def of(cls, model: Any) -> AttentionShape:
        """Return the shape of a Hugging Face model."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(heads, getattr(config, "num_key_value_heads", None) or heads, size)


# Names of kernels that failed in this process.
_failed: Final[set[str]] = set()


def use_flash_attention(model: Any) -> str:
    """Let attention use the newest kernel that is installed and right for `model` on its device;
    return its name, empty for torch's own.

    The choice is the process's: a kernel that fails for one model is used for none.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return ""
    device = parameter.device
    shape, active = AttentionShape.of(model), attention.current_flash_attention_impl()
    major, _ = torch.cuda.get_device_capability(device)
    for name, module in _KERNELS.get(major, ()):
        if name in _failed or not _installed(module):
            continue
        if problem := _problem(name, shape, device):
            _failed.add(name)
            log.warning("an attention kernel is not used", kernel=name, problem=problem)
            continue
        if name != active:
            log.info("attention kernel", kernel=name)
        return name
    return ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # a package that cannot be imported here raises any kind
        return False


def _problem(name: str, shape: AttentionShape, device: torch.device) -> str:
    """Activate a kernel, unless it differs from torch's own or cannot run; return why, else an
    empty text."""
    _restore()
    expected = trial(shape, device)
    try:
        attention.activate_flash_attention_impl(name)
        found = trial(shape, device)
    except Exception as error:  # kernels and their compilers raise any kind
        _restore()
        return f"{type(error).__name__}: {error}"
    for ours, theirs in zip(found, expected, strict=True):
        gap = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        if not gap <= _TOLERANCE:  # also if it is not a number
            _restore()
            return f"differs from torch's own by {gap:.2g} of the norm"
    return ""


def _restore() -> None:
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def trial(shape: AttentionShape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return outputs, and gradients of queries, keys and values, of rows of several lengths."""
    from torch.nn.attention.varlen import varlen_attn

    random = torch.Generator().manual_seed(0)

    def drawn(tokens: tuple[int, ...], heads: int) -> torch.Tensor:
        states = torch.randn((sum(tokens), heads, shape.size), generator=random)
        return states.to(device, torch.bfloat16).requires_grad_()

    def ends(tokens: tuple[int, ...]) -> torch.Tensor:
        found = torch.tensor([0, *tokens]).cumsum(0)
        return found.to(device, torch.int32)

    inputs = drawn(_QUERIES, shape.queries), drawn(_KEYS, shape.keys), drawn(_KEYS, shape.keys)
    output = varlen_attn(
        *inputs,
        ends(_QUERIES),
        ends(_KEYS),
        max(_QUERIES),
        max(_KEYS),
        window_size=(-1, 0),
        enable_gqa=shape.queries != shape.keys,
    )
    assert isinstance(output, torch.Tensor)
    return output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)
