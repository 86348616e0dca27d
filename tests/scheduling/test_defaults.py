"""Defaults by device and checkpoint."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.defaults import (
    CPU,
    LONGEST_CONTEXT,
    context_of,
    defaults_of,
    floating_type,
)

GIB = 1 << 30
# Drivers' figures for devices that are sold as 24, 40, 80 and 141 GB.
REPORTED = {24: 22.5 * GIB, 40: 39.4 * GIB, 80: 79.2 * GIB, 141: 139.8 * GIB}


@pytest.mark.parametrize(
    ("sold", "tokens", "running"),
    [(24, 4096, 64), (40, 8192, 128), (80, 16_384, 256), (141, 16_384, 512)],
)
def test_a_device_has_the_defaults_of_what_it_was_sold_as(
    sold: int, tokens: int, running: int
) -> None:
    own = defaults_of(int(REPORTED[sold]))
    assert (own.forward_tokens, own.max_running) == (tokens, running)
    assert own.activation_checkpointing
    assert own.turn_seconds == 600


def test_a_cpu_s_defaults_do_not_change() -> None:
    assert defaults_of(None) == CPU
    assert (CPU.forward_tokens, CPU.max_running, CPU.turn_seconds) == (1024, 64, 120)
    assert not CPU.activation_checkpointing
    # Wide models keep a CPU as busy with half of the tokens; a GPU's are of its memory.
    assert [CPU.tokens_of(hidden) for hidden in (0, 64, 511, 512, 4096)] == [1024] * 3 + [512] * 2
    gpu = defaults_of(80 * GIB)
    assert gpu.tokens_of(4096) == gpu.forward_tokens


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_more_memory_never_means_less(one: int, other: int) -> None:
    less, more = sorted((one, other))
    pairs = zip(asdict(defaults_of(less)).values(), asdict(defaults_of(more)).values(), strict=True)
    assert all(small <= large for small, large in pairs)


@given(st.none() | st.integers(16, 1 << 24), st.integers(0, 1 << 24), st.integers(2048, 1 << 24))
def test_a_context_is_within_the_model_and_by_default_within_bounds(
    asked: int | None, positions: int, room: int
) -> None:
    found = context_of(asked, positions, room)
    assert found > 0 or not positions
    if positions:
        assert found <= positions
    if asked is None:
        assert found == min(room, LONGEST_CONTEXT, positions or room)
    else:
        assert found == min(asked, positions or asked)


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float16", "bfloat16"),
        ("torch.float32", "float32"),
        ("float64", "float32"),
        ("None", "float32"),
    ],
)
def test_weights_are_of_the_checkpoints_type(own: str, found: str) -> None:
    assert floating_type(own) == found
