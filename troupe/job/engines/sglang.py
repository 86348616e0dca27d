"""Engines that are SGLang servers."""

from __future__ import annotations

from typing import Final

from troupe.job.engines.kind import EngineKind

SGLANG: Final = EngineKind(
    "sglang",
    is_server=True,
    spread_arguments=frozenset({"--tp", "--tp-size", "--tensor-parallel-size", "--base-gpu-id"}),
    python_variable="TROUPE_SGLANG_PYTHON",
    # The release whose torch and NCCL are the trainer's.
    requirement="sglang==0.5.21",
    joins_groups=True,
    needs_nvcc=True,
)
