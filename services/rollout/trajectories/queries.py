"""The queries of a job by split and index, made in threads: the event loop is not blocked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from troupe.job import TasksSpec
from troupe.outcomes import NotJsonError, described, json_text, type_name
from troupe.user_code import call_in_thread
from troupe.workflow import Tasks, WorkflowError, load_counted_tasks

# Cached items. The trajectories of a group ask for the same item, which is made once.
_KEPT = 2048
# Time in which one thread makes further requested items: starting a thread for each would take
# longer, beside an engine that computes.
_TOGETHER_SECONDS = 0.005


class QuerySource:
    """Loads a split when it is first needed. Items are made one at a time, in a thread."""

    def __init__(self, spec: TasksSpec) -> None:
        self._spec = spec
        self._splits: dict[str, Tasks] = {}
        # Lengths when the splits were loaded: user code may report another one, or raise, later.
        self._lengths: dict[str, int] = {}
        self._items: OrderedDict[tuple[str, int], Mapping[str, Any]] = OrderedDict()
        # Requested items, with the number of waiting callers.
        self._wanted: Counter[tuple[str, int]] = Counter()
        # Tasks are user code and need not be thread-safe.
        self._lock = asyncio.Lock()

    async def load(self, split: str) -> int:
        """Load the split; returns its length. Raises `EntrypointError`."""
        async with self._lock:
            if split not in self._splits:
                self._splits[split], self._lengths[split] = await call_in_thread(
                    load_counted_tasks, self._spec.source, split, self._spec.args
                )
            return self._lengths[split]

    async def get(self, split: str, index: int) -> Mapping[str, Any]:
        """Item `index` modulo the split's length: a mapping of JSON values.

        Raises `EntrypointError` and `WorkflowError` (kind `bad_task`).
        """
        if split not in self._splits:
            await self.load(split)
        tasks = self._splits[split]
        key = (split, index % self._lengths[split])
        if (found := self._items.get(key)) is not None:
            return found
        self._wanted[key] += 1
        try:
            async with self._lock:
                if key not in self._items:
                    wanted = list(self._wanted)
                    self._items |= await call_in_thread(self._make_items, tasks, key, wanted)
                    # The requested item is the last: the others may be evicted.
                    while len(self._items) > _KEPT:
                        self._items.popitem(last=False)
                return self._items[key]
        finally:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]

    def _make_items(
        self, tasks: Tasks, key: tuple[str, int], wanted: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], Mapping[str, Any]]:
        """Make item `key` and, while that is quick, others requested of its split. In a thread."""
        until = time.monotonic() + _TOGETHER_SECONDS
        made = {}
        item = self._item(tasks, *key)
        for split, index in wanted:
            if time.monotonic() > until:
                break
            if split == key[0] and (split, index) != key and (split, index) not in self._items:
                with contextlib.suppress(WorkflowError):  # its own caller gets the error
                    made[split, index] = self._item(tasks, split, index)
        made[key] = item
        return made

    def _item(self, tasks: Tasks, split: str, index: int) -> Mapping[str, Any]:
        where = f"{split}[{index}] of {self._spec.source}"
        try:
            item = tasks[index]
            # A copy: a mapping of user code may raise whenever it is read.
            data = dict(item) if isinstance(item, Mapping) else None
        except BaseException as error:
            raise _bad_task(f"{where} raised {described(error)}") from error
        if data is None:
            raise _bad_task(f"{where} is a {type_name(item)}, not a mapping")
        try:
            # Missing numbers of a table are NaN.
            json_text(data, allow_nan=True)
        except NotJsonError as error:
            raise _bad_task(f"{where} does not consist of JSON values: {error}") from error
        return data


def _bad_task(message: str) -> WorkflowError:
    return WorkflowError(
        message,
        kind="bad_task",
        field="tasks.source",
        remedy="`tasks[index]` must return a dict of strings, numbers, booleans, lists and dicts.",
    )
