"""What a trainer has to know of an environment: shapes, and whom a policy plays."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.job import JobSpec
from troupe.networks.vector import Spaces, make_environment
from troupe.workflow import EntrypointError
from troupe.workflow.refusals import refusal_of


@dataclass(frozen=True)
class Table:
    """Where a policy sits."""

    spaces: Spaces
    agents: tuple[str, ...]
    """Whom it plays, in the order of the environment."""


def table_of(spec: JobSpec, policy: str) -> Table:
    """Make the job's environment, look at it, and give it up. Blocking.

    Raises InvalidArgument naming the field of the job at fault.
    """
    section = spec.environment
    assert section is not None, "a job of networks"
    try:
        environment = make_environment(section.source, 1, **section.args)
    except EntrypointError as error:
        raise refusal_of(error) from error
    try:
        own = {name for name, agent in spec.agents.items() if agent.policy == policy}
        return Table(environment.spaces, tuple(a for a in environment.agents if a in own))
    finally:
        environment.close()
