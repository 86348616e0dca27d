"""The store's Redis: its Lua scripts, and calls of them on the keys of jobs and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from services.chassis.redis import Command, RedisClient
from services.experience_store.records import lua_transitions
from troupe.rpc import RetryPolicy

_JOB_SCRIPTS: Final = ("open_step", "amend_step", "end_trajectory", "rosters", "read_pools")
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
    "open_version",
    "restart_version",
    "count",
    "forget_step",
    "sweep",
    "keep_rows",
    "free_rows",
    "give_pair_sums",
    "free_pair_sums",
)
# Code inserted between the prelude and the scripts that share it.
_BETWEEN: Final = {
    "open_step": ("tasks",),
    "amend_step": ("tasks",),
    "read_pools": ("tasks",),
    "end_trajectory": ("decide",),
    "append_rows": ("carry",),
    "end_trajectories": ("decide", "carry"),
    # These scripts work on several steps of a table.
    "commit": ("return", "kept", "versions"),
    "forget_step": ("kept",),
    "free_rows": ("kept",),
    "open_version": ("versions",),
    "restart_version": ("versions",),
    "admit": ("return", "roster"),
}
# Short, since callers retry too and must learn quickly that Redis is away.
RETRIES: Final = RetryPolicy(max_attempts=3, initial_backoff=0.05, max_backoff=0.5)


@cache
def load_scripts() -> Mapping[str, str]:
    """Return the text of each script by name, with its prelude in front."""
    folder = files(__package__) / "lua"

    def read(name: str) -> str:
        return (folder / f"{name}.lua").read_text()

    job = read("job")
    policy = lua_transitions() + "".join(map(read, ("policy", "samples", "leases")))
    return {
        name: prelude + "".join(read(part) for part in (*_BETWEEN.get(name, ()), name))
        for prelude, names in ((job, _JOB_SCRIPTS), (policy, _POLICY_SCRIPTS))
        for name in names
    }


@dataclass(frozen=True)
class ScriptCall:
    """A call of one script on the keys of one job or policy (`base`)."""

    script: str
    base: str
    args: Sequence[str | bytes | int]
    before: Sequence[Command] = ()
    """Commands sent just before it, on keys of the same slot."""


class Database(RedisClient):
    """The Redis that holds samples. Calls raise `Unavailable` with its address when it is away."""

    def __init__(self, url: str, *, timeout: float = 5.0, retries: RetryPolicy = RETRIES) -> None:
        super().__init__(
            url,
            load_scripts(),
            name="troupe-experience-store",
            retries=retries,
            timeout=timeout,
            patience=timeout,
        )

    async def run(self, script: str, base: str, *args: str | bytes | int) -> list[Any]:
        """Run one script and return its reply."""
        return list(await self.run_script(script, [base], args))

    async def run_each(self, calls: Sequence[ScriptCall]) -> list[list[Any]]:
        """Run several scripts, sent together, and return their replies. Each is atomic by
        itself."""
        commands: list[Command] = []
        places: list[int] = []
        for call in calls:
            commands += call.before
            places.append(len(commands))
            commands.append(self.script_command(call.script, [call.base], call.args))
        replies = await self.call_each(commands)
        return [list(replies[place]) for place in places]

    async def run_all(
        self, before: Sequence[Command], calls: Sequence[ScriptCall]
    ) -> list[list[Any]]:
        """Run several scripts, sent together after commands on any of their keys, and return the
        replies. Requires that one server holds all keys."""
        scripts = [self.script_command(call.script, [call.base], call.args) for call in calls]
        replies = await self.call_each([*before, *scripts])
        return [list(reply) for reply in replies[len(before) :]]
