"""TRL's side: `python -m benchmarks.trainer.theirs SIZE CASE ...`, in an interpreter with TRL.

GRPOTrainer's own loop, from `_prepare_inputs` on: it gets the batch in place of its generated one,
with its own padding.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.trainer.utils import pad  # type: ignore[import-not-found]

from benchmarks.trainer.cases import Case, cases_of, load
from benchmarks.trainer.measure import Meter, clock_of, resident


class Given(GRPOTrainer):  # type: ignore[misc]
    """A trainer on the samples of a case, as if it had just generated them."""

    case: Case

    def _generate_and_score_completions(self, _inputs: Any) -> dict[str, Any]:
        rows = self.case.rows()
        prompts = [torch.from_numpy(ids[:length]) for ids, length, _ in rows]
        answers = [torch.from_numpy(ids[length:]) for ids, length, _ in rows]
        return {
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
            "prompt_mask": pad(
                [torch.ones_like(p) for p in prompts], padding_value=0, padding_side="left"
            ),
            "completion_ids": pad(answers, padding_value=0, padding_side="right"),
            "completion_mask": pad(
                [torch.ones_like(a) for a in answers], padding_value=0, padding_side="right"
            ),
            "advantages": torch.tensor(self.case.advantages()),
            "num_items_in_batch": torch.tensor(sum(len(a) for a in answers)),
        }


class Timed(TrainerCallback):  # type: ignore[misc]
    """A callback that measures every step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.norms: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin the measurement before the forward passes."""
        self._meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End the measurement after the optimizer's step."""
        self._meter.end()

    def on_log(self, _args: Any, _state: Any, _control: Any, **kwargs: Any) -> None:
        """Record the step's logs."""
        if "grad_norm" in (logs := kwargs.get("logs") or {}):
            self.norms.append(float(logs["grad_norm"]))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", help="full, quick, or the directory of a checkpoint")
    parser.add_argument("case")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = cases_of(options.size)[options.case]
    samples = case.groups * case.members
    before = resident()
    model = load(case)
    words = {str(index): index for index in range(2)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")),
        pad_token="0",
        eos_token="1",
    )
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            max_steps=options.steps + 1,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=samples // options.batch,
            num_generations=case.members,
            loss_type="dapo",
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=options.checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        prompts = [str(index) for index in range(case.groups * 100)]
        trainer = Given(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        )
        trainer.case = case
        meter = Meter(before, clock_of(options.threads))
        timed = Timed(meter)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(timed)
        trainer.train()
        meter.report(grad_norm=timed.norms[0])


if __name__ == "__main__":
    main()
