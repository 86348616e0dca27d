"""One agent writes a function; if the tests fail, another repairs it."""

from __future__ import annotations

import re
from typing import Any

from troupe.workflow import Agents, Query, Tools

_FENCE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


async def solve(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Return each agent's reward: 1 for code that passes all tests."""
    asked = {"role": "user", "content": query["task"]}
    draft = await agents["coder"].chat([asked])
    report = await check(tools, query, draft.text)
    earned = {"coder": passes(report)}
    if not earned["coder"]:
        why = f"The tests fail. {reason(report)}"
        mended = await agents["fixer"].chat(
            [asked, {"role": "assistant", "content": draft.text}, {"role": "user", "content": why}]
        )
        report = await check(tools, query, mended.text)
        earned["fixer"] = passes(report)
    query.log(tests_seconds=report["seconds"], cores=report["cores"])
    return earned | {"team": passes(report)}


async def check(tools: Tools, query: Query, said: str) -> dict[str, Any]:
    """Run the task's tests on the code, isolated from earlier files in the sandbox."""
    fenced = _FENCE.search(said)
    files = {"solution.py": fenced.group(1) if fenced else said, "test_solution.py": query["tests"]}
    report: dict[str, Any] = await tools.call(
        "run_pytest", paths=["test_solution.py"], files=files, seconds=30.0, isolated=True
    )
    return report


def passes(report: dict[str, Any]) -> float:
    """Return 1 if all four tests passed."""
    return float(report["exit_code"] == 0 and report["passed"] == 4)


def reason(report: dict[str, Any]) -> str:
    """Return the last line of the first failure's reason."""
    said: str = report["failures"][0]["message"] if report["failures"] else report["stdout"]
    return (said.strip().splitlines() or [""])[-1][:200]
