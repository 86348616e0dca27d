"""Traits of policy losses: what checks of a job, corrections, statistics and passes read of a loss.

The job is checked without torch, so the traits are here, and the functions in objectives.py. Of a
user's own loss nothing is known: it has the traits that are safe for any loss.
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
