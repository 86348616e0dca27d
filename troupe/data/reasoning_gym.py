"""Tasks of reasoning_gym by name: procedural puzzles, each with its own scorer.

tasks:
  source: troupe.data.reasoning_gym:PuzzleTasks
  args: {sets: {spell_backward: {min_word_len: 4}, leg_counting: {weight: 2}}}
rewards:
  right: {ready: reasoning_gym}

The hosts of rollout workers and of the reward service need `pip install
"troupe-rl[reasoning-gym]"`, which compiles one package.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import random
from collections.abc import Mapping
from typing import Any, Final

from troupe.outcomes import described, shown
from troupe.workflow.errors import EntrypointError

# Of 256 digests of questions, the number that are held out.
_HELD_OUT: Final = 32
_HELD_OUT_SEED: Final = 12345
# Maximum number of draws for a question that does not belong to the other split.
_DRAWS: Final = 1000
_SIZE: Final = 2**31
# Default sizes of sets that make all their puzzles at once, or allow only few.
_SMALL_SETS: Final = dict.fromkeys(("acre", "gsm_symbolic", "list_functions", "word_ladder"), 5000)
# Keys of objects that represent values missing in JSON: tuples, and dicts whose keys are not texts.
_TUPLE: Final = "$tuple"
_DICT: Final = "$dict"


class PuzzleTasks:
    """Puzzles of one split; puzzle i depends only on (split, seed, i).

    Each is {"question", "answer", "dataset", "entry"}; `entry_of(entry)` is the scorer's input.
    Different seeds may draw the same question, so a hash of the question decides its split: no
    question is in both.
    """

    def __init__(
        self,
        split: str,
        sets: Mapping[str, Mapping[str, Any]],
        seed: int = 0,
        size: int = 1_000_000,
    ) -> None:
        """Check `sets`: configurations by name of a data set of reasoning_gym, with `weight`
        (default 1), the relative frequency of its puzzles. Raises `EntrypointError` for an unknown
        name or configuration, or if reasoning_gym is not installed."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise EntrypointError(
                f"reasoning_gym cannot be imported: {error}",
                field="tasks.source",
                value=f"{__name__}:{type(self).__name__}",
                remedy='`pip install "troupe-rl[reasoning-gym]"` where rollout workers and the '
                "reward service run. It needs a C compiler and Python's headers there.",
            ) from error

        if not isinstance(sets, Mapping) or not sets:
            raise _refused(sets, "`sets` must map names of data sets to configurations", "")
        self._split = split
        self._seed = _HELD_OUT_SEED if split == "held_out" else seed
        self._size = size
        self._names = list(sets)
        self._weights: list[float] = []
        self._sets: dict[str, Any] = {}
        for name, config in sets.items():
            if name not in DATASETS:
                close = difflib.get_close_matches(str(name), DATASETS)
                raise _refused(
                    name, f"none of the {len(DATASETS)} data sets has this name", ", ".join(close)
                )
            if not isinstance(config, Mapping | None):
                raise _refused(name, f"its configuration is {shown(config)}, not a mapping", "")
            own = {"seed": 0, "size": _SMALL_SETS.get(name, _SIZE), "weight": 1, **(config or {})}
            weight = own.pop("weight")
            if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise _refused(
                    name, f"its `weight` is {shown(weight)}, not a number of at least 0", ""
                )
            self._weights.append(weight)
            try:
                self._sets[name] = reasoning_gym.create_dataset(name, **own)
                # Some data sets check their configuration only when they make a puzzle.
                self._draw(name, random.Random(0))
            except Exception as error:
                raise _refused(name, described(error), "its configuration") from error
        if not sum(self._weights):
            raise _refused(self._names, "every `weight` is 0", "")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self._seed}:{self._split}:{index}")
        (name,) = draw.choices(self._names, self._weights)
        return self._draw(name, draw)

    def _draw(self, name: str, draw: random.Random) -> dict[str, Any]:
        for _ in range(_DRAWS):
            entry = self._sets[name][draw.randrange(len(self._sets[name]))]
            digest = hashlib.sha256(entry["question"].lower().encode()).digest()[0]
            if (digest < _HELD_OUT) == (self._split == "held_out"):
                return {
                    "question": entry["question"],
                    "answer": entry["answer"],
                    "dataset": name,
                    "entry": _as_json(entry),  # scorers run in another process
                }
        raise LookupError(f"{name} has too few questions: none belongs to the split {self._split}")


def entry_of(value: Any) -> Any:
    """Restore an entry of a data set from the JSON in a query."""
    if isinstance(value, list):
        return [entry_of(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(entry_of(one) for one in value[_TUPLE])
    pairs = value[_DICT] if value.keys() == {_DICT} else value.items()
    return {entry_of(key): entry_of(one) for key, one in pairs}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_as_json(one) for one in value]}
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(one) for key, one in value.items()}
        return {_DICT: [[_as_json(key), _as_json(one)] for key, one in value.items()]}
    return value if isinstance(value, int | float) or value is None else str(value)


def _refused(name: object, why: str, hint: str) -> EntrypointError:
    return EntrypointError(
        f"{shown(name)}: {why}",
        field="tasks.args.sets",
        value=name,
        remedy=f"Look at {hint}." if hint else "Name data sets of reasoning_gym.",
    )
