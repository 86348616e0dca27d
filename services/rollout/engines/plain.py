"""Plain forward passes over a served model, beside the batcher that serves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from services.rollout.engines.scoring import Asked

# Tokens per pass: serving stands still for so long.
PASS_TOKENS: Final = 4096
# Logits of one pass, in numbers.
_PASS_LOGITS: Final = 1 << 25


def passes(asked: Sequence[Asked], vocabulary: int) -> list[list[int]]:
    """Numbers of `asked` by pass: rows of one pass have the same length, so none needs padding."""
    by_row: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(asked):
        by_row.setdefault(_row(one), []).append(number)
    by_length: dict[int, list[list[int]]] = {}
    for row, numbers in by_row.items():
        by_length.setdefault(len(row), []).append(numbers)
    found: list[list[int]] = []
    for length, rows in by_length.items():
        tail = max(len(asked[n].ids) for numbers in rows for n in numbers)
        room = max(1, min(PASS_TOKENS // length, _PASS_LOGITS // (tail * vocabulary)))
        parts = (rows[at : at + room] for at in range(0, len(rows), room))
        found += [[n for numbers in part for n in numbers] for part in parts]
    return found


def logprobs(
    model: PreTrainedModel, asked: Sequence[Asked], temperature: float
) -> list[list[float]]:
    """Log-probs of continuations whose rows have the same length, by one pass."""
    rows = {row: at for at, row in enumerate(dict.fromkeys(map(_row, asked)))}
    tail = max(len(one.ids) for one in asked)
    with torch.inference_mode(), _stock_attention(model):
        out = model(input_ids=torch.tensor(list(rows)), use_cache=False, logits_to_keep=tail)
        table = torch.log_softmax(out.logits.float() / temperature, dim=-1)
        found: list[list[float]] = []
        for one in asked:
            ids = torch.tensor(one.ids)
            ours = table[rows[_row(one)], tail - len(one.ids) :]
            found.append(ours.gather(1, ids.unsqueeze(1)).squeeze(1).tolist())
    return found


def _row(one: Asked) -> tuple[int, ...]:
    """What is read: nothing follows the last token."""
    return one.prompt_ids + one.ids[:-1]


@contextlib.contextmanager
def _stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model computes as transformers does: a batcher's attention needs its own cache."""
    own = model.config._attn_implementation
    # Batchers replace what `models.skeleton` chose; a paged variant bears its name.
    stock = own.removeprefix("paged|") if own.startswith("paged|") else "sdpa"
    if own == "eager":
        stock = own
    model.set_attn_implementation(stock)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
