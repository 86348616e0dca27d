"""Losses, corrections and advantages as users write them, some of them wrong."""

from __future__ import annotations

from typing import Any

import torch

from troupe.algorithms.advantages import SampleBatch
from troupe.algorithms.objectives import Tokens


def ppo(tokens: Tokens) -> torch.Tensor:
    """`ppo_clip`, written again."""
    ratio = torch.exp(tokens.logprobs - tokens.old_logprobs)
    clipped = ratio.clamp(1 - tokens.clip_low, 1 + tokens.clip_high)
    return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)


def by_sample(tokens: Tokens) -> torch.Tensor:
    """A loss that couples the tokens of a sample: the mean log-ratio of each, times A."""
    count = int(tokens.samples.max()) + 1
    log_ratio = tokens.logprobs - tokens.old_logprobs
    sums = torch.zeros(count, dtype=log_ratio.dtype).index_add(0, tokens.samples, log_ratio)
    sizes = torch.bincount(tokens.samples, minlength=count).clamp(min=1)
    return -(sums / sizes)[tokens.samples].exp() * tokens.advantages


def cross_entropy(tokens: Tokens) -> torch.Tensor:
    """A loss that does not depend on advantages."""
    return -tokens.logprobs


def halved(tokens: Tokens) -> torch.Tensor:
    """A correction: half weight, and none for tokens that the policy finds unlikely now."""
    return torch.where(tokens.logprobs - tokens.behaviour_logprobs > -0.5, 0.5, 0.0)


def centred(samples: SampleBatch) -> torch.Tensor:
    """`dr_grpo`, written again."""
    means = [sum(group) / len(group) for group in samples.group_rewards]
    return samples.rewards - torch.tensor(means, dtype=torch.float64)


def fading(samples: SampleBatch) -> torch.Tensor:
    """An advantage by token: the reward, less and less of it."""
    parts = [
        reward * 0.5 ** torch.arange(int(length), dtype=torch.float64)
        for reward, length in zip(samples.rewards, samples.lengths, strict=True)
    ]
    return torch.cat(parts)


def of_step(samples: SampleBatch) -> torch.Tensor:
    """`reinforce_plus_plus`, written again."""
    assert samples.step_mean is not None
    assert samples.step_std is not None
    return (samples.rewards - samples.step_mean) / (samples.step_std + 1e-4)


of_step.whole_step = True  # type: ignore[attr-defined]


# Wrong ones.


def too_short(tokens: Tokens) -> torch.Tensor:
    return -tokens.logprobs[:-1]


def summed(tokens: Tokens) -> torch.Tensor:
    return -tokens.logprobs.sum()


def detached(tokens: Tokens) -> torch.Tensor:
    return -tokens.logprobs.detach() * tokens.advantages


def as_list(tokens: Tokens) -> Any:
    return tokens.logprobs.tolist()


def infinite(tokens: Tokens) -> torch.Tensor:
    return -tokens.logprobs / torch.zeros_like(tokens.logprobs)


def derives(tokens: Tokens) -> torch.Tensor:
    tokens.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return -tokens.logprobs


def in_place(tokens: Tokens) -> torch.Tensor:
    tokens.advantages.mul_(2.0)
    return -tokens.logprobs * tokens.advantages


def leaves(tokens: Tokens) -> torch.Tensor:
    raise SystemExit("enough")


def with_gradients(tokens: Tokens) -> torch.Tensor:
    return torch.ones_like(tokens.logprobs, requires_grad=True) * 1.0


def negative(tokens: Tokens) -> torch.Tensor:
    return -torch.ones_like(tokens.logprobs)


def of_two(tokens: Tokens, more: float) -> torch.Tensor:
    return -tokens.logprobs * more


def late(tokens: Tokens) -> torch.Tensor:
    """Right on the example, wrong in training: its vocabulary has rarer tokens than that."""
    return -tokens.logprobs / (1.0 if float(tokens.logprobs.detach().min()) > -3.5 else 0.0)


def pairs(samples: SampleBatch) -> torch.Tensor:
    return torch.stack([samples.rewards, samples.rewards], 1)


def fails_on_nine(tokens: Tokens) -> torch.Tensor:
    if bool((tokens.behaviour_logprobs == -9.0).any()):
        raise ValueError("nine")
    return ppo(tokens)
