"""Losses and gradients as TRL computes them; test_trl.py runs it with a Python that has TRL.

`python trl_reference.py BATCH CASES OUT`: BATCH a safetensors file (logits [B, T, V], ids, mask,
old, ref, start, advantages), CASES a JSON object of settings by name, OUT gets `{name}/loss` and
`{name}/grad`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from trl.trainer.grpo_trainer import GRPOTrainer  # type: ignore[import-not-found]
from trl.trainer.utils import (  # type: ignore[import-not-found]
    entropy_from_logits,
    selective_log_softmax,
)


def compute(batch: dict[str, torch.Tensor], case: dict[str, Any]) -> tuple[Any, Any]:
    """Loss, and its gradient by the logits, of TRL's own `_compute_loss`."""
    logits = batch["logits"].clone().requires_grad_()
    logps = selective_log_softmax(logits, batch["ids"])
    entropies = entropy_from_logits(logits)
    correction = case.get("correction", "none")
    inputs = {
        "prompt_ids": batch["ids"][:, :1],
        "prompt_mask": batch["mask"][:, :1],
        "completion_ids": batch["ids"],
        "completion_mask": batch["mask"],
        "advantages": batch["advantages"],
        "ref_per_token_logps": batch["ref"],
        "num_items_in_batch": batch["mask"].sum(),
    }
    if correction == "none":
        inputs["old_per_token_logps"] = batch["old"]
    else:
        # As computed by `_generate_and_score_completions` from the engine's log-probs.
        start = batch["start"] if case.get("old") else logps.detach()
        if case.get("old"):
            inputs["old_per_token_logps"] = start
        difference = (start - batch["old"]) * batch["mask"]
        if correction == "sequence_masked":
            difference = difference.sum(-1, keepdim=True)
        ratio = difference.exp()
        cap = case["correction_cap"]
        if correction == "truncated":
            ratio = ratio.clamp(max=cap)
        else:
            ratio = ratio.masked_fill((ratio < 1 / cap) | (ratio > cap), 0.0)
        inputs["importance_sampling_ratio"] = ratio
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, **_: x,
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=case.get("delta"), steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        loss_type=case["loss_type"],
        importance_sampling_level=case.get("level", "token"),
        epsilon_low=case["epsilon_low"],
        epsilon_high=case["epsilon_high"],
        beta=case.get("beta", 0.0),
        entropy_coef=case.get("entropy", 0.0),
        _entropy_bonus_enabled="entropy" in case,
        use_adaptive_entropy=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=correction != "none",
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=case["constant"],
        _metrics={"train": defaultdict(list)},
    )
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad


def main() -> None:
    """All cases."""
    source, cases, out = sys.argv[1:]
    batch = load_file(source)
    found = {}
    for name, case in json.loads(cases).items():
        found[f"{name}/loss"], found[f"{name}/grad"] = compute(batch, case)
    save_file(found, out)


if __name__ == "__main__":
    main()
