"""Traits of policy losses and advantages, for checks of a job, corrections, statistics and passes.

The job is checked without torch, so the traits are here, and the functions in objectives.py and
advantages.py. Of a user's own function nothing is known: it has the traits that are safe for any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple


class LossTraits(NamedTuple):
    """Properties of a loss."""

    couples_tokens: bool = False
    """Whether a token's loss depends on the other tokens of its sample, which must then be in one
    pass."""
    masks: bool = False
    """Whether the tokens that it removes are left out, rather than clipped."""
    yields: bool = False
    """Whether a correction's weights replace its ratio. Other losses weigh by pi/mu anyway."""
    reads_dual_clip: bool = False
    """Whether `dual_clip` may have an effect."""
    scales_with_advantage: bool = True
    """Whether a token without an advantage has no loss."""


LOSS_TRAITS: Final[Mapping[str, LossTraits]] = {
    "ppo_clip": LossTraits(yields=True, reads_dual_clip=True),
    "gspo": LossTraits(couples_tokens=True, reads_dual_clip=True),
    "cispo": LossTraits(),
    "dppo_mask": LossTraits(masks=True),
}
OWN_LOSS: Final = LossTraits(couples_tokens=True, reads_dual_clip=True, scales_with_advantage=False)


def loss_traits(name: str) -> LossTraits:
    """Return the traits of the loss that a job names: a built-in one, or a user's own."""
    return LOSS_TRAITS.get(name, OWN_LOSS)


def losses_that(has: Callable[[LossTraits], bool]) -> str:
    """Return the names of the built-in losses with a trait, for messages: "`a` or `b`"."""
    return " or ".join(f"`{name}`" for name, traits in LOSS_TRAITS.items() if has(traits))


class AdvantageTraits(NamedTuple):
    """Properties of an advantage."""

    compares: bool = False
    """Whether it measures a sample against others of its group: one that is alone has none."""
    along_episodes: bool = False
    """Whether it is computed along an agent's turns of a trajectory, which one group must
    contain."""
    by_values: bool = False
    """Whether it is computed from a critic's values."""
    by_observations: bool = False
    """Whether it compares turns with equal observations, too (`step_groups`)."""
    averages: bool = True
    """Whether `baseline_weight` may have an effect."""
    normalizes: bool = False
    """Whether `normalize_per_agent` may have an effect."""
    of_whole_steps: bool = False
    """Whether it needs the rewards of the whole step."""


_OF_GROUPS: Final = AdvantageTraits(compares=True)
ADVANTAGE_TRAITS: Final[Mapping[str, AdvantageTraits]] = {
    "grpo": _OF_GROUPS,
    "dr_grpo": _OF_GROUPS,
    "rloo": _OF_GROUPS,
    "maxrl": _OF_GROUPS,
    "reinforce_plus_plus": AdvantageTraits(normalizes=True, of_whole_steps=True),
    "rae": AdvantageTraits(),
    "gigpo": AdvantageTraits(compares=True, along_episodes=True, by_observations=True),
    "hgpo": AdvantageTraits(
        compares=True, along_episodes=True, by_observations=True, averages=False
    ),
    "gae": AdvantageTraits(along_episodes=True, by_values=True, averages=False),
}
OWN_ADVANTAGE: Final = AdvantageTraits(normalizes=True)


def advantage_traits(name: str) -> AdvantageTraits:
    """Return the traits of the advantage that a job names: a built-in one, or a user's own."""
    return ADVANTAGE_TRAITS.get(name, OWN_ADVANTAGE)


def advantages_that(has: Callable[[AdvantageTraits], bool]) -> str:
    """Return the names of the built-in advantages with a trait, for messages: "`a` or `b`"."""
    return " or ".join(f"`{name}`" for name, traits in ADVANTAGE_TRAITS.items() if has(traits))
