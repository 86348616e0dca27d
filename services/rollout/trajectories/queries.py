"""The queries of a job by split and index, made in threads to keep the event loop free."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from troupe.data.rows import CountTokens
from troupe.data.tasks import TRAIN, TaskSplit, compare_splits, open_tasks
from troupe.job import TasksSpec
from troupe.outcomes import NotJsonError, described, json_text, type_name
from troupe.user_code import call_in_thread
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import WorkflowError

# Number of cached items. The trajectories of a group request the same item, which is made once.
_KEPT = 2048
# Time during which one thread makes further requested items: starting a thread for each item would
# take longer while an engine computes.
_TOGETHER_SECONDS = 0.005


# The name of an evaluation with its own tasks (else ""), and the split.
_Split = tuple[str, str]


class QuerySource:
    """The source of queries, which loads a split when it is first needed. Items are made one at a
    time, in a thread."""

    def __init__(
        self,
        spec: TasksSpec,
        seed: int = 0,
        count_tokens: CountTokens | None = None,
        evaluations: Mapping[str, TasksSpec | None] = MappingProxyType({}),
        *,
        field: str = "tasks",
    ) -> None:
        """Create the source. `seed`: the job's seed. `count_tokens`: counter with the tokenizers of
        its policies. `evaluations`: tasks of evaluations by name; None: the job's own. `field`:
        name of the job's section `spec`, for errors."""
        self._field = field
        self._specs = {"": spec, **{n: own for n, own in evaluations.items() if own is not None}}
        self._open = partial(open_tasks, seed=seed, count_tokens=count_tokens)
        self._splits: dict[_Split, TaskSplit] = {}
        self._items: OrderedDict[tuple[_Split, int], Mapping[str, Any]] = OrderedDict()
        # Requested items, with the number of waiting callers.
        self._wanted: Counter[tuple[_Split, int]] = Counter()
        # Tasks are user code and need not be thread-safe.
        self._lock = asyncio.Lock()

    @property
    def notes(self) -> list[str]:
        """Return notices for the user about rows of data sets that were kept and dropped."""
        return [note for _, split in sorted(self._splits.items()) for note in split.notes]

    async def load(self, split: str, evaluation: str = "") -> int:
        """Load the split, or the split of an evaluation with its own tasks; return its length.

        Raises `EntrypointError` and `DataError`.
        """
        return len(await self._load(self._named(split, evaluation)))

    async def sources(self) -> Sequence[int]:
        """Return the number of items of each source of the training tasks. Raises the errors of
        `load`."""
        return (await self._load(self._named(TRAIN, ""))).sources

    async def get(
        self, split: str, index: int, evaluation: str = "", task: rollout_pb.TaskRef | None = None
    ) -> Mapping[str, Any]:
        """Return the item of query `index`, which is unlimited, or `task`: a mapping of JSON
        values.

        Raises `EntrypointError`, `DataError` and `WorkflowError` (kind `bad_task`).
        """
        named = self._named(split, evaluation)
        tasks = self._splits.get(named) or await self._load(named)
        if task is None:
            key = (named, tasks.position(index))
        else:
            key = (named, tasks.position_in(task.source, task.item))
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

    def _named(self, split: str, evaluation: str) -> _Split:
        return (evaluation if evaluation in self._specs else "", split)

    async def _load(self, named: _Split) -> TaskSplit:
        async with self._lock:
            if named not in self._splits:
                name, split = named
                load = partial(self._open, self._specs[name], split, field=self._section(name))
                if name:
                    load = partial(load, whole=True)
                loaded = await call_in_thread(load)
                if (training := self._splits.get(("", TRAIN))) is not None and not name:
                    await call_in_thread(compare_splits, training, loaded, self._section(name))
                self._splits[named] = loaded
            return self._splits[named]

    def _section(self, evaluation: str) -> str:
        return f"evaluations.{evaluation}.tasks" if evaluation else self._field

    def _make_items(
        self, tasks: TaskSplit, key: tuple[_Split, int], wanted: Iterable[tuple[_Split, int]]
    ) -> dict[tuple[_Split, int], Mapping[str, Any]]:
        """Make item `key` and, while that is quick, other requested items of its split. Runs in a
        thread."""
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

    def _item(self, tasks: TaskSplit, named: _Split, index: int) -> Mapping[str, Any]:
        name, split = named
        where = f"{split}[{index}] of {tasks.source}"
        spec = self._specs[name]
        kinds = {"source": spec.source, "mix": spec.mixed, "verifiers": spec.verifiers}
        kind = next((kind for kind, given in kinds.items() if given), "dataset")
        field = f"{self._section(name)}.{kind}"
        try:
            item = tasks[index]
            # Copied, since a mapping from user code may raise whenever it is read.
            data = dict(item) if isinstance(item, Mapping) else None
        except BaseException as error:
            raise _bad_task(field, f"{where} raised {described(error)}") from error
        if data is None:
            raise _bad_task(field, f"{where} is a {type_name(item)}, not a mapping")
        try:
            # Missing numbers of a table are NaN.
            json_text(data, allow_nan=True)
        except NotJsonError as error:
            raise _bad_task(field, f"{where} does not consist of JSON values: {error}") from error
        return data


def _bad_task(field: str, message: str) -> WorkflowError:
    return WorkflowError(
        message,
        kind="bad_task",
        field=field,
        remedy="`tasks[index]` must return a dict of strings, numbers, booleans, lists and dicts.",
    )
