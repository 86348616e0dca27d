"""The engine that is a vLLM server."""

from __future__ import annotations

from typing import ClassVar

from services.rollout.engines.servers.engine import ServerEngine
from services.rollout.engines.servers.interface import InferenceServer
from services.rollout.engines.vllm.server import VllmServer


class VllmEngine(ServerEngine):
    """Serves a policy with one vLLM server."""

    kind: ClassVar[str] = "vllm"
    server_class: ClassVar[type[InferenceServer]] = VllmServer
