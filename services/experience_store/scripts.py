"""The Lua scripts, each with the prelude that it is written against."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from services.experience_store.records import lua_transitions

_JOB_SCRIPTS: Final = ("open_step", "amend_step", "end_trajectory", "rosters")
_POLICY_SCRIPTS: Final = (
    "admit",
    "stage",
    "unstage",
    "append_rows",
    "fill_columns",
    "claim",
    "renew",
    "release",
    "commit",
    "count",
    "forget_step",
    "sweep",
)
# What is put between the prelude and scripts that work on several steps of a table.
_BETWEEN: Final = {"commit": ("return",), "admit": ("return", "roster")}


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


def load_scripts() -> dict[str, Script]:
    """All scripts by name, read from `lua/`."""
    folder = files(__package__) / "lua"

    def read(name: str) -> str:
        return (folder / f"{name}.lua").read_text()

    job, policy = read("job"), lua_transitions() + read("policy") + read("leases")
    texts = {name: job + read(name) for name in _JOB_SCRIPTS}
    for name in _POLICY_SCRIPTS:
        parts = (*_BETWEEN.get(name, ()), name)
        texts[name] = policy + "".join(read(part) for part in parts)
    return {name: Script.of(name, text) for name, text in texts.items()}
