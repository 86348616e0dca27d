"""What a trainer has to know of an environment: shapes, and whom a policy plays."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.job import JobSpec
from troupe.networks.jobs import agents_of, environment_of
from troupe.networks.vector import Spaces


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
    environment = environment_of(spec, copies=1)
    try:
        return Table(environment.spaces, agents_of(spec, environment.agents, policy))
    finally:
        environment.close()
