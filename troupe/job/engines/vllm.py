"""Engines that are vLLM servers."""

from __future__ import annotations

from typing import Final

from troupe.job.engines.kind import EngineKind

VLLM: Final = EngineKind(
    "vllm",
    is_server=True,
    spread_arguments=frozenset({"-tp", "--tensor-parallel-size"}),
    python_variable="TROUPE_VLLM_PYTHON",
    requirement="vllm==0.32.0",
    logprobs=("processed",),
)
