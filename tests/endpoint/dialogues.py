"""A workflow whose body is in the test that runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

TOOLS: Any = None
"""Those of the trajectory that runs."""
ACT: Callable[[Any, Any], Awaitable[dict[str, float]]] | None = None


async def acts(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    global TOOLS
    assert ACT is not None
    TOOLS = tools
    return await ACT(query, agents)
