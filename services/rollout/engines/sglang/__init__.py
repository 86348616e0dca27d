"""An SGLang server as an engine: over HTTP, launched by us or attached to."""

from services.rollout.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
