"""Random rows of a step, and the textbook gradient of their loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from services.trainer.learning.samples import Row
from tests.support.training import VOCABULARY
from troupe.job import AlgorithmSpec, JobSpec


@dataclass(frozen=True)
class Shape:
    """The shape of a random step."""

    groups: int = 3
    members: int = 4
    prompt: int = 8
    response: int = 8
    # Scatter of the behaviour's log-probs around the model's.
    noise: float = 0.3


@torch.no_grad()
def random_rows(model: Any, seed: int, shape: Shape | None = None) -> list[Row]:
    """Groups of answers to one prompt each, some of several turns, drawn near `model`."""
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for g in range(shape.groups):
        prompt = rng.integers(VOCABULARY, size=rng.integers(1, shape.prompt + 1))
        members = int(rng.integers(1, shape.members + 1))
        # Sometimes all equal: a group without signal.
        rewards = rng.integers(0, 3, size=members).astype(float) * (rng.random() > 0.15)
        for m in range(members):
            start = prompt
            if rng.random() < 0.3:  # a second turn: the prompt is longer
                extra = rng.integers(VOCABULARY, size=rng.integers(1, shape.prompt + 1))
                start = np.concatenate([prompt, extra])
            length = int(rng.integers(1, shape.response + 1))
            if rows and rng.random() < 0.1:
                length = 0
            ids = np.concatenate([start, rng.integers(VOCABULARY, size=length)]).astype(np.int64)
            heat = float(rng.choice([1.0, 1.0, 0.7]))
            row = Row(
                sample_id=f"q{g}_{m % 2}_q{g}-s0-t{m}",
                ids=ids,
                prompt_length=len(start),
                behaviour=np.zeros(length, np.float32),
                reward=float(rewards[m]),
                group_rewards=tuple(sorted(rewards.tolist())),
                version=0,
                temperature=heat,
                group=f"q{g}\tq{g}/agent{g % 2}",
                trajectory=f"q{g}-s0-t{m}",
                agent=f"agent{g % 2}",
            )
            exact = response_logprobs(model, row)[0].numpy()
            drawn = (exact + shape.noise * rng.standard_normal(length)).astype(np.float32)
            rows.append(replace(row, behaviour=drawn))
    return rows


def response_logprobs(model: Any, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs [T] and entropies [T] of a response, from one plain forward pass."""
    ids = torch.from_numpy(row.ids)
    logits = model(ids[None]).logits[0, row.prompt_length - 1 : -1] / row.temperature
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(1, ids[row.prompt_length :, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1)


def textbook_advantage(row: Row, rows: list[Row], algorithm: AlgorithmSpec) -> float:
    """Return the advantage of `row` in the first step, whose samples are `rows`."""
    mean = statistics.mean(row.group_rewards)
    match algorithm.advantage:
        case "rae":
            return row.reward
        case "rloo":
            others = list(row.group_rewards)
            others.remove(row.reward)
            return row.reward - (statistics.mean(others) if others else row.reward)
        case "dr_grpo":
            return row.reward - mean
        case "maxrl":
            return (row.reward - mean) / mean if mean else 0.0
        case "grpo":
            pool = list(row.group_rewards)
            if not algorithm.scale_by_std:
                return row.reward - mean
        case "reinforce_plus_plus":
            alike = row.agent if algorithm.normalize_per_agent else None
            pool = [other.reward for other in rows if alike in (None, other.agent)]
    spread = statistics.stdev(pool) if len(pool) > 1 else 0.0
    return (row.reward - statistics.mean(pool)) / (spread + 1e-4)


def full_batch_gradient(
    model: Any, rows: list[Row], spec: JobSpec, reference: Any = None
) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss over `rows` as the papers write it: float64 [..] by name.

    Shares no code with the trainer: one row at a time, autograd on the mean.
    """
    algorithm = spec.algorithm
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    cap = algorithm.correction_cap
    losses: list[torch.Tensor] = []
    for row in rows:
        if not row.response_length:
            continue
        advantage = textbook_advantage(row, rows, algorithm)
        logp, entropy = response_logprobs(model, row)
        drawn = torch.from_numpy(row.behaviour.copy()).double()
        recomputed = algorithm.old_logprobs == "recomputed"
        # The denominator of the loss's ratio; in a step's first update pi_old is pi.
        anchor = logp.detach() if recomputed else drawn
        ratio = torch.exp(logp - anchor)
        seen = torch.exp(logp - drawn).detach()
        if spec.correction == "sequence_masked":
            seen = seen.prod().expand_as(seen)
        masks = spec.correction in ("masked", "sequence_masked")
        inside = ((seen <= cap) & (seen >= 1 / cap)) | (not masks)
        if algorithm.loss == "gspo":
            # Masked tokens are not part of the sequence.
            s = (ratio[inside].prod() ** (1 / max(1, int(inside.sum())))).expand_as(ratio)
            loss = -torch.minimum(s * advantage, s.clamp(low, high) * advantage)
        elif algorithm.loss == "cispo":
            loss = -ratio.detach().clamp(max=high) * advantage * logp
        elif algorithm.loss == "dppo_mask":
            moved = (logp.exp() - anchor.exp()).detach() * (1 if advantage > 0 else -1)
            far = algorithm.clip_high if advantage > 0 else algorithm.clip_low
            weight = ratio.detach().clamp(max=20)
            loss = torch.where(moved > far, 0.0, -weight * advantage * logp)
        elif spec.correction == "none" or recomputed:
            loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        else:
            loss = -seen.clamp(max=cap) * advantage * logp
        if recomputed and spec.correction != "none":
            loss = seen.clamp(max=cap) * loss
        if algorithm.kl_coefficient:
            with torch.no_grad():
                first = response_logprobs(reference, row)[0]
            loss = loss + algorithm.kl_coefficient * (torch.exp(first - logp) - (first - logp) - 1)
        loss = loss - algorithm.entropy_coefficient * entropy
        loss = torch.where(inside, loss, 0.0)
        losses.append(loss)
    if algorithm.normalize == "token":
        total = torch.cat(losses).mean()
    elif algorithm.normalize == "constant":
        total = torch.cat(losses).sum() / (len(losses) * algorithm.constant_tokens)
    else:
        total = torch.stack([loss.mean() for loss in losses]).mean()
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def relative_error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """|found - exact| / |exact| in the L2 norm over all parameters."""
    flat = [torch.cat([g[name].double().flatten().cpu() for name in exact]) for g in (found, exact)]
    norm = float(flat[1].norm())
    distance = float((flat[0] - flat[1]).norm())
    return distance / norm if norm else distance
