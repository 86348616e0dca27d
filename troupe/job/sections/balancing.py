"""The section `balancing`: when engines move between policies, and which engines can.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from troupe.job.section import MAX_ENGINES, MAX_POLICIES, MAX_RATE, Rate, SecondsOrNone, Section
from troupe.job.sections.policy import LoraSpec, PolicySpec
from troupe.scheduling.balancing import BalancingRules

Exchange = Literal["in_place", "rebuild", "never"]
# Engine settings in which two policies may differ although an engine can serve both.
_OWN = {"replicas", "urls", "share", "start_timeout_seconds"}
_THRESHOLDS = {"turns": 5.0, "tokens": 4096.0}
_HYSTERESIS = 0.2


class BalancingSpec(Section):
    """Engines that move from idle policies to busy ones while the job runs, within each rollout
    worker (docs/rollout.md)."""

    inter: bool | None = None
    """Move engines between policies. Default: if possible, that is, if policies of the same model
    have engines beyond their minimum."""
    measure: Literal["turns", "tokens"] = "turns"
    """Unit of a policy's backlog: waiting and running turns, or the prompt and response tokens that
    these may still need."""
    threshold: Rate | None = None
    """Engines move where the backlogs per engine of two policies differ by more than this.
    Default: 5 turns (FlexMARL), or 4096 tokens."""
    hysteresis: float | None = Field(default=None, ge=0, le=MAX_RATE)
    """A move may reverse the difference to at most threshold - hysteresis, so that noise does not
    cause a move back. Default: a fifth of the threshold."""
    sustain_seconds: SecondsOrNone = 2.0
    """How long the difference must last before a move."""
    cooldown_seconds: SecondsOrNone = 10.0
    """After a move: time in which the receiving policy gives no engine and the giving one takes
    none."""
    drain_seconds: SecondsOrNone = 10.0
    """Time for the turns of a moving engine to end; the others continue on another engine of their
    policy."""
    minimum: dict[str, Annotated[int, Field(ge=0, le=MAX_ENGINES)]] = Field(
        default={}, max_length=MAX_POLICIES
    )
    """By policy: engines that stay on each rollout worker. Default: 1."""
    rebuild: bool = False
    """Also move engines between policies whose models or engine settings differ: the engine is
    stopped and started again."""

    @model_validator(mode="after")
    def _above_noise(self) -> Self:
        if self.hysteresis is not None and self.hysteresis > self.rules.threshold:
            raise ValueError(
                f"hysteresis = {self.hysteresis:g}: must not exceed the threshold "
                f"({self.rules.threshold:g})"
            )
        return self

    @property
    def rules(self) -> BalancingRules:
        """The rules of the balancing decision, with defaults filled in."""
        threshold = self.threshold if self.threshold is not None else _THRESHOLDS[self.measure]
        hysteresis = self.hysteresis if self.hysteresis is not None else _HYSTERESIS * threshold
        return BalancingRules(
            threshold,
            # `_above_noise` refuses a larger one.
            min(hysteresis, threshold),
            self.sustain_seconds,
            self.cooldown_seconds,
        )

    def minimum_of(self, policy: str) -> int:
        """Return the number of engines that a policy keeps on each rollout worker."""
        return self.minimum.get(policy, 1)

    def barred(
        self, policies: Mapping[str, PolicySpec], shared: Collection[str]
    ) -> frozenset[tuple[str, str]]:
        """Return the pairs of policies (source, target) between which no engine moves. `shared`:
        policies whose engines serve several of them."""
        good = ("in_place", "rebuild") if self.rebuild else ("in_place",)
        # Hundreds of policies have only a few kinds; each pair of kinds is compared once.
        kinds: dict[str, PolicySpec] = {}
        kind_of = {}
        for name, policy in policies.items():
            kind_of[name] = policy.model_dump_json(include={"model", "lora", "simulated", "engine"})
            kinds.setdefault(kind_of[name], policy)
        exchanged = {
            (one, other): exchange(a, b) in good
            for one, a in kinds.items()
            for other, b in kinds.items()
        }
        return frozenset(
            (source, target)
            for source, one in kind_of.items()
            for target, other in kind_of.items()
            if source != target
            and (source in shared or target in shared or not exchanged[one, other])
        )

    def possible(self, policies: Mapping[str, PolicySpec], shared: Collection[str]) -> bool:
        """Return whether any engine can ever move; arguments as of `barred`."""
        barred = self.barred(policies, shared)
        return any(
            engine_count(spec) > self.minimum_of(source)
            and any(source != target and (source, target) not in barred for target in policies)
            for source, spec in policies.items()
        )

    def check(self, policies: Mapping[str, PolicySpec], shared: Collection[str]) -> None:
        """Raise ValueError that names the field if settings do not match these policies; arguments
        as of `barred`."""
        for name, count in self.minimum.items():
            if name not in policies:
                known = ", ".join(sorted(policies))
                raise ValueError(f"balancing.minimum: '{name}' is not a policy; known: {known}")
            engines = _most_engines(policies[name])
            if not 1 <= count <= engines:
                raise ValueError(
                    f"balancing.minimum.{name}: {count} is not between 1 and the {engines} engines "
                    "that the policy begins with"
                )
        if not self.inter or self.possible(policies, shared) or _any_open(policies, shared):
            return
        if len(policies) < 2:
            raise ValueError("balancing.inter: there is one policy only; remove it")
        if all(engine_count(p) <= self.minimum_of(name) for name, p in policies.items()):
            raise ValueError(
                "balancing.inter: no policy has more engines than it keeps; raise "
                "policies.*.engine.replicas, or lower balancing.minimum"
            )
        if len(shared) == len(policies):
            raise ValueError(
                "balancing.inter: all policies share engines, which never move; leave it out, or "
                "set `engine.share` of some to `never`"
            )
        raise ValueError(
            "balancing.inter: no engine can serve another policy, since models or engine settings "
            "differ; set balancing.rebuild (not for attached servers), or make them the same"
        )


def engine_count(policy: PolicySpec) -> int:
    """Return the initial number of a policy's engines on each rollout worker: 1 until `replicas:
    auto` is decided."""
    engine = policy.engine
    pooled = sum(pool.replicas for pool in engine.pools)
    given = engine.replicas if isinstance(engine.replicas, int) else 1
    return len(engine.urls) or pooled or given


def _most_engines(policy: PolicySpec) -> int:
    return MAX_ENGINES if policy.engine.replicas == "auto" else engine_count(policy)


def _any_open(policies: Mapping[str, PolicySpec], shared: Collection[str]) -> bool:
    """Whether the number of engines is yet to be decided for some policy among several that may
    give engines to each other."""
    own = [policy for name, policy in policies.items() if name not in shared]
    return len(own) > 1 and any(policy.engine.replicas == "auto" for policy in own)


def exchange(source: PolicySpec, target: PolicySpec) -> Exchange:
    """Return how an engine of `source` can serve `target`: with new weights, by a restart, or
    never. Attached servers never move, since other rollout workers may be attached to them, too."""
    if source.engine.urls and source.simulated is None:
        return "never"
    alike = (
        source.model == target.model
        and _shape(source.lora) == _shape(target.lora)
        and source.simulated == target.simulated
        and source.engine.model_dump(exclude=_OWN) == target.engine.model_dump(exclude=_OWN)
    )
    if alike:
        return "in_place"
    return "never" if target.engine.urls and target.simulated is None else "rebuild"


def _shape(lora: LoraSpec | None) -> object:
    """Return the settings of an adapter that an engine depends on."""
    return lora and (lora.rank, lora.target_modules)
