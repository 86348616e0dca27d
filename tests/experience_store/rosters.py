"""Shared parts of the tests of changing rosters."""

from __future__ import annotations

import pytest

from tests.support.experience import Stage
from troupe.rpc import FailedPrecondition


async def refused(call: object) -> tuple[str, str]:
    """Return kind and field of the refusal."""
    with pytest.raises(FailedPrecondition) as error:
        await call  # type: ignore[misc]
    assert error.value.remedy
    return error.value.kind, error.value.field or ""


async def end(stage: Stage, *queries: str) -> None:
    """End all trajectories of these queries with one row per policy."""
    for query in queries:
        for number in range(stage.group_size):
            await stage.append(query, f"{query}-s0-t{number}")


async def rows_left(stage: Stage, step: int) -> list[str]:
    keys = await stage.store.database.call("KEYS", f"*{{{stage.job}/*}}:{step}:*")
    names = [key.decode().rpartition(f"}}:{step}:")[2] for key in keys]
    return sorted(name for name in names if name.startswith(("rows", "staged")))
