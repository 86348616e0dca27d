"""The kinds of engines that a job may choose: one file per kind, and its line in `KINDS`.

What serves a kind is in the rollout service (`services/rollout/engines/factory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from troupe.job.engines.embedded import EMBEDDED
from troupe.job.engines.kind import EngineKind
from troupe.job.engines.sglang import SGLANG
from troupe.job.engines.vllm import VLLM

KINDS: Final[Mapping[str, EngineKind]] = {kind.name: kind for kind in (EMBEDDED, SGLANG, VLLM)}

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]


def server_kinds() -> str:
    """The kinds that are servers, for messages: "`sglang` or `vllm`"."""
    return " or ".join(f"`{kind.name}`" for kind in KINDS.values() if kind.is_server)


def kinds_with(field: str) -> str:
    """The kinds that read a field of `engine`, for messages."""
    return " or ".join(f"`{k.name}`" for k in KINDS.values() if field not in k.without_effect)
