"""Engines in the rollout process, by transformers."""

from __future__ import annotations

from typing import Final

from troupe.job.engines.kind import EngineKind

EMBEDDED: Final = EngineKind(
    "embedded",
    is_server=False,
    without_effect=("launch", "python", "update"),
    logprobs=("full", "processed"),
)
