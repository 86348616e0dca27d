"""What a trainer has to know of an environment: shapes, and whom a policy plays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from troupe.job import JobSpec
from troupe.networks.jobs import (
    agents_of,
    close_environment,
    environment_guard,
    environment_of,
)
from troupe.networks.vector import Spaces
from troupe.user_code import call_within

# Other policies wait for this worker's thread meanwhile.
_MAKE_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Table:
    """Where a policy sits."""

    spaces: Spaces
    agents: tuple[str, ...]
    """Whom it may ever play, in the order of the environment."""


def table_of(spec: JobSpec, policy: str) -> Table:
    """Make the job's environment, look at it, and give it up. Blocking.

    Raises InvalidArgument naming the field of the job at fault.
    """
    with environment_guard(spec):
        return call_within(_looked_at, spec, policy, seconds=_MAKE_SECONDS)


def _looked_at(spec: JobSpec, policy: str) -> Table:
    environment = environment_of(spec, copies=1)
    try:
        return Table(environment.spaces, agents_of(spec, environment.agents, policy))
    finally:
        close_environment(environment)
