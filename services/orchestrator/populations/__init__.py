"""Populations of a job: pools of frozen versions, matches between them, opponents in training."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from troupe.rpc import FailedPrecondition


async def on_demand(module: str) -> Any:
    """Import a module of this package lazily, in a thread.

    Most jobs have no population, and the libraries that solve games are slow to import. Raises
    FailedPrecondition of kind "populations_missing" if they are not installed.
    """
    try:
        return await asyncio.to_thread(importlib.import_module, f"{__name__}.{module}")
    except ImportError as error:
        raise FailedPrecondition(
            f"a population needs {error.name}",
            kind="populations_missing",
            field="population",
            remedy="`pip install 'troupe-rl[populations]'` on the orchestrator's host.",
        ) from error
