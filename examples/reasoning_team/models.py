"""The two architectures: Qwen3, small enough for one core."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# name -> (hidden size, layers, heads, feed-forward size)
SIZES = {"solver": (96, 4, 6, 192), "checker": (64, 3, 4, 128)}

# At d=96 a short rotary base learns to look a fixed number of characters back far sooner than the
# usual 10,000, which is made for long texts.
ROPE_THETA = 100.0


def make_model(name: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """`solver` or `checker` with random weights drawn from `seed`."""
    hidden, layers, heads, feed_forward = SIZES[name]
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=16,
            intermediate_size=feed_forward,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
