"""Section about how turns find engines.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from troupe.job.affinity import AffinitySpec
from troupe.job.section import Section


class RoutingSpec(Section):
    """How turns find engines; docs/rollout.md explains it. The switches exist to be measured."""

    policy: Literal["least_work", "round_robin", "random_hash"] = "least_work"
    """`least_work`: the engine with the least to do; `round_robin` and `random_hash` give
    conversations out in turn or by their id, whatever the load, and their turns wait for that
    engine."""
    sticky: bool = True
    """A conversation stays with the engine that holds its prefix, unless another has far less to
    do."""
    priority: bool = True
    """Where turns wait, those whose group has the fewest trajectories left go first."""
    adaptive_limit: bool = True
    """`least_work`: an engine gets as many turns at once as still make it faster, up to
    `max_running`."""
    affinity: AffinitySpec = AffinitySpec()
    """`least_work`: which device class fits which turns."""

    @model_validator(mode="after")
    def _heeded(self) -> Self:
        if self.policy != "least_work" and any(self.affinity.declared()):
            raise ValueError(
                f"affinity: `{self.policy}` does not look at device classes; remove it, or choose "
                "`least_work`"
            )
        return self
