"""Losses of TRL's DPOTrainer; test_preferences.py runs it with a Python that has TRL.

`python dpo_reference.py MODEL ROWS OUT LOSS`: MODEL a checkpoint with tokenizer, ROWS a JSON list
of {prompt_ids, chosen_ids, rejected_ids}, in batches of 4; OUT gets {losses, norms}, a number per
step: the loss, and the norm of its gradient before it is clipped.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found]


class InOrder(DPOTrainer):  # type: ignore[misc]
    """With the rows as they are, in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset


def main(model: str, rows: str, out: str, loss: str) -> None:
    """Train, and write the losses."""
    with open(rows, encoding="utf-8") as file:
        data = Dataset.from_list(json.load(file))
    settings = DPOConfig(
        output_dir=out + ".dir",
        max_steps=len(data) // 4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        loss_type=loss,
        beta=0.4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=settings,
        train_dataset=data,
    )
    plain, clip = trainer.compute_loss, trainer.accelerator.clip_grad_norm_

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        # Logged ones are rounded.
        value = plain(*args, **kwargs)
        found["losses"].append((value[0] if isinstance(value, tuple) else value).item())
        return value

    def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        found["norms"].append(float(norm))
        return norm

    trainer.compute_loss, trainer.accelerator.clip_grad_norm_ = compute_loss, clip_grad_norm
    trainer.train()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
