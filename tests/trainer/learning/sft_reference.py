"""Losses of TRL's SFTTrainer; test_supervised.py runs it with a Python that has TRL.

`python sft_reference.py MODEL ROWS OUT`: MODEL a checkpoint with tokenizer, ROWS a JSON list of
{input_ids, labels}, in batches of 4; OUT gets the loss of every step, a JSON list.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]


class InOrder(SFTTrainer):  # type: ignore[misc]
    """With the rows in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main(model: str, rows: str, out: str) -> None:
    """Train, and write the losses."""
    with open(rows, encoding="utf-8") as file:
        data = Dataset.from_list(json.load(file))
    settings = SFTConfig(
        output_dir=out + ".dir",
        max_steps=len(data) // 4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=settings,
        train_dataset=data,
    )
    losses: list[float] = []
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        # Logged ones are rounded.
        found = plain(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        losses.append(loss.item())
        return found

    trainer.compute_loss = compute_loss
    trainer.train()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
