"""CoMLRL's side: MAGRPOTrainer on the same work, in an interpreter that has CoMLRL (references.py).

    python -m benchmarks.comlrl.comlrl_side MODEL WORK [--defaults] [--threads T]

MODEL is a directory with weights and tokenizer, WORK a JSON object (`workload.Work`). Writes one
JSON object per update of both agents to stdout: {"step", "reward", "samples"}, `samples` being the
responses of both agents since the one before. `--defaults`: CoMLRL's own sampling and batches
instead of the work's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any, Final

import torch
from comlrl.trainers.reinforce import (  # type: ignore[import-not-found]
    MAGRPOConfig,
    MAGRPOTrainer,
)
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.comlrl.workload import AGENTS, team_reward
from benchmarks.end_to_end.workload import TOKENS, Work, task


class Reporting(MAGRPOTrainer):  # type: ignore[misc]
    """The trainer, which reports every update of its last agent."""

    def __init__(self, *args: Any, steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done, self._steps = 0, steps

    def _process_buffer(self, agent_idx: int, buffer: list[Any]) -> Any:
        rewards = [sample.node_mean_reward for sample in buffer]
        samples = sum(len(sample.returns) for sample in buffer)
        found = super()._process_buffer(agent_idx, buffer)
        if rewards and agent_idx == self.num_agents - 1:
            self._done += 1
            line = {
                "step": self._done,
                "reward": statistics.fmean(rewards),
                "samples": samples * self.num_agents,
            }
            print(json.dumps(line), flush=True)
            if self._done == self._steps:
                raise Done
        return found


class Done(Exception):
    """All steps are done."""


# Without evaluations and logs. `joint_mode` is "aligned", its default.
_COMMON: Final = {"num_agents": len(AGENTS), "num_turns": 1, "eval_interval": 0}


def trainer(model_dir: str, work: Work, *, defaults: bool) -> Reporting:
    """Return CoMLRL on the same work: float32, no reference, nothing saved."""
    own = (
        {}
        if defaults
        else {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            # A step is one update of each agent from all of its queries.
            "rollout_buffer_size": work.queries,
            "train_batch_size": work.queries,
        }
    )
    config = MAGRPOConfig(
        **_COMMON,
        **own,
        num_train_epochs=1_000_000,
        num_generations=work.group,
        max_new_tokens=TOKENS,
        agent_learning_rate=work.lr,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    agents = [AutoModelForCausalLM.from_pretrained(model_dir) for _ in AGENTS]
    for agent in agents:
        # The tokenizer has no token that ends a response; generation must not take the padding.
        agent.generation_config.eos_token_id = None
        agent.generation_config._from_model_config = False
    questions = [task(index) for index in range(work.tasks)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    made = Reporting(
        agents=agents,
        num_agents=len(agents),
        tokenizer=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts, "question": questions}),
        reward_func=_rewards,
        args=config,
        wandb_config=None,
        steps=work.steps,
    )
    made.verbose = False
    for optimizer in made.optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
    return made


def _rewards(*completions: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
    return [
        team_reward(batch_items[0]["question"], texts) for texts in zip(*completions, strict=True)
    ]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("work", type=json.loads)
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    work = Work(**options.work)
    torch.manual_seed(work.seed)
    random.seed(work.seed)
    made = trainer(options.model, work, defaults=options.defaults)
    try:
        made.train()
    except Done:
        return


if __name__ == "__main__":
    main()
