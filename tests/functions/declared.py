"""Functions as users declare them."""

from __future__ import annotations

from typing import Any, Literal

import troupe

print("what a module prints while it is imported is nobody's answer")


@troupe.reward
def exact(query: dict[str, Any], turns: list[Any], rewards: dict[str, float]) -> float:
    """One for the right word."""
    return float(turns[-1]["response"] == query["data"]["answer"])


@troupe.tool(name="search", version="2", cores=0, timeout_seconds=5, quota="search")
async def look_up(words: str, limit: int = 3, order: Literal["new", "old"] = "new") -> list[str]:
    """Finds pages."""
    return [words] * limit


@troupe.tool(cores=1, max_cores=4, stateful=True, sandbox="bubblewrap")
def edit(files: dict[str, str]) -> None: ...


def undeclared(answer: str) -> float:
    return float(answer == "4")


not_a_function = 3
