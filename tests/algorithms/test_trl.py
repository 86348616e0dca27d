"""Losses and gradients against TRL's own `GRPOTrainer._compute_loss`, which is installed apart.

TRL 1.16 has no `dppo_mask`; of its loss types `sapo` and `vespo` are not ours (docs/algorithms.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.references import TRL, ReferenceUnavailable, reference_python
from troupe.algorithms.logprobs import selective_log_softmax
from troupe.algorithms.losses import grpo_loss_sum, normalizer, token_weights

pytestmark = pytest.mark.slow

LENGTHS = [7, 1, 5, 9, 3, 9]
CONSTANT = 12
# name: (TRL's settings, ours). TRL's `cispo` names the cap itself, the paper and we what exceeds 1.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"normalize": "sequence"}),
    "bnpo": ({"loss_type": "bnpo"}, {"normalize": "token"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"normalize": "constant"}),
    "gspo": (
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"loss": "gspo", "normalize": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "gspo_token": ({"loss_type": "bnpo", "level": "sequence"}, {"loss": "gspo"}),
    # Sums over tokens, like a constant length of one token.
    "luspo": (
        {"loss_type": "luspo", "level": "sequence", "constant": 1},
        {"loss": "gspo", "normalize": "constant", "constant": 1},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"loss": "cispo", "clip_high": 0.3}),
    "kl": ({"loss_type": "grpo", "beta": 0.1}, {"normalize": "sequence", "kl_coefficient": 0.1}),
    "kl_gspo": (
        {"loss_type": "dr_grpo", "level": "sequence", "beta": 0.1},
        {"loss": "gspo", "normalize": "constant", "kl_coefficient": 0.1},
    ),
    # Two-sided clipping.
    "delta": (
        {"loss_type": "bnpo", "delta": 1.05, "epsilon_high": 0.04},
        {"dual_clip": 1.05, "clip_high": 0.04},
    ),
    "entropy": ({"loss_type": "bnpo", "entropy": 0.05}, {"entropy_coefficient": 0.05}),
    **{
        correction: (
            {"loss_type": "bnpo", "correction": correction, "correction_cap": 1.2},
            {"correction": correction, "correction_cap": 1.2},
        )
        for correction in ("truncated", "masked", "sequence_masked")
    },
    # Clipped against the weights at the step's beginning, and weighted by their pi_old/mu.
    **{
        f"decoupled_{correction}": (
            {"loss_type": "bnpo", "correction": correction, "correction_cap": 1.2, "old": True},
            {"correction": correction, "correction_cap": 1.2, "old": True},
        )
        for correction in ("truncated", "masked", "sequence_masked")
    },
    # A weight is of what is earned, not of the divergence. (What a mask takes out carries none
    # here, and all of it in TRL.)
    **{
        f"kl_truncated_{loss}": (
            {
                "loss_type": "bnpo",
                "level": "sequence" if loss == "gspo" else "token",
                "beta": 0.1,
                "correction": "truncated",
                "correction_cap": 1.2,
                "old": True,
            },
            {
                "loss": loss,
                "kl_coefficient": 0.1,
                "correction": "truncated",
                "correction_cap": 1.2,
                "old": True,
            },
        )
        for loss in ("ppo_clip", "gspo")
    },
    "decoupled_cispo": (
        {
            "loss_type": "cispo",
            "epsilon_high": 1.1,
            "correction": "truncated",
            "correction_cap": 1.2,
            "old": True,
        },
        {
            "loss": "cispo",
            "clip_high": 0.1,
            "correction": "truncated",
            "correction_cap": 1.2,
            "old": True,
        },
    ),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has TRL, and else what this one has."""
    try:
        return reference_python([TRL], tmp_path_factory.mktemp("trl"))
    except ReferenceUnavailable as error:
        pytest.skip(str(error))


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    b, t, v = len(LENGTHS), max(LENGTHS), 11
    logits = torch.randn(b, t, v, generator=generator)
    ids = torch.randint(v, (b, t), generator=generator)
    logps = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
    noise = torch.randn(3, b, t, generator=generator)
    mask = (torch.arange(t)[None] < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "logits": logits,
        "ids": ids,
        "mask": mask,
        "old": logps + 0.15 * noise[0],
        "ref": logps + 0.3 * noise[1],
        "start": logps + 0.2 * noise[2],
        "advantages": torch.randn(b, generator=generator),
    }


def _ours(batch: dict[str, torch.Tensor], how: dict[str, Any]) -> tuple[Any, Any]:
    how = {"clip_low": 0.2, "clip_high": 0.2, "normalize": "token", **how}
    normalize, constant = how.pop("normalize"), how.pop("constant", CONSTANT)
    old = batch["start"][batch["mask"].bool()] if how.pop("old", False) else None
    logits = batch["logits"].clone().requires_grad_()
    kept = batch["mask"].bool()
    logprobs, entropy = selective_log_softmax(logits[kept], batch["ids"][kept])
    sizes = torch.tensor(LENGTHS)
    loss = grpo_loss_sum(
        logprobs,
        batch["old"][kept],
        torch.repeat_interleave(batch["advantages"], sizes),
        token_weights(LENGTHS, normalize).float(),
        sequences=torch.repeat_interleave(torch.arange(len(LENGTHS)), sizes),
        old_logprobs=old,
        reference_logprobs=batch["ref"][kept],
        entropy=entropy,
        **how,
    ) / normalizer(LENGTHS, normalize, constant)
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad


def test_losses_and_gradients_are_trls(python: Path, tmp_path: Path) -> None:
    batch = _batch()
    save_file(batch, tmp_path / "batch.safetensors")
    defaults = {"epsilon_low": 0.2, "epsilon_high": 0.2, "constant": CONSTANT}
    cases = {name: {**defaults, **theirs} for name, (theirs, _) in CASES.items()}
    script, out = Path(__file__).with_name("trl_reference.py"), tmp_path / "out.safetensors"
    files = [str(tmp_path / "batch.safetensors"), json.dumps(cases), str(out)]
    subprocess.run(
        [str(python), str(script), *files],
        check=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
    )
    theirs = load_file(out)
    plain = theirs["bnpo/grad"]
    for name, (_, how) in CASES.items():
        loss, grad = _ours(batch, how)
        # With corrections the loss has another constant, so that only gradients are compared.
        if "correction" not in how or "old" in how:
            torch.testing.assert_close(loss, theirs[f"{name}/loss"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, theirs[f"{name}/grad"], rtol=1e-5, atol=1e-5)
        relative = (grad - theirs[f"{name}/grad"]).norm() / theirs[f"{name}/grad"].norm()
        assert relative < 1e-5, name
        # Each case is about something.
        assert name == "bnpo" or (grad - plain).norm() > 1e-3 * plain.norm(), name
