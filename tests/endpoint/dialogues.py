"""A workflow whose body is in the test that runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

ACT: Callable[[Any, Any], Awaitable[dict[str, float]]] | None = None


async def acts(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    assert ACT is not None
    return await ACT(query, agents)
