"""Sections about device classes: which turns fit which, and which engines are of which.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from troupe.job.section import MAX_AGENTS, NAME, Rate, Section


class AffinitySpec(Section):
    """Which device class fits which turns. A turn goes elsewhere when no engine of its class serves
    or all of them have far more to do."""

    domains: dict[str, str] = Field(default={}, max_length=4096)
    """Device class by task domain: the `domain` of a query."""
    agents: dict[str, str] = Field(default={}, max_length=MAX_AGENTS)
    """Device class by agent, for queries whose domain is not listed."""
    infer: bool = True
    """What is not declared follows from the prompt and response tokens that turns of a domain and
    agent had, where engines of two or more classes say what they do per second."""
    default: str = ""
    """Device class of the default pool; empty: any."""

    def declared(self) -> Iterator[tuple[str, str]]:
        """Field and device class of what is declared."""
        yield from ((f"domains.{domain}", name) for domain, name in self.domains.items())
        yield from ((f"agents.{agent}", name) for agent, name in self.agents.items())
        if self.default:
            yield "default", self.default


class PoolSpec(Section):
    """Engines of one device class."""

    device_class: str = Field(pattern=NAME)
    """Their device class: a name of your own, as in `compute` and `bandwidth`."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """How many of them there are per rollout worker."""
    prefill_tokens_per_second: Rate | None = None
    """Prompt tokens that one of them reads per second, as measured. Give both rates or none."""
    decode_tokens_per_second: Rate | None = None
    """Response tokens that one of them draws per second for all its turns together."""
