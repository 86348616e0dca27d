"""Network modules of policies and critics: hidden layers, an optional GRU, a head; sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import nn

from troupe.job.sections.network import NetworkSpec


class Tanh(nn.Module):
    """`nn.Tanh`; without gradients by NumPy, which takes an eighth of torch's time on a CPU and
    differs at most in the last bit."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the hyperbolic tangent of inputs of any shape."""
        if torch.is_grad_enabled() or inputs.device.type != "cpu" or inputs.requires_grad:
            return torch.tanh(inputs)
        return torch.from_numpy(np.tanh(inputs.numpy()))


def draw(logits: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample an action from each distribution [..., n]; return actions and log-probs, both [...].

    By inverse transform sampling, one random number per row. An action of probability zero is never
    drawn.
    """
    # Actions as the first axis: reductions over it take a tenth of the time.
    log_probs = logits.flatten(0, -2).t().log_softmax(0)
    sums = log_probs.exp().cumsum(0)
    most = sums[-1]
    drawn = torch.rand(most.shape, generator=generator) * most
    # A number rounded up to the sum would lie beyond the last possible action.
    drawn = torch.minimum(drawn, torch.nextafter(most, torch.zeros_like(most)))
    actions = (sums[:-1] <= drawn).sum(0)
    found = log_probs.gather(0, actions.unsqueeze(0)).squeeze(0)
    return actions.view(logits.shape[:-1]), found.view(logits.shape[:-1])


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely action of each distribution [..., n], and its log-prob; both [...]."""
    log_probs = logits.log_softmax(-1)
    actions = logits.argmax(-1, keepdim=True)
    return actions.squeeze(-1), log_probs.gather(-1, actions).squeeze(-1)


_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    "relu": nn.ReLU,
    "tanh": Tanh,
    "elu": nn.ELU,
    "gelu": nn.GELU,
}
# Logit or value of illegal actions: below any other, and finite, so that no gradient becomes NaN.
ILLEGAL: Final = -1e9


class AgentNetwork(nn.Module):
    """The network of one agent, or of all agents that share parameters."""

    def __init__(self, spec: NetworkSpec, inputs: int, outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = inputs
        for units in spec.hidden:
            layers += [nn.Linear(width, units), _ACTIVATIONS[spec.activation]()]
            width = units
        self.body = nn.Sequential(*layers)
        self.memory = nn.GRU(width, spec.memory, batch_first=True) if spec.kind == "rnn" else None
        self.head = nn.Linear(spec.memory if self.memory else width, outputs)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Map [N, L, I] to [N, L, outputs]; rows are episodes from their beginning. Without a GRU:
        any [..., I]."""
        hidden: torch.Tensor = self.body(sequences)
        if self.memory is not None:
            hidden, _ = self.memory(hidden)
        found: torch.Tensor = self.head(hidden)
        return found

    def step(
        self, inputs: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute one step of every row: [N, I] and memory [1, N, H] (None at the start) -> outputs
        and memory."""
        hidden: torch.Tensor = self.body(inputs)
        if self.memory is not None:
            hidden, memory = self.memory(hidden.unsqueeze(1), memory)
            hidden = hidden.squeeze(1)
        return self.head(hidden), memory


class Networks(nn.Module):
    """The networks of one policy's agents: one shared `AgentNetwork`, or one each."""

    def __init__(self, spec: NetworkSpec, agents: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        count = 1 if spec.parameters == "shared" else agents
        self.members = nn.ModuleList(AgentNetwork(spec, inputs, outputs) for _ in range(count))
        self.recurrent = spec.kind == "rnn"

    def forward(
        self, sequences: torch.Tensor, who: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return outputs [M, outputs] at `index` [M] into the N * L positions of `sequences` [N, L,
        I] (None: all of them), whose rows are agents `who` [N]."""
        length = sequences.shape[1]
        if not self.recurrent:
            who = who.repeat_interleave(length) if length > 1 else who
            sequences = sequences.flatten(0, 1)
            if index is not None:
                sequences, who = sequences[index], who[index]
        if len(self.members) == 1:
            found: torch.Tensor = self.members[0](sequences)
        else:
            found = sequences.new_empty((*sequences.shape[:-1], self.outputs))
            for i in range(len(self.members)):
                rows = (who == i).nonzero(as_tuple=True)[0]
                found = found.index_copy(0, rows, self.members[i](sequences[rows]))
        if self.recurrent:
            found = found.flatten(0, 1)
            found = found if index is None else found[index]
        return found

    def step(
        self,
        inputs: torch.Tensor,
        memory: list[torch.Tensor | None],
        who: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Compute one step of all copies [B, A, I] -> [B, A, outputs], and the memories. `who`: the
        indices of the A agents; None: all of them."""
        if len(self.members) == 1:
            out, memory[0] = self.members[0].step(inputs.flatten(0, 1), memory[0])  # type: ignore[operator]
            return out.view(*inputs.shape[:2], self.outputs), memory
        outs = []
        for i, agent in enumerate(range(len(self.members)) if who is None else who):
            out, memory[i] = self.members[agent].step(inputs[:, i], memory[i])  # type: ignore[operator]
            outs.append(out)
        return torch.stack(outs, dim=1), memory


def identity_width(spec: NetworkSpec, agents: int) -> int:
    """Return the width of the one-hot agent id that is appended to observations; 0: none."""
    return agents if spec.parameters == "shared" and agents > 1 else 0


def initialize(module: nn.Module, gain: float) -> None:
    """Set orthogonal weights, scaled by `gain` in heads, and zero biases (Saxe et al. 2014; as in
    the implementations of PPO and MAPPO)."""
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            nn.init.zeros_(parameter)
        else:
            nn.init.orthogonal_(parameter, gain if "head" in name else 2**0.5)
