"""A log of the decisions that live services take, and their replay in another process.

`python -m tests.support.decision_log FILE...` calls the functions of `troupe.scheduling` again with
what was logged, and prints how many decisions there were of each kind and which differ.

Processes of services are logged by `record_process`, which a `sitecustomize` calls before the
service imports anything (`sitecustomize_for`).
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tests.support.waiting import PATIENCE
from troupe.scheduling import admission, balancing, binding, durability, elastic, routing, sharing
from troupe.scheduling.elastic import cells, order

ADMISSION = (
    "plan_queries",
    "due_wave",
    "spread_queries",
    "holding_back",
    "seed_of",
    "next_move",
    "plan_evaluation",
    "too_old",
    "groups_that_fit",
    "too_many_failed",
)
FUNCTIONS: dict[ModuleType, tuple[str, ...]] = {
    admission: ADMISSION,
    binding: ("decide", "ready_micro_batches", "too_large", "too_many_ranks"),
    balancing: ("decide", "succeeded", "failed"),
    sharing: ("keepers", "split_limit"),
    routing: ("next_wave", "classes_for"),
    durability: ("is_due", "plan_states"),
    elastic: ("decide_over",),
    order: ("workers_to_start", "group_waiters"),
    cells: ("plan",),
}
# For classes with a state: the methods that change it, or decide by it.
METHODS: dict[type, tuple[str, ...]] = {
    routing.Fleet: (
        "add",
        "remove",
        "set_limit",
        "has_room",
        "look_again",
        "choose",
        "give",
        "take_back",
        "wait",
        "leave",
    ),
    routing.TurnQueue: ("push", "regroup", "peek", "pop", "remove"),
    routing.Profiles: ("observe", "expected", "fitting"),
    routing.AdaptiveLimit: ("ended", "best"),
}
CLASSES = {one.__name__: one for one in METHODS}
# Queues' entries: queues compare and keep them, and never look into them.
HELD = ("WaitingTurn", "PendingTurn")


class Decision(NamedTuple):
    """One logged call. `told`: a callback's answer; `number`: the number of the method's object;
    `given`: arguments, pickled before the call; `result`: its result, pickled."""

    name: str
    number: int | None
    given: bytes
    told: dict[str, bool] | None
    result: bytes


class DecisionLog:
    """Writes the calls of functions and methods, with what they returned, to a file.

    `patch` sets an attribute, as `setattr` or `MonkeyPatch.setattr` does. Calls within a logged
    call are not logged: they follow from it.
    """

    def __init__(self, patch: Callable[[Any, str, Any], None], path: Path) -> None:
        self._patch = patch
        # Unbuffered: a service that is killed leaves all but its last record.
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._within = threading.local()
        # Numbers of objects by id; they are kept, so that no later one gets an id again.
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def watch(self, module: ModuleType, *names: str) -> None:
        """Log the calls of a module's functions."""
        for name in names:
            self._patch(module, name, self._logged(module.__name__, getattr(module, name)))

    def watch_class(self, cls: type) -> None:
        """Log the calls of every object of a class that is made from now on."""
        made = cls.__init__  # type: ignore[misc]

        @functools.wraps(made)
        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            made(this, *args, **kwargs)
            number = self._number(this)
            self._add(f"{cls.__name__}.new", number, self._dump((args, kwargs)), None, None)

        self._patch(cls, "__init__", init)
        for name in METHODS[cls]:
            self._patch(cls, name, self._method(cls, getattr(cls, name)))

    def watch_all(self) -> None:
        """Log all decisions that services take."""
        for module, names in FUNCTIONS.items():
            self.watch(module, *names)
        for cls in METHODS:
            self.watch_class(cls)

    def _logged(self, module: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inner:
                return function(*args, **kwargs)
            args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
            given = self._dump((args, kwargs))
            result = self._run(function, *args, **kwargs)
            self._add(f"{module}.{function.__name__}", None, given, None, result)
            return result

        return call

    def _method(self, cls: type, method: Any) -> Any:
        @functools.wraps(method)
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inner or id(this) not in self._numbers:
                return method(this, *args, **kwargs)
            told: dict[str, bool] | None = None
            logged = args
            if method.__name__ == "choose":
                work, serves = args
                told, logged = {}, (work,)
                args = work, lambda one: told.setdefault(one, serves(one))
            given = self._dump((logged, kwargs))
            result = self._run(method, this, *args, **kwargs)
            number, name = self._numbers[id(this)], f"{cls.__name__}.{method.__name__}"
            self._add(name, number, given, told, (result, getattr(this, "now", None)))
            return result

        return call

    @property
    def _inner(self) -> bool:
        return getattr(self._within, "call", False)

    def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._within.call = True
        try:
            return function(*args, **kwargs)
        finally:
            self._within.call = False

    def _number(self, one: Any) -> int:
        if id(one) not in self._numbers:
            self._numbers[id(one)] = len(self._kept)
            self._kept.append(one)
        return self._numbers[id(one)]

    def _dump(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        number = self._number

        class Numbering(pickle.Pickler):
            def persistent_id(self, one: Any) -> int | None:
                return number(one) if type(one).__name__ in HELD else None

        pickler = Numbering(buffer)
        pickler.dump(value)
        return buffer.getvalue()

    def _add(self, name: str, number: int | None, given: bytes, told: Any, result: Any) -> None:
        entry = Decision(name, number, given, told, self._dump(result))
        with self._lock:
            self._file.write(pickle.dumps(tuple(entry)))


def sitecustomize_for(directory: Path) -> Path:
    """A directory for PYTHONPATH with which every process of a service logs its decisions into a
    file of `directory`."""
    place = directory / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import sys\n"
        f"if any(one in {SERVICES} for one in sys.orig_argv):\n"
        "    from tests.support.decision_log import record_process\n"
        f"    record_process({str(directory)!r})\n"
    )
    return place


SERVICES = ("services.orchestrator", "services.rollout", "services.reward", "services.trainer")


def record_process(directory: str) -> None:
    """Log the decisions of this process of a service."""
    service = next(one for one in sys.orig_argv if one in SERVICES)
    DecisionLog(setattr, Path(directory) / f"{service}-{os.getpid()}.log").watch_all()


def entries(path: Path) -> list[Decision]:
    """The decisions of a log; without the last where its process was killed as it wrote it."""
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append(Decision(*pickle.load(file)))
            except (EOFError, pickle.UnpicklingError):
                return found


def write(path: Path, decisions: Sequence[Decision]) -> None:
    """Write decisions as a log."""
    path.write_bytes(b"".join(pickle.dumps(tuple(one)) for one in decisions))


class Held:
    """A stand-in for a queue's entry; once put there, a turn in the queue of the replay itself."""


def load(value: bytes, held: dict[int, Any] | None = None) -> Any:
    """Return the unpickled value; `held`: by number, the stand-ins of queues' entries."""
    found = {} if held is None else held

    class Finding(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return found.setdefault(number, Held())

    return Finding(io.BytesIO(value)).load()


def plain(value: Any) -> Any:
    """A value with the fields of objects that compare by identity, such as a turn's work."""
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    kind = type(value)
    if kind.__eq__ is object.__eq__ and hasattr(kind, "__slots__"):
        return kind.__name__, [plain(getattr(value, name)) for name in kind.__slots__]
    return value


def replayed(path: Path) -> dict[str, Any]:
    """Return the number of decisions of each kind, and the differences from the log."""
    objects: dict[int | None, Any] = {}
    held: dict[int, Any] = {}
    counts: Counter[str] = Counter()
    differing: list[str] = []
    for name, number, given, told, logged in entries(path):
        args, kwargs = load(given, held)
        counts[name] += 1
        owner, _, function = name.rpartition(".")
        if function == "new":
            objects[number] = CLASSES[owner](*args, **kwargs)
            continue
        one = objects[number] if number is not None else importlib.import_module(owner)
        try:
            callback = () if told is None else (told.__getitem__,)
            found = getattr(one, function)(*args, *callback, **kwargs)
        except Exception as error:  # a wrong record
            differing.append(f"{name}: {error!r}")
            continue
        if function == "push":
            entry, _ = load(logged, marks := dict[int, Any]())
            held |= {mark: found for mark, stands in marks.items() if stands is entry}
            continue
        if number is not None:
            found = found, getattr(one, "now", None)
        if plain(found) != plain(result := load(logged, held)):
            differing.append(f"{name}: {result} then, {found} now")
    return {"counts": counts, "differing": differing[:10]}


def replay(path: Path) -> dict[str, int]:
    """How many decisions of each kind a process with other hashes takes again, and alike."""
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-m", "tests.support.decision_log", str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        found = json.loads(ran.stdout)[str(path)]
        assert found["differing"] == [], found["differing"]
    counts: dict[str, int] = found["counts"]
    return counts


if __name__ == "__main__":
    print(json.dumps({path: replayed(Path(path)) for path in sys.argv[1:]}))
