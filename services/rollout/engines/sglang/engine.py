"""The engine that is an SGLang server."""

from __future__ import annotations

from typing import ClassVar

from services.rollout.engines.servers.engine import ServerEngine
from services.rollout.engines.servers.interface import InferenceServer
from services.rollout.engines.sglang.server import SglangServer


class SglangEngine(ServerEngine):
    """Serves a policy with one SGLang server."""

    kind: ClassVar[str] = "sglang"
    server_class: ClassVar[type[InferenceServer]] = SglangServer
