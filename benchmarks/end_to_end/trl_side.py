"""TRL's side: GRPOTrainer on the same work, in an interpreter that has TRL (references.py).

    python -m benchmarks.end_to_end.trl_side MODEL WORK [--wait N] [--batch B] [--threads T]

MODEL is a directory with weights and tokenizer, WORK a JSON object (`workload.Work`). Writes one
JSON object per step to stdout: {"step", "seconds", "reward"}, `seconds` by a clock that stops while
it waits. With `--wait N` it reads a line of stdin before every N steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.end_to_end.workload import TOKENS, Work, reward, task


def rewards(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Return the rewards of a batch of conversations."""
    return [
        reward(prompt[-1]["content"], completion[0]["content"])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class Steps(TrainerCallback):  # type: ignore[misc]
    """A callback that reports every step, and waits for requests."""

    def __init__(self, wait: int) -> None:
        self._wait = wait
        self._began = 0.0

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Wait at the beginning of a round."""
        if self._wait and state.global_step % self._wait == 0:
            print(json.dumps({"waits": state.global_step}), flush=True)
            if not sys.stdin.readline():
                sys.exit(0)
            self._began = time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Note the beginning of the first step."""
        self._began = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Report the step."""
        logs = kwargs.get("logs") or {}
        if "reward" in logs:
            now = time.perf_counter()
            line = {"step": state.global_step, "seconds": now - self._began}
            print(json.dumps({**line, "reward": logs["reward"]}), flush=True)
            self._began = now


def trainer(model_dir: str, work: Work, batch: int, out: str) -> GRPOTrainer:
    """Return TRL in its fastest configuration here: float32, no checkpointing, no reference,
    nothing saved."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [[{"role": "user", "content": task(index)}] for index in range(work.tasks)]
    config = GRPOConfig(
        output_dir=out,
        seed=work.seed,
        max_steps=work.steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=work.samples // batch,
        num_generations=work.group,
        max_completion_length=TOKENS,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        epsilon=work.clip,
        # All responses are equally long, so that all ways of averaging agree.
        loss_type="bnpo",
        scale_rewards="group",
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=work.beta1,
        adam_beta2=work.beta2,
        adam_epsilon=1e-8,
        max_grad_norm=work.max_grad_norm,
        bf16=work.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    made = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    # The tokenizer has no token that ends a response, which TRL treats as a token called None.
    made.eos_token_ids = []
    made.generation_config.eos_token_id = None
    made.generation_kwargs["eos_token_id"] = None
    return made


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("work", type=json.loads)
    parser.add_argument("--wait", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = Work(**options.work)
    with tempfile.TemporaryDirectory() as out:
        made = trainer(options.model, work, options.batch or work.samples, out)
        made.remove_callback(PrinterCallback)
        made.add_callback(Steps(options.wait))
        made.train()


if __name__ == "__main__":
    main()
