"""What rollout workers and trainers make of a job's `environment`."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.job import JobSpec
from troupe.networks.vector import VectorEnvironment, make_environment
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.workflow.errors import EntrypointError
from troupe.workflow.refusals import refusal_of

_SOURCE = "environment.source"


def environment_of(job: JobSpec, copies: int | None = None) -> VectorEnvironment:
    """The environment of a job of networks; `copies` instead of the job's. Blocking.

    Raises InvalidArgument naming the field of the job at fault: an environment that cannot be
    imported or made, whatever it raises, and agents that are not the job's.
    """
    section = job.environment
    assert section is not None, "a job of networks"
    try:
        made = make_environment(section.source, copies or section.copies, **section.args)
    except EntrypointError as error:
        raise refusal_of(error) from error
    except TroupeError as error:
        error.field = _field(error.field)
        raise
    except Exception as error:  # the user's code
        raise InvalidArgument(
            f"could not be made: {type(error).__name__}: {error}",
            kind="environment_raised",
            field=_SOURCE,
            value=section.source,
            remedy="Look at `environment.args`, and at what it needs on this machine.",
        ) from error
    if set(made.agents) != set(job.agents):
        made.close()
        raise InvalidArgument(
            f"the agents of {section.source} are {', '.join(made.agents)}",
            kind="unknown_agent",
            field="agents",
            value=", ".join(sorted(job.agents)),
            remedy="Name each agent of the environment, and no other.",
        )
    return made


def _field(name: str | None) -> str:
    """Where the job says what the library calls `name`."""
    setting = (name or "").removeprefix("environment").removeprefix(".")
    if setting in ("args", "copies"):
        return f"environment.{setting}"
    return f"environment.args.{setting}" if setting else _SOURCE


def agents_of(job: JobSpec, agents: Sequence[str], policy: str) -> tuple[str, ...]:
    """Whom a policy may ever play, in the order of the environment's `agents`: whom its network is
    made for."""
    roster = job.roster(policy)
    return tuple(name for name in agents if name in roster)
