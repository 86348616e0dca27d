"""GAE and PPO's losses and gradients against torchrl's own, which is installed apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.references import ReferenceUnavailable, reference_python
from troupe.algorithms.logprobs import selective_log_softmax
from troupe.algorithms.losses import grpo_loss_sum
from troupe.algorithms.values import gae, value_loss

pytestmark = pytest.mark.slow

TORCHRL = "torchrl==0.14.1"
# Tokens of each chain, with an earlier turn's reward in the second.
LENGTHS = [7, 12, 1, 5]
GAMMA, LAMBDA, CLIP, VALUE_CLIP, ENTROPY = 0.97, 0.9, 0.2, 0.15, 0.01


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has torchrl, and else what this one has."""
    try:
        return reference_python([TORCHRL], tmp_path_factory.mktemp("torchrl"))
    except ReferenceUnavailable as error:
        pytest.skip(str(error))


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    t, v = sum(LENGTHS), 9
    logits = torch.randn(t, v, generator=generator)
    ids = torch.randint(v, (t,), generator=generator)
    noise = torch.randn(3, t, generator=generator)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    rewards, done = torch.zeros(t), torch.zeros(t, dtype=torch.int64)
    rewards[ends] = torch.randn(len(LENGTHS), generator=generator)
    rewards[LENGTHS[0] + 4] = 0.7
    done[ends] = 1
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
    values = noise[0]
    scalars = {"gamma": GAMMA, "gae_lambda": LAMBDA, "clip": CLIP, "value_clip": VALUE_CLIP}
    return {
        "logits": logits,
        "ids": ids,
        "old": logprobs + 0.2 * noise[1],
        "values": values,
        "old_values": values + 0.3 * noise[2],
        "rewards": rewards,
        "done": done,
        **{name: torch.tensor(value) for name, value in scalars.items()},
        "entropy": torch.tensor(ENTROPY),
    }


def test_ppo_is_torchrls(python: Path, tmp_path: Path) -> None:
    batch = _batch()
    save_file(batch, tmp_path / "batch.safetensors")
    script, out = Path(__file__).with_name("torchrl_reference.py"), tmp_path / "out.safetensors"
    subprocess.run(
        [str(python), str(script), str(tmp_path / "batch.safetensors"), str(out)],
        check=True,
        timeout=300,
        env={**os.environ, "RL_WARNINGS": "False"},
        stdout=sys.stderr,
    )
    theirs = load_file(out)
    old_values = batch["old_values"]
    advantages = gae(batch["rewards"], old_values, LENGTHS, gamma=GAMMA, gae_lambda=LAMBDA).float()
    torch.testing.assert_close(advantages, theirs["advantages"], rtol=1e-5, atol=1e-5)
    returns = advantages + old_values
    torch.testing.assert_close(returns, theirs["returns"], rtol=1e-5, atol=1e-5)

    logits = batch["logits"].clone().requires_grad_()
    values = batch["values"].clone().requires_grad_()
    logprobs, entropy = selective_log_softmax(logits, batch["ids"])
    t = len(values)
    policy = (
        grpo_loss_sum(
            logprobs,
            batch["old"],
            advantages,
            torch.ones(t),
            clip_low=CLIP,
            clip_high=CLIP,
            entropy=entropy,
            entropy_coefficient=ENTROPY,
        )
        / t
    )
    # Theirs is the mean square without the half.
    value = 2 * value_loss(values, returns, old_values, VALUE_CLIP).sum() / t
    torch.autograd.backward(policy + value)
    found = {
        "policy": policy.detach().reshape(1),
        "value": value.detach().reshape(1),
        "policy_grad": logits.grad,
        "value_grad": values.grad[:, None] if values.grad is not None else None,
    }
    for name, ours in found.items():
        torch.testing.assert_close(ours, theirs[name], rtol=1e-5, atol=1e-5, msg=name)
    # The clips do touch some tokens and not others.
    moved = ((values - old_values).abs() > VALUE_CLIP).float().mean()
    assert 0 < moved < 1
