"""Tokens removed by a clip or a mask have gradient zero, never NaN, however far pi is from mu.

Every loss with every correction, old log-probs, divergence and extreme ratio, in single precision,
against formulas of one token at a time in Python's own floats.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from troupe.algorithms.linear_loss import Head, linear_loss
from troupe.algorithms.losses import grpo_loss_sum, token_weights
from troupe.algorithms.statistics import TokenStatistics
from troupe.algorithms.values import clipped_values, value_loss
from troupe.job.sections.algorithm import Correction, Loss

LOSSES: list[Loss] = ["ppo_clip", "gspo", "cispo", "dppo_mask"]
CORRECTIONS: list[Correction] = ["none", "truncated", "masked", "sequence_masked"]
INF, NAN = math.inf, math.nan
# Of one token: log pi, log mu, log of the first version.
EXTREMES: dict[str, tuple[float, float, float]] = {
    "none": (-1.0, -1.1, -1.2),
    **{f"pi_over_mu_{x:+}": (-1.0, -1.0 - x, -1.2) for x in (10, -10, 100, -100, 1000, -1000)},
    **{f"first_over_pi_{x:+}": (-1.0, -1.1, -1.0 + x) for x in (10, -10, 100, -100, 1000, -1000)},
    "far_from_both": (-1000.0, -1.0, -1.0),
    "impossible_to_mu": (-1.0, -INF, -1.2),
    "impossible_to_pi": (-INF, -1.0, -1.2),
    "unknown_to_mu": (-1.0, NAN, -1.2),
    "unknown_to_pi": (NAN, -1.0, -1.2),
}
LENGTHS = [3, 2]
PLAIN = [(-1.0, -1.05), (-0.5, -0.6), (-2.0, -1.9), (-0.7, -0.72)]
LOW, HIGH, CAP, BETA, ENTROPY = 0.2, 0.3, 2.0, 0.1, 0.01
BOUND = 30.0


@dataclass(frozen=True)
class Case:
    loss: Loss
    correction: Correction
    recomputed: bool
    kl: bool
    extreme: str
    advantage: float

    @property
    def allowed(self) -> bool:
        return self.loss == "ppo_clip" or self.correction != "truncated" or self.recomputed

    @property
    def tokens(self) -> list[tuple[float, float, float, float]]:
        """log pi, log mu, log of the first version, log pi_old."""
        plain = [(pi, mu, pi - 0.1, pi - 0.02) for pi, mu in PLAIN]
        pi, mu, first = EXTREMES[self.extreme]
        # The step began near where it is.
        return [plain[0], (pi, mu, first, pi), *plain[1:]]

    def advantages(self) -> list[float]:
        return [self.advantage] * LENGTHS[0] + [-0.7] * LENGTHS[1]


def capped_exp(x: float) -> float:
    return math.exp(min(x, BOUND)) if x == x else NAN


def log_ratio(a: float, b: float) -> float:
    """Return a - b, both of which may be infinite."""
    return a - b


def expected(case: Case) -> tuple[list[bool], list[float], list[float]]:
    """Which tokens are in the loss, the terms of the loss, and its slopes by log pi."""
    tokens, advantages = case.tokens, case.advantages()
    bounds = [0, *itertools.accumulate(LENGTHS)]
    parts = [range(a, b) for a, b in itertools.pairwise(bounds)]
    of = [part for part in parts for _ in part]
    drawn = [log_ratio(old if case.recomputed else pi, mu) for pi, mu, _, old in tokens]
    if case.correction == "sequence_masked":
        drawn = [sum(drawn[i] for i in part) for part in of]
    seen = [capped_exp(x) for x in drawn]
    masks = case.correction in ("masked", "sequence_masked")
    kept = [not masks or 1 / CAP <= s <= CAP for s in seen]
    terms, slopes = [0.0] * len(tokens), [0.0] * len(tokens)
    anchors = [old if case.recomputed else mu for _, mu, _, old in tokens]
    for i, (pi, *_) in enumerate(tokens):
        if not kept[i]:
            continue
        a = advantages[i]
        x = log_ratio(pi, anchors[i])
        rho, flows = capped_exp(x), x != INF
        clipped = (a > 0 and rho > 1 + HIGH) or (a < 0 and rho < 1 - LOW)
        if not case.recomputed and case.loss == "ppo_clip" and case.correction != "none":
            weight = min(seen[i], CAP)
            terms[i], slopes[i] = -weight * a, -weight * a
        elif case.loss == "ppo_clip":
            terms[i] = -min(rho * a, min(max(rho, 1 - LOW), 1 + HIGH) * a)
            slopes[i] = 0.0 if clipped or not flows else -rho * a
        elif case.loss == "gspo":
            mates = [j for j in of[i] if kept[j]]
            y = sum(log_ratio(tokens[j][0], anchors[j]) for j in mates) / len(mates)
            s = capped_exp(y)
            terms[i] = -min(s * a, min(max(s, 1 - LOW), 1 + HIGH) * a)
            gone = (a > 0 and s > 1 + HIGH) or (a < 0 and s < 1 - LOW) or y == INF
            for j in () if gone else mates:
                slopes[j] -= s * a / len(mates) * (_weight(case, seen[i]))
        elif case.loss == "cispo":
            weight = min(rho, 1 + HIGH) * a
            terms[i], slopes[i] = -weight * pi if weight else 0.0, -weight
        else:
            moved = math.exp(pi) - (math.exp(anchors[i]) if not anchors[i] > 9 else INF)
            far = (a > 0 and moved > HIGH) or (a < 0 and moved < -LOW)
            weight = 0.0 if far else min(rho, 20.0) * a
            terms[i], slopes[i] = -weight * pi if weight else 0.0, -weight
        factor = _weight(case, seen[i])
        terms[i] *= factor
        if case.loss != "gspo":
            slopes[i] *= factor
    for i, (pi, _, first, _) in enumerate(tokens):
        if kept[i]:
            terms[i] -= ENTROPY * 0.5
            if case.kl:
                q = min(log_ratio(first, pi), BOUND)
                terms[i] += BETA * (math.exp(q) - q - 1)
                # Beyond the bound the exponential keeps its slope at the bound.
                far = log_ratio(first, pi) > BOUND
                slopes[i] += BETA * (0 if far else 1)
                slopes[i] -= BETA * math.exp(q) if log_ratio(first, pi) != INF else 0.0
    return kept, terms, slopes


def _weight(case: Case, seen: float) -> float:
    """The factor of a correction on the loss against pi_old."""
    return min(seen, CAP) if case.recomputed and case.correction != "none" else 1.0


CASES = [
    case
    for loss, correction, recomputed, kl, extreme, advantage in itertools.product(
        LOSSES, CORRECTIONS, [False, True], [False, True], EXTREMES, [1.0, -1.0]
    )
    if (case := Case(loss, correction, recomputed, kl, extreme, advantage)).allowed
]


def arguments(case: Case, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the arguments of `grpo_loss_sum`, except for log-probs and entropies, and its
    options."""
    columns = [
        torch.tensor(column, dtype=torch.float64) for column in zip(*case.tokens, strict=True)
    ]
    pi, mu, first, old = (column.to(dtype) for column in columns)
    advantages = torch.tensor(case.advantages(), dtype=dtype)
    weights = token_weights(LENGTHS, "token").to(dtype)
    options = {
        "clip_low": LOW,
        "clip_high": HIGH,
        "loss": case.loss,
        "correction": case.correction,
        "correction_cap": CAP,
        "sequences": torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)),
        "old_logprobs": old if case.recomputed else None,
        "reference_logprobs": first,
    }
    return [pi, mu, advantages, weights], options


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_loss_of_every_ratio_is_that_of_its_formula(dtype: torch.dtype) -> None:
    taken_out = broken = 0
    for case in CASES if dtype == torch.float32 else CASES[::3]:
        (pi, mu, advantages, weights), options = arguments(case, dtype)
        pi.requires_grad_()
        entropy = torch.full_like(pi, 0.5).detach().requires_grad_()
        loss = grpo_loss_sum(
            pi,
            mu,
            advantages,
            weights,
            **options,
            kl_coefficient=BETA if case.kl else 0.0,
            entropy=entropy,
            entropy_coefficient=ENTROPY,
        )
        by_pi, by_entropy = torch.autograd.grad(loss, (pi, entropy))
        kept, terms, slopes = expected(case)
        for i, inside in enumerate(kept):
            if not inside:
                taken_out += 1
                assert by_pi[i] == 0, case
                assert by_entropy[i] == 0, case
        if any(math.isnan(t) for t in terms):
            # An unmasked value that is not a number must not vanish: the step is refused.
            broken += 1
            assert not torch.isfinite(loss), case
            continue
        tolerance = 1e-4 if dtype == torch.float32 else 1e-11
        assert loss.item() == pytest.approx(sum(terms), rel=tolerance), case
        assert by_pi.tolist() == pytest.approx(slopes, rel=tolerance, abs=1e-6), case
        assert torch.isfinite(by_pi).all(), case
        assert by_entropy.tolist() == pytest.approx([-ENTROPY * k for k in kept]), case
    assert len(CASES) > 1500
    assert taken_out > 300
    assert broken > 0


