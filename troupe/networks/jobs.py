"""The vector environment of a job of networks, made by rollout workers and trainers, and the
learner of one policy's network (`make_learner`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from troupe.functions import shipped
from troupe.job import JobSpec
from troupe.job.sections.network import NetworkSpec, PPOSpec, QLearningSpec
from troupe.networks.vector import Spaces, VectorEnvironment, make_environment
from troupe.outcomes import described, safe_text
from troupe.rpc.errors import InvalidArgument
from troupe.workflow.errors import EntrypointError, as_invalid_argument

if TYPE_CHECKING:
    from troupe.networks.learner_state import NetworkTrainer

_SOURCE = "environment.source"
_log = logging.getLogger(__name__)


def environment_of(job: JobSpec, copies: int | None = None) -> VectorEnvironment:
    """Return the environment of a job of networks; `copies` overrides the job's. Blocking.

    Raises InvalidArgument naming the job's field at fault: for an environment that cannot be
    imported or made, whichever error it raises, and for agents that differ from the job's."""
    section = job.environment
    assert section is not None, "a job of networks"
    code = shipped.opened(job.code.sha256) if job.code else None
    with environment_guard(job), shipped.using(code):
        made = make_environment(section.source, copies or section.copies, **section.args)
        agents = tuple(map(safe_text, made.agents))
    if set(agents) != set(job.agents):
        close_environment(made)
        raise InvalidArgument(
            f"the agents of {section.source} are {', '.join(agents)}",
            kind="unknown_agent",
            field="agents",
            value=", ".join(sorted(job.agents)),
            remedy="Name each agent of the environment, and no other.",
        )
    return made


@contextlib.contextmanager
def environment_guard(job: JobSpec) -> Iterator[None]:
    """Turn any error of an environment inside into InvalidArgument that names the job's field."""
    section = job.environment
    assert section is not None, "a job of networks"
    try:
        yield
    except EntrypointError as error:
        raise as_invalid_argument(error) from error
    except InvalidArgument as error:
        error.field = _field(error.field)
        raise
    except BaseException as error:  # the user's code, which may exit
        raise InvalidArgument(
            f"could not be made: {described(error)}",
            kind="environment_raised",
            field=_SOURCE,
            value=section.source,
            remedy="Check `environment.args`, and the environment's requirements on this machine.",
        ) from error


def close_environment(environment: Any) -> None:
    """Close an environment, and log its errors."""
    try:
        environment.close()
    except BaseException as error:
        _log.warning("an environment did not close: %s", described(error))


def _field(name: str | None) -> str:
    """Return the job's field for the library's argument `name`."""
    if (name or "").startswith(f"{_SOURCE}") or name == "agents":
        return name or ""
    setting = (name or "").removeprefix("environment").removeprefix(".")
    if setting in ("args", "copies"):
        return f"environment.{setting}"
    return f"environment.args.{setting}" if setting else _SOURCE


def agents_of(job: JobSpec, agents: Sequence[str], policy: str) -> tuple[str, ...]:
    """Return the agents that a policy may play, in the order of `agents`; its network is made for
    them."""
    roster = job.roster(policy)
    return tuple(name for name in agents if name in roster)


def make_learner(
    spec: NetworkSpec, spaces: Spaces, agents: Sequence[str], seed: int
) -> NetworkTrainer:
    """Return the learner of one policy that plays `agents`, in the environment's order.

    `seed` determines its initial weights and all its random numbers. Raises InvalidArgument for a
    paradigm that cannot train on these spaces.
    """
    # These import TorchRL, which rollout workers do not need.
    from troupe.networks.maddpg import DeterministicLearner
    from troupe.networks.ppo import PPOLearner
    from troupe.networks.qlearning import QLearner

    if not agents:
        raise InvalidArgument("a policy must play at least one agent", field="agents")
    played, learning = tuple(agents), spec.learning
    made: NetworkTrainer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(learning, PPOSpec):
            made = PPOLearner(spec, learning, spaces, played)
        elif isinstance(learning, QLearningSpec):
            made = QLearner(spec, learning, spaces, played)
        else:
            made = DeterministicLearner(spec, learning, spaces, played)
    made.seed(seed)
    return made
