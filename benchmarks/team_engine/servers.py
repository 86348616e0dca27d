"""Real servers under a team: one of all roles, next to one per role."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.command import progress, scratch
from benchmarks.team_engine.team import BARE, Placed, Plan, Team, apart, publish_base, updates
from benchmarks.weights import find_sglang


@dataclass(frozen=True)
class Case:
    """A server after its turns. `rates`: by number of turns at once, tokens per second and per CPU
    second of each round."""

    mebibytes: float
    rates: dict[int, list[tuple[float, float]]]

    def tokens(self, turns: int, of: int) -> float:
        """The median rate: per second (0), per CPU second (1)."""
        return statistics.median(one[of] for one in self.rates[turns])


def served(kind: Literal["sglang", "vllm"], plan: Plan, required: bool) -> dict[str, Any]:
    """Return the figures of a kind of server; none if there is no such server here, which ends the
    program if it is `required`."""
    with scratch() as place:
        placed = find(kind, place)
        if placed is None:
            message = f"no {kind}: set TROUPE_{kind.upper()}_PYTHON"
            if required:
                sys.exit(message)
            progress(message)
            return {}
        base = apart(publish_base, plan, place)
        return asyncio.run(_measured(plan, place, base, placed))


def find(kind: Literal["sglang", "vllm"], place: Path) -> Placed | None:
    """Return the interpreter that runs a server, from the slow tests' variables; None: unset."""
    if python := os.environ.get(f"TROUPE_{kind.upper()}_PYTHON"):
        return Placed(kind, str(Path(python).expanduser()))
    if kind == "sglang":
        python = find_sglang(place)
        # SGLang's other backends of LoRA need a GPU.
        return Placed(kind, python, ("--lora-backend", "torch_native")) if python else None
    tool, where = (os.environ.get(f"TROUPE_VLLM_CPU_{name}") for name in ("TOOL", "DIR"))
    if not tool or not where:
        return None
    subprocess.run([tool, "setup", where], check=True, timeout=900, stdout=subprocess.DEVNULL)
    wrapper = place / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec "{where}/bin/python" "$@"\n'
        f'shift 3\nexec "{tool}" serve "{where}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return Placed(kind, str(wrapper))


async def _measured(plan: Plan, place: Path, base: str, placed: Placed) -> dict[str, Any]:
    turns = plan.turns
    bare = (await _case(Team(plan, 0, place, base, placed), [turns]))[0]
    parts = [turns, *(turns // roles for roles in plan.roles)]
    one = (await _case(Team(plan, 1, place, base, placed), parts))[0]
    shared: dict[int, Case] = {}
    under: dict[str, Any] = {}
    for roles in plan.roles:
        team = Team(plan, roles, place, base, placed)
        shared[roles], found = await _case(team, [turns], updated=roles == max(plan.roles))
        under |= found
    return {
        "dtype": plan.dtype,
        "turns": turns,
        "memory_over_one_base": {
            str(k): round(case.mebibytes / bare.mebibytes, 3) for k, case in shared.items()
        },
        "memory_apart": {str(k): round(k * one.mebibytes / bare.mebibytes, 3) for k in plan.roles},
        "memory_mib": {
            "bare": round(bare.mebibytes),
            "1": round(one.mebibytes),
            **{str(k): round(case.mebibytes) for k, case in shared.items()},
        },
        "tokens_shared_over_apart": {
            str(k): round(case.tokens(turns, 1) / one.tokens(turns // k, 1), 3)
            for k, case in shared.items()
        },
        "shared_tokens_per_second": {
            str(k): round(case.tokens(turns, 0), 1) for k, case in shared.items()
        },
        "one_role_tokens_per_second": round(one.tokens(turns, 0), 1),
        **under,
    }


async def _case(
    team: Team, at_once: Sequence[int], *, updated: bool = False
) -> tuple[Case, dict[str, Any]]:
    """Measure a server, and `updates` of its team if that is wanted; it ends afterwards."""
    names = team.names or [BARE]
    progress(f"launching a server of {len(team.names)} roles")
    await team.start()
    try:
        await team.together(names, 1)  # warm-up
        rates: dict[int, list[tuple[float, float]]] = {turns: [] for turns in at_once}
        for number in range(team.plan.rounds):
            for turns in at_once:
                tokens, seconds, cpu = await team.together(names, 100 + number, turns)
                rates[turns].append((tokens / seconds, tokens / cpu))
        case = Case(team.mebibytes(), rates)
        said = ", ".join(f"{turns} turns {case.tokens(turns, 1):.1f}" for turns in at_once)
        progress(f"{case.mebibytes:.0f} MiB; tokens per CPU second: {said}")
        return case, await updates(team) if updated else {}
    finally:
        await team.stop()
