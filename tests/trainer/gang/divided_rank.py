"""A gloo rank that computes mixtures with divided experts, and with gathered ones.

Run as a module with torchrun's variables. Rank 0 prints one JSON object per architecture: the
largest differences of logits and gradients, and bytes of collectives.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.gang.experts import ExpertDivision, stacked_experts
from services.trainer.gang.gathering import whole
from services.trainer.gang.group import GangGroup, PassCollectives
from services.trainer.gang.loading import MetaTensors, fill_from, finish, shard
from tests.support.architectures import ARCHITECTURES, make
from tests.trainer.gang.ranks import join_ranks

# Without a recurrent layer, whose parts FSDP gathers separately.
NAMES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "granitemoe", "glm4_moe")
TOKENS = 11


class CountedCollectives(PassCollectives):
    """Counts the bytes that collectives of a pass receive, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, int] = {}

    def make(self, collective: Any, output: torch.Tensor, *, kept: bool = False) -> Any:
        """Count one."""
        at = getattr(collective, "func", collective).__qualname__
        kind = "counts" if kept else "rows" if "_exchanged" in at else at
        self.received[kind] = self.received.get(kind, 0) + output.nbytes
        return super().make(collective, output, kept=kept)


def computed(
    name: str, group: GangGroup, division: ExpertDivision | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, int], dict[str, int]]:
    """Return logits, whole gradients, and bytes of collectives in forward and backward passes."""
    model = make(name)
    known = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    metas = MetaTensors(empty)
    counted = CountedCollectives()
    if division is not None:
        division.collectives = counted
    module = counted.follow(shard(empty, group.mesh, division=division))
    wanted = metas.of(module)
    parts = {}
    for key, meta in wanted.items():
        rows = meta.part()[1]
        parts[key] = known[key][rows.start : rows.stop] if known[key].ndim else known[key]
    fill_from(parts, wanted, shared=False)
    finish(module, torch.device("cpu"))
    # Other tokens on each rank.
    torch.manual_seed(group.rank)
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    logits = module(input_ids=ids, use_cache=False).logits
    forward = dict(counted.received)
    logits.square().sum().backward()
    gradients = {key: whole(p.grad) for key, p in module.named_parameters() if p.grad is not None}
    return logits.detach(), gradients, forward, counted.received


def main() -> None:
    """All architectures, one after another."""
    # An in-place sum would lose FSDP's hook, and the weights in the backward pass with it.
    warnings.filterwarnings("error", message="FSDP2-wrapped module .*Experts. returned a view")
    mesh, control = join_ranks()
    size = dist.get_world_size()
    group = GangGroup(mesh, control, lambda: False, Path())
    division = ExpertDivision(group, size)
    for name in NAMES:
        logits, gradients, forward, every = computed(name, group, division)
        whole_logits, whole_gradients, whole_forward, _ = computed(name, group, None)
        assert set(gradients) == set(whole_gradients)
        experts = stacked_experts(make(name))
        config = ARCHITECTURES[name]
        sent = len(experts) * config["num_experts_per_tok"] * TOKENS * config["hidden_size"] * 4
        rows = torch.tensor([every["rows"], 2 * 2 * sent])
        dist.all_reduce(rows)
        gathered, gathered_whole = (
            sum(n for kind, n in one.items() if "AllGather" in kind)
            for one in (forward, whole_forward)
        )
        if group.rank == 0:
            found = {
                "architecture": name,
                "logits": float((logits - whole_logits).abs().max()),
                "gradients": max(
                    float((one - whole_gradients[key]).abs().max() / one.abs().max().clamp(1))
                    for key, one in gradients.items()
                ),
                "gathered": gathered,
                "gathered_whole": gathered_whole,
                "experts_bytes": sum(p.nbytes for one in experts for p in one.parameters()),
                "exchanged": int(rows[0]),
                "pairs_bytes": int(rows[1]) // 4,
            }
            print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
