"""The Lua scripts, each with the prelude that it is written against."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from services.experience_store.records import lua_transitions

_JOB_SCRIPTS: Final = ("open_step", "amend_step", "end_trajectory", "rosters")
_POLICY_SCRIPTS: Final = (
    "admit",
    "stage",
    "unstage",
    "append_rows",
    "end_trajectories",
    "fill_columns",
    "claim",
    "renew",
    "release",
    "drop_gone",
    "commit",
    "count",
    "forget_step",
    "sweep",
)
# What is put between the prelude and scripts that share more than that.
_BETWEEN: Final = {
    "end_trajectory": ("decide",),
    "append_rows": ("carry",),
    "end_trajectories": ("decide", "carry"),
    # They work on several steps of a table.
    "commit": ("return",),
    "admit": ("return", "roster"),
}


@dataclass(frozen=True)
class Script:
    """One atomic change (or a read that must be consistent)."""

    name: str
    text: str
    sha: str
    """What EVALSHA calls it."""

    @staticmethod
    def of(name: str, text: str) -> Script:
        """The script, with its digest."""
        return Script(name, text, hashlib.sha1(text.encode()).hexdigest())


@cache
def load_scripts() -> Mapping[str, Script]:
    """All scripts by name, read from `lua/`."""
    folder = files(__package__) / "lua"

    def read(name: str) -> str:
        return (folder / f"{name}.lua").read_text()

    job = read("job")
    policy = lua_transitions() + "".join(map(read, ("policy", "samples", "leases")))
    texts = {}
    for prelude, names in ((job, _JOB_SCRIPTS), (policy, _POLICY_SCRIPTS)):
        for name in names:
            texts[name] = prelude + "".join(read(part) for part in (*_BETWEEN.get(name, ()), name))
    return {name: Script.of(name, text) for name, text in texts.items()}
