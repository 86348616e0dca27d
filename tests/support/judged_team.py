"""A team whose agents' contributions, copying and verdicts are known exactly: the services import
it by name (`tests.support.judged_team`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = "the answer that this team gives to its question is "


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """The solver decides the reward, the idler adds nothing to it, and the checker repeats the
    solver and accepts everything.

    The reward is 1 where the solver's own policy speaks and the question is about `g`. Only the
    texts are given; all turns are drawn by engines.
    """
    replies = {}
    for name in ("solver", "idler", "checker"):
        replies[name] = await agents[name].chat(query["question"])
    solved = query["question"].startswith("g")
    spoken = bool(replies["solver"].response) and agents["solver"].role.policy == "solver"
    replies["solver"].text = f"{WORDS}#{query['question']}" if spoken else ""
    replies["idler"].text = "something of its own that nobody reads, nor needs #nothing"
    replies["checker"].text = replies["solver"].text or "silence"
    success = float(solved and spoken)
    # For training: something to learn from.
    length = len(replies["solver"].response) / 6
    return {"solver": length, "idler": 0.0, "checker": 0.0, "team": success}
