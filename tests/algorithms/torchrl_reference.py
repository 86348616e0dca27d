"""PPO as torchrl computes it; test_torchrl.py runs it with a Python that has torchrl.

`python torchrl_reference.py BATCH OUT`: BATCH a safetensors file (logits [T, V], values [T],
old_values [T], ids [T], old [T], rewards [T], done [T]; scalars gamma, gae_lambda, clip,
value_clip, entropy), OUT gets advantages, returns, losses and gradients.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict  # type: ignore[import-not-found]
from tensordict.nn import (  # type: ignore[import-not-found]
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torchrl.objectives import ClipPPOLoss  # type: ignore[import-not-found]
from torchrl.objectives.value.functional import (  # type: ignore[import-not-found]
    generalized_advantage_estimate,
)


class Given(torch.nn.Module):
    """A table of the network's outputs for the t-th state."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """[T] or [T, 1] indices to rows."""
        return self.table[index.reshape(-1)]


def main() -> None:
    """Advantages, then the loss on them."""
    source, out = sys.argv[1:]
    b: dict[str, Any] = load_file(source)
    t = len(b["values"])
    done = b["done"].bool()[:, None]
    following = torch.cat([b["old_values"][1:], torch.zeros(1)])[:, None]
    advantage, target = generalized_advantage_estimate(
        float(b["gamma"]),
        float(b["gae_lambda"]),
        b["old_values"][:, None],
        following,
        b["rewards"][:, None],
        done,
        done,
    )
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(Given(b["logits"]), in_keys=["index"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(
        Given(b["values"][:, None]), in_keys=["index"], out_keys=["state_value"]
    )
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=float(b["clip"]),
        entropy_coeff=float(b["entropy"]),
        critic_coeff=1.0,
        loss_critic_type="l2",
        normalize_advantage=False,
        clip_value=float(b["value_clip"]),
    )
    loss.set_keys(sample_log_prob="old")
    data = TensorDict(
        {
            "index": torch.arange(t)[:, None],
            "action": b["ids"],
            "old": b["old"],
            "advantage": advantage,
            "value_target": target,
            "state_value": b["old_values"][:, None],
        },
        batch_size=[t],
    )
    found = loss(data)
    policy = found["loss_objective"] + found["loss_entropy"]
    torch.autograd.backward(policy + found["loss_critic"])
    tables = [p for p in loss.parameters() if p.grad is not None]
    grads = {"policy_grad" if p.shape[-1] > 1 else "value_grad": p.grad for p in tables}
    result = {
        "advantages": advantage[:, 0],
        "returns": target[:, 0],
        "policy": policy.detach().reshape(1),
        "value": found["loss_critic"].detach().reshape(1),
        **grads,
    }
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, out)


if __name__ == "__main__":
    main()