@pytest.mark.parametrize("extreme", [name for name in EXTREMES if "unknown" not in name])
def test_metrics_are_finite(extreme: str) -> None:
    for case in (case for case in CASES if case.extreme == extreme and not case.kl):
        (pi, mu, advantages, _), options = arguments(case, torch.float32)
        total = TokenStatistics()
        total.add(torch.zeros(()), pi, mu, advantages, torch.zeros_like(pi), **options)
        found = total.metrics()
        if "impossible" in extreme:  # of that token the divergence is infinite
            del found["k3_kl"], found["kl"]
        assert all(map(math.isfinite, found.values())), (case, found)


def test_a_token_of_no_weight_is_taken_out_too() -> None:
    pi = torch.tensor([-1.0, NAN, -1.0], requires_grad=True)
    mu = torch.tensor([-1.1, NAN, -0.9])
    weights = torch.tensor([1.0, 0.0, 1.0])
    ones, sequences = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    for loss in LOSSES:
        total = grpo_loss_sum(
            pi, mu, ones, weights, clip_low=0.2, clip_high=0.2, loss=loss, sequences=sequences
        )
        (slopes,) = torch.autograd.grad(total, pi)
        assert torch.isfinite(total)
        assert slopes[1] == 0
        assert (slopes[[0, 2]] < 0).all()


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_losses_under_an_output_layer_equal_losses_of_full_logits(
    correction: Correction, block: int | None
) -> None:
    """Masked tokens reach neither the hidden states nor the layer, also block by block."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), 6, generator=generator)
    weight = torch.randn(9, 6, generator=generator)
    # A partly masked vocabulary has infinite logits, drawn or not.
    bias = torch.zeros(9)
    bias[8] = -INF
    targets = torch.tensor([1, 2, 3, 4, 5])
    chosen_cases = [c for c in CASES if c.correction == correction and c.kl]
    for case in chosen_cases[::5]:
        if "unknown" in case.extreme:
            continue
        (_, _, advantages, weights), options = arguments(case, torch.float64)
        found = []
        for dtype in (torch.float32, torch.float64):
            x, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
            logp = torch.log_softmax(x @ w.T + bias.to(dtype), -1)
            chosen = logp.gather(-1, targets[:, None])[:, 0]
            # As far from the computed value as the case specifies.
            pi, mu, first, old = zip(*case.tokens, strict=True)
            apart = [torch.tensor(t, dtype=torch.float64) for t in (mu, first, old)]
            here = torch.tensor([p if math.isfinite(p) else -1.0 for p in pi], dtype=torch.float64)
            base = chosen.detach().double()
            drawn, start, before = ((base + t - here).to(dtype) for t in apart)
            how = options | {
                "reference_logprobs": start,
                "old_logprobs": before if case.recomputed else None,
                "kl_coefficient": BETA,
                "entropy_coefficient": ENTROPY,
            }

            def loss_of(
                logprobs: torch.Tensor,
                entropy: torch.Tensor,
                part: slice,
                drawn: torch.Tensor = drawn,
                how: dict[str, Any] = how,
                advantages: torch.Tensor = advantages,
                weights: torch.Tensor = weights,
            ) -> torch.Tensor:
                own = {n: v[part] if isinstance(v, torch.Tensor) else v for n, v in how.items()}
                return grpo_loss_sum(
                    logprobs,
                    drawn[part],
                    advantages[part].to(logprobs.dtype),
                    weights[part].to(logprobs.dtype),
                    entropy=entropy,
                    **own,
                )

            if dtype == torch.float32:
                coupled = "gspo" in case.loss or correction == "sequence_masked"
                spans = LENGTHS if coupled else None
                heat = torch.ones(len(targets), 1)
                loss, _ = linear_loss(
                    x, Head(w, bias), targets, heat, loss_of, spans=spans, block=block
                )
            else:
                live = logp[:, :8]
                entropy = -(live.exp() * live).sum(-1)
                loss = loss_of(chosen, entropy, slice(0, len(targets)))
            found.append((loss, *torch.autograd.grad(loss, (x, w))))
        for ours, exact in zip(*found, strict=True):
            assert torch.isfinite(ours).all(), case
            scale = float(exact.detach().abs().max())
            torch.testing.assert_close(
                ours.double(), exact.double(), rtol=2e-4, atol=2e-4 * scale, msg=str(case)
            )


def test_values_far_from_where_they_were() -> None:
    """The critic's clip: no gradient for clipped values, the error's own gradient for the
    others."""
    for old, moved, target in itertools.product(
        (0.0, 1e4), (0.1, -0.1, 10.0, -10.0, 1e3, -1e3, 1e6), (0.0, 1e3, -1e3, 1e6)
    ):
        for clip in (0.0, 0.2):
            v = torch.tensor([old + moved], requires_grad=True)
            loss = value_loss(v, torch.tensor([target]), torch.tensor([old]), clip)
            (slope,) = torch.autograd.grad(loss.sum(), v)
            x, o = v.double().detach(), torch.tensor([old]).double()
            error = (x - target).square()
            cut = (clipped_values(x, o, clip) - target).square() if clip else error
            assert loss.item() == pytest.approx(0.5 * max(error, cut).item(), rel=1e-4, abs=1e-3)
            taken = clip > 0 and bool(cut > error) and abs(moved) > clip
            assert slope.item() == pytest.approx(
                0.0 if taken else (x - target).item(), rel=1e-4, abs=1e-3
            )
