"""The peak of a learner's memory while it computes, by part, as torch's tracker measures it.

Run as a module, `python -m tests.trainer.peak CASE.json`, it prints the peak as JSON: of one
device, or, with torchrun's variables, of a gang's rank 0. It needs a process of its own: the
tracker hooks every module of the process, those of engines in other threads included.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh

from services.trainer.gang.group import GangGroup
from services.trainer.gang.rank_learner import RankLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.samples import Row
from tests.support.training import make_spec
from troupe.job import JobSpec

CPU = torch.device("cpu")
# Tokens of a pass, and of each of its rows.
TOKENS, LENGTH = 512, 128


def case(**changes: Any) -> dict[str, Any]:
    """Return a job whose policy is small, but much larger than the constants of a pass."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "max_position_embeddings": TOKENS,
        **changes.pop("config", {}),
    }
    model = {"config": config, "tokenizer": "/nowhere", "dtype": changes.pop("dtype", "bfloat16")}
    model = changes.pop("model", model)
    values = make_spec(Path("/nowhere"), model=model).model_dump(mode="json")
    policy = values["policies"]["solver"]
    policy["trainer"] |= {"kernels": "off", "forward_tokens": TOKENS, **changes.pop("trainer", {})}
    policy["engine"]["max_context"] = changes.pop("length", LENGTH)
    policy |= {"lora": changes.pop("lora", None)}
    for section, fields in changes.items():
        values[section] |= fields
    return values


class Tracker(MemTracker):
    """Torch's tracker, for any number of passes: statistics by module are of the last one."""

    def _pre_fw_hook(self, module: torch.nn.Module, inputs: Any) -> None:
        outer = len(self._mod_tracker.parents) <= 2
        if outer and not self._mod_tracker.is_bw and module in self.memory_tracking:
            self.reset_mod_stats()
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(self, module: Any, install_grad_hooks: bool = True) -> Any:
        # In a model with frozen weights, the tracker cannot tell gradients from activations.
        trained = all(parameter.requires_grad for parameter in module.parameters())
        return super()._track_module_params_and_buffers(module, install_grad_hooks and trained)


def rows(vocabulary: int, count: int, length: int = LENGTH) -> list[Row]:
    """`count` rows of one group, each of `length` tokens in a pass."""
    rng = np.random.default_rng(0)
    rewards = tuple(float(i % 2) for i in range(count))
    return [
        Row(
            f"s{i}",
            rng.integers(vocabulary, size=length + 1),
            8,
            np.full(length - 7, -1.0, np.float32),
            reward,
            rewards,
            0,
        )
        for i, reward in enumerate(rewards)
    ]


def peak(learner: Learner, tokens: int, length: int = LENGTH) -> dict[str, int]:
    """Bytes by torch's categories at the fullest moment of a later micro-batch and its step.

    `tokens`: those of a micro-batch over all ranks, in rows of `length`.
    """
    if learner.needs_reference:
        learner.set_reference(learner.weights())
    batch = rows(learner.vocabulary, tokens // length, length)
    learner.accumulate(batch)
    assert learner.apply(0).applied  # moments are made by the first step
    learner.accumulate(batch)
    tracker = Tracker()
    held: list[Any] = [learner.model, learner._optimizer]
    for gradients in (learner._gradients, learner._critic and learner._critic.gradients):
        held += gradients._exact._sums if gradients and gradients._exact else []
    if learner._critic is not None:
        held += [learner._critic._module, learner._critic._optimizer]
    if learner._passes._reference is not None:
        held.append(learner._passes._reference.model)
    tracker.track_external(*held)
    with tracker:
        learner.accumulate(batch)
        assert learner.apply(1).applied
    found = tracker.get_tracker_snapshot("peak")[CPU]
    return {str(getattr(kind, "value", kind)): size for kind, size in found.items()}


def _alone(values: dict[str, Any]) -> dict[str, int]:
    """Return the peak of a learner on one device."""
    spec = JobSpec.model_validate(values)
    policy = spec.policies["solver"]
    if policy.lora is None:
        model = load_model("solver", policy, 0)
    else:
        model = load_adapted("solver", policy, 0, CPU)
    learner = Learner(model, spec, "solver", share_prefixes=False)
    # One pass, with rows as long as the job allows.
    return peak(learner, policy.trainer.forward_tokens or 0, policy.engine.max_context or 0)


def main() -> None:
    """Measure one device, or one rank of a gang."""
    values = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        print(json.dumps(_alone(values)))
        return
    spec = JobSpec.model_validate(values)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    control = dist.new_group(backend="gloo")
    assert control is not None
    group = GangGroup(mesh, control, lambda: False, Path())
    found = peak(RankLearner(spec, "solver", group, CPU, share_prefixes=False), group.size * TOKENS)
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
