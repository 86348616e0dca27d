"""Sections of a job for its agents: sampling, endpoints, and how turns are routed to engines.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from troupe.job.section import MAX_AGENTS, NAME, Rate, Section, Tokens
from troupe.sampling import (
    ALL_TOKENS,
    MAX_INT,
    MAX_TEMPERATURE,
    engine_temperature,
    engine_top_k,
)
from troupe.scheduling.routing import LEAST_WORK, POLICIES

if TYPE_CHECKING:
    RoutingPolicy = str
else:
    RoutingPolicy = Literal[tuple(POLICIES)]


class AffinitySpec(Section):
    """Preferred device classes of turns. A turn goes to another class when no engine of its class
    is available or all of them have far more work."""

    domains: dict[str, str] = Field(default={}, max_length=4096)
    """Device class by task domain: the `domain` of a query."""
    agents: dict[str, str] = Field(default={}, max_length=MAX_AGENTS)
    """Device class by agent, for queries whose domain is not listed."""
    infer: bool = True
    """Choose the class of undeclared domains and agents by the prompt and response tokens of their
    earlier turns. Needs engines of two or more classes with known rates."""
    default: str = ""
    """Device class of the default pool; empty: any."""

    def declared(self) -> Iterator[tuple[str, str]]:
        """Field and device class of every declaration."""
        yield from ((f"domains.{domain}", name) for domain, name in self.domains.items())
        yield from ((f"agents.{agent}", name) for agent, name in self.agents.items())
        if self.default:
            yield "default", self.default


class PoolSpec(Section):
    """Engines of one device class."""

    device_class: str = Field(pattern=NAME)
    """Name of the device class, of your choice, such as `compute` or `bandwidth`."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """Engines per rollout worker."""
    prefill_tokens_per_second: Rate | None = None
    """Measured prefill rate of one engine, in prompt tokens per second. Give both rates or none."""
    decode_tokens_per_second: Rate | None = None
    """Measured decoding rate of one engine over all its turns, in response tokens per second."""


class RoutingSpec(Section):
    """How turns are routed to engines (docs/rollout.md). The switches are for measurements."""

    policy: RoutingPolicy = LEAST_WORK
    """`least_work`: the engine with the least work; `round_robin` and `random_hash`: conversations
    are assigned in turn or by a hash of their id, independent of load, and stay there."""
    sticky: bool = True
    """A conversation stays with the engine that holds its prefix, unless another has far less
    work."""
    priority: bool = True
    """Waiting turns whose group has the fewest unfinished trajectories go first."""
    adaptive_limit: bool = True
    """`least_work`: limit the turns of an engine to the number that still increases its throughput,
    at most `max_running`."""
    affinity: AffinitySpec = AffinitySpec()
    """`least_work`: preferred device classes."""

    @model_validator(mode="after")
    def _heeded(self) -> Self:
        if not POLICIES[self.policy].by_load and any(self.affinity.declared()):
            raise ValueError(
                f"affinity: `{self.policy}` does not look at device classes; remove it, or choose "
                f"`{LEAST_WORK}`"
            )
        return self

    @property
    def limits_adapt(self) -> bool:
        """Whether the number of an engine's turns is adapted to its throughput."""
        return self.adaptive_limit and POLICIES[self.policy].by_load


class SamplingSpec(Section):
    """Sampling of an agent's tokens."""

    temperature: Annotated[
        float, Field(ge=0, le=MAX_TEMPERATURE), AfterValidator(engine_temperature)
    ] = 1.0
    """Sampling temperature; below 1e-5: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus: the smallest set of tokens with at least this probability."""
    top_k: Annotated[int, Field(ge=ALL_TOKENS, le=MAX_INT), AfterValidator(engine_top_k)] = (
        ALL_TOKENS
    )
    """The k most likely tokens; -1 or 0: all."""
    logprobs: Literal["full", "processed"] = "full"
    """Log-probs that engines record of tokens drawn with `top_p` or `top_k`. `full`: of all tokens
    at the temperature, before the truncation; kinds `embedded` and `sglang`. `processed`: of the
    distribution that the token was drawn from, so that ratios to it are importance weights; kinds
    `embedded` and `vllm`."""
    max_new_tokens: Tokens = 256
    """Longest response, in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=64)
    """Strings that end a response, in addition to end-of-sequence; each must be one token."""


class EndpointSpec(Section):
    """Defaults of an agent's OpenAI endpoint, which the workflow may override."""

    lenient: bool = False
    """Accept what only constrained decoding could enforce (`tool_choice: required`, a JSON schema):
    the prompt states it, and a reply that violates it is marked. False: refuse it."""
    sampling: Literal["job", "client"] = "job"
    """Whether temperature, top_p and top_k come from `sampling` of the agent, or from each
    request."""


class AgentSpec(Section):
    """A role in the workflow."""

    policy: str
    """Name of the policy that plays the agent; several agents may share one."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling of its tokens."""
    system_prompt: str | None = None
    """System message of conversations that have none of their own."""
    endpoint: EndpointSpec = EndpointSpec()
    """Endpoint of this agent for OpenAI's and Anthropic's clients (docs/openai.md)."""
