"""The embedded engine under a team: its memory, its tokens, what merging would cost."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import progress, scratch
from benchmarks.team_engine.team import BARE, JOB, ROLES, Plan, Team, apart, publish_base, updates
from troupe.checkpoints.adapters import base_key, merged
from troupe.transfer import checksum_of


def memory(plan: Plan, roles: int, place: Path, base: str) -> float:
    """Return the PSS in MiB of this process, which serves the bare base and so many roles."""
    torch.set_num_threads(1)

    async def measured() -> float:
        team = Team(plan, roles, place, base)
        await team.start()
        await team.together(team.names or [BARE], 0)
        pss = team.mebibytes()
        await team.stop()
        return pss

    return asyncio.run(measured())


async def rates(team: Team) -> dict[str, list[tuple[float, float]]]:
    """Return tokens per second and per CPU second of each round: of the bare base, of one policy,
    of as many roles."""
    names = {"bare": [BARE], "1": team.names[:1]}
    names |= {str(roles): team.names[:roles] for roles in ROLES}
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in names}
    await team.together(team.names, 1)  # warm-up
    for number in range(team.plan.rounds):
        for case in [*names][:: -1 if number % 2 else 1]:
            tokens, seconds, cpu = await team.together(names[case], 100 + number)
            found[case].append((tokens / seconds, tokens / cpu))
        said = ", ".join(f"{case} {rounds[-1][1]:.1f}" for case, rounds in found.items())
        progress(f"round {number + 1} of {team.plan.rounds}: tokens per CPU second: {said}")
    return found


def over(rounds: Mapping[str, list[tuple[float, float]]], case: str, base: str, of: int) -> float:
    """Return the median of the rounds' ratios of a rate: per second (0), per CPU second (1)."""
    pairs = zip(rounds[case], rounds[base], strict=True)
    return round(statistics.median(one[of] / other[of] for one, other in pairs), 3)


async def merging(team: Team) -> dict[str, float]:
    """Return the CPU seconds of merging an adapter into a copy of the base and of loading it."""
    base, _ = team.transfer.get(base_key(JOB, team.base))
    name = team.names[-1]
    content = team.adapter(name, 1)
    began = time.process_time()
    checksum_of(merged(base, content))
    merge = time.process_time() - began
    ref = team.published(name, 1)
    began = time.process_time()
    await team.engines[name].update_weights(ref, team.transfer)
    load = time.process_time() - began
    return {"merge_cpu_seconds": round(merge, 3), "update_cpu_seconds": round(load, 3)}


async def speed(plan: Plan, place: Path, base: str) -> dict[str, Any]:
    """Return the figures of the embedded engine that are no memory."""
    team = Team(plan, max(ROLES), place, base)
    await team.start()
    try:
        rounds = await rates(team)
        return {
            "tokens_over_one_policy": {str(k): over(rounds, str(k), "1", 0) for k in ROLES},
            "per_cpu_second": {str(k): over(rounds, str(k), "1", 1) for k in ROLES},
            "one_policy": round(statistics.median(cpu for _, cpu in rounds["1"]), 1),
            "adapter_over_bare": over(rounds, "1", "bare", 1),
            **await merging(team),
            **await updates(team),
        }
    finally:
        await team.stop()


def embedded(plan: Plan, required: bool) -> dict[str, Any]:
    """Return the figures of the embedded engine, which is always there."""
    del required
    with scratch() as place:
        # A page that this process maps, too, would count half.
        base = apart(publish_base, plan, place)
        held = {}
        for roles in (0, *ROLES):
            held[roles] = apart(memory, plan, roles, place, base)
            progress(f"{roles} roles: {held[roles]:.0f} MiB")
        return {
            "dtype": plan.dtype,
            "turns": plan.turns,
            "memory_over_one_base": {str(k): round(held[k] / held[0], 3) for k in ROLES},
            "memory_mib": {str(roles): round(mib) for roles, mib in held.items()},
            "adapter_mib": round((held[max(ROLES)] - held[0]) / max(ROLES), 1),
            **asyncio.run(speed(plan, place, base)),
        }
