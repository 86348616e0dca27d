"""A log of the decisions that live services take, and their replay in another process.

`python -m tests.support.decision_log FILE` calls the functions of `troupe.scheduling` again with
what was logged, and prints how many decisions there were of each kind and which differ.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from troupe.scheduling import routing

# Of a fleet of engines: what changes it, and what it decides.
FLEET = ("add", "remove", "set_limit", "look_again", "choose", "give", "take_back")


class DecisionLog:
    """The calls of functions, and of the fleets that routers make, with what they returned."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.entries: list[bytes] = []
        self._fleets: dict[int, int] = {}
        # So that no later fleet gets the id of an earlier one.
        self._held: list[Any] = []

    def watch(self, module: ModuleType, *names: str) -> None:
        """Log the calls of a module's functions."""
        for name in names:
            self._patch.setattr(module, name, self._logged(module.__name__, getattr(module, name)))

    def watch_fleets(self) -> None:
        """Log what every fleet that is made from now on is told and asked."""
        made = routing.Fleet.__init__

        @functools.wraps(made)
        def init(fleet: Any, *args: Any, **kwargs: Any) -> None:
            made(fleet, *args, **kwargs)
            self._held.append(fleet)
            self._fleets[id(fleet)] = len(self._fleets)
            self._add("new", id(fleet), (args, kwargs), None, None)

        self._patch.setattr(routing.Fleet, "__init__", init)
        for name in FLEET:
            self._patch.setattr(routing.Fleet, name, self._of_fleet(getattr(routing.Fleet, name)))

    def _logged(self, module: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
            before = pickle.dumps((args, kwargs))
            result = function(*args, **kwargs)
            self.entries.append(
                pickle.dumps((f"{module}.{function.__name__}", None, before, None, result))
            )
            return result

        return call

    def _of_fleet(self, method: Any) -> Any:
        name = method.__name__

        @functools.wraps(method)
        def call(fleet: Any, *args: Any, **kwargs: Any) -> Any:
            told: dict[str, bool] = {}
            if name == "choose":
                work, serves = args

                def noted(engine_id: str) -> bool:
                    return told.setdefault(engine_id, serves(engine_id))

                result = method(fleet, work, noted, **kwargs)
                self._add(name, id(fleet), ((work,), kwargs), told, result)
                return result
            result = method(fleet, *args, **kwargs)
            self._add(name, id(fleet), (args, kwargs), None, result)
            return result

        return call

    def _add(self, name: str, fleet: int, given: Any, told: Any, result: Any) -> None:
        if fleet in self._fleets:
            entry = (f"fleet.{name}", self._fleets[fleet], pickle.dumps(given), told, result)
            self.entries.append(pickle.dumps(entry))

    def write(self, path: Path) -> None:
        """Write the log to a file."""
        path.write_bytes(pickle.dumps(self.entries))


def replayed(path: Path) -> dict[str, Any]:
    """The number of decisions of each kind, and what differs from the log."""
    fleets: dict[int, routing.Fleet] = {}
    counts: Counter[str] = Counter()
    differing: list[str] = []
    for entry in pickle.loads(path.read_bytes()):
        name, fleet, given, told, result = pickle.loads(entry)
        args, kwargs = pickle.loads(given)
        counts[name] += 1
        if name == "fleet.new":
            fleets[fleet] = routing.Fleet(*args, **kwargs)
            continue
        if name == "fleet.choose":
            found = fleets[fleet].choose(*args, told.__getitem__, **kwargs)
        elif name.startswith("fleet."):
            found = getattr(fleets[fleet], name.removeprefix("fleet."))(*args, **kwargs)
        else:
            module, _, function = name.rpartition(".")
            found = getattr(importlib.import_module(module), function)(*args, **kwargs)
        if found != result:
            differing.append(f"{name}: {result} then, {found} now")
    return {"counts": counts, "differing": differing[:10]}


if __name__ == "__main__":
    print(json.dumps(replayed(Path(sys.argv[1]))))
