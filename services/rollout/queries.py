"""The queries of a job, by split and index, without holding up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from troupe.job import TasksSpec
from troupe.workflow import Tasks, WorkflowError, load_tasks

# A step's queries come once per trajectory of their group: they are asked for once.
_KEPT = 2048


class QuerySource:
    """Loads splits when first needed. Items are made in a thread, one at a time."""

    def __init__(self, spec: TasksSpec) -> None:
        self._spec = spec
        self._splits: dict[str, Tasks] = {}
        self._items: OrderedDict[tuple[str, int], Mapping[str, Any]] = OrderedDict()
        # The tasks are the user's code: nobody promised that it is thread-safe.
        self._lock = asyncio.Lock()

    async def load(self, split: str) -> int:
        """Make the split; returns its length. Raises `EntrypointError`."""
        async with self._lock:
            return len(await self._tasks(split))

    async def get(self, split: str, index: int) -> Mapping[str, Any]:
        """Item `index` modulo the split's length: a mapping of JSON values.

        Raises `EntrypointError` and `WorkflowError` (kind `bad_task`).
        """
        async with self._lock:
            tasks = await self._tasks(split)
            key = (split, index % len(tasks))
            item = self._items.get(key)
            if item is None:
                item = self._items[key] = await asyncio.to_thread(self._item, tasks, *key)
                if len(self._items) > _KEPT:
                    self._items.popitem(last=False)
            return item

    async def _tasks(self, split: str) -> Tasks:
        if split not in self._splits:
            self._splits[split] = await asyncio.to_thread(
                load_tasks, self._spec.source, split, self._spec.args
            )
        return self._splits[split]

    def _item(self, tasks: Tasks, split: str, index: int) -> Mapping[str, Any]:
        where = f"{split}[{index % len(tasks)}] of {self._spec.source}"
        try:
            item = tasks[index % len(tasks)]
        except Exception as error:
            raise _bad_task(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(item, Mapping):
            raise _bad_task(f"{where} is a {type(item).__name__}, not a mapping")
        try:
            json.dumps(dict(item))
        except (TypeError, ValueError) as error:
            raise _bad_task(f"{where} does not consist of JSON values: {error}") from error
        return item


def _bad_task(message: str) -> WorkflowError:
    return WorkflowError(
        message,
        kind="bad_task",
        field="tasks.source",
        remedy="`tasks[index]` must return a dict of strings, numbers, booleans, lists and dicts.",
    )
