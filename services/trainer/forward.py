"""Logits of exactly the tokens that are scored, from any Hugging Face causal LM."""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.batching import Costs, Piece
from troupe.rpc import FailedPrecondition


def response_logits(model: Any, piece: Piece) -> torch.Tensor:
    """Logits [N, V] at the piece's positions.

    The hidden states are narrowed just before the output layer, so that neither it nor
    anything behind it (soft-capping, scaling) sees prompt tokens or padding.
    """

    def narrow(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        flat = hidden.reshape(-1, hidden.shape[-1]).index_select(0, piece.positions)
        return (flat.unsqueeze(0), *rest)

    head = model.get_output_embeddings()
    if head is None:
        raise FailedPrecondition(
            f"{type(model).__name__} has no output embeddings",
            kind="model_unsupported",
            remedy="Use a causal language model.",
        )
    handle = head.register_forward_pre_hook(narrow)
    try:
        output = model(
            input_ids=piece.input_ids,
            attention_mask=piece.mask,
            position_ids=piece.position_ids,
            use_cache=False,
        )
    finally:
        handle.remove()
    logits: torch.Tensor = output.logits
    return logits.squeeze(0)


def costs_of(model: Any) -> Costs:
    """What a token and a pair of tokens cost in `model`, in floating-point operations."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    body = sum(p.numel() for p in model.parameters()) - head.weight.numel()
    heads = getattr(config, "num_attention_heads", 1)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # Attention over short sequences runs at a fraction of the speed of the projections.
    return Costs(token=2.0 * max(body, 1), pair=3 * 4.0 * width * config.num_hidden_layers)


def supports_sharing(model: Any, tolerance: float = 1e-3) -> bool:
    """Whether the shared layout gives this model's log-probs: tried out, not assumed.

    Sliding windows, recurrent layers and attention without mask support do not pass.
    """
    import numpy as np

    from services.trainer.batching import plan
    from services.trainer.rows import Row

    vocabulary = model.get_output_embeddings().weight.shape[0]
    rng = np.random.default_rng(0)
    prompt = rng.integers(vocabulary, size=24)
    rows = []
    for index in range(3):
        ids = np.concatenate([prompt, rng.integers(vocabulary, size=5 + index)])
        behaviour = np.zeros(5 + index, np.float32)
        rows.append(Row(str(index), ids, 24, behaviour, 0.0, (0.0,), 0))
    device = next(model.parameters()).device
    found = []
    try:
        with torch.no_grad():
            for sharing in (None, Costs(token=1.0, pair=0.0)):
                scores = torch.empty(sum(row.response_length for row in rows), device=device)
                for piece in plan(rows, 1 << 20, sharing=sharing):
                    on_device = piece.to(device)
                    logits = response_logits(model, on_device).float()
                    chosen = torch.log_softmax(logits, -1).gather(1, on_device.targets[:, None])
                    scores[on_device.order] = chosen[:, 0]
                found.append(scores)
    except (RuntimeError, ValueError, TypeError):
        return False
    return bool((found[0] - found[1]).abs().max() <= tolerance)
