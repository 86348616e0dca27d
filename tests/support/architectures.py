"""Tiny models of many architectures that transformers holds otherwise than their checkpoints do."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def _tiny(model_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | fields


def _mixture(model_type: str, **fields: Any) -> dict[str, Any]:
    return _tiny(model_type, moe_intermediate_size=16, num_experts_per_tok=2) | fields


def _deepseek(model_type: str, **fields: Any) -> dict[str, Any]:
    parts = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16}
    routed = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    # Latent attention has no groups of heads.
    parts["num_key_value_heads"] = 4
    return _mixture(model_type, **parts, **routed, topk_group=1) | fields


_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURE = _mixture("qwen3_moe", num_experts=4)
# By name: with experts that are one by one in a checkpoint, stacked there too, or renamed; and
# dense ones, tied and not.
ARCHITECTURES = {
    "qwen3_moe": MIXTURE,
    "qwen3_moe_tied": MIXTURE | {"tie_word_embeddings": True},
    "qwen2_moe": _mixture("qwen2_moe", num_experts=4, shared_expert_intermediate_size=24),
    "mixtral": _mixture("mixtral", num_local_experts=4),
    "olmoe": _mixture("olmoe", num_experts=4),
    "gpt_oss": _mixture("gpt_oss", num_local_experts=4),
    "deepseek_v2": _deepseek("deepseek_v2", q_lora_rank=None, n_group=1, num_key_value_heads=4),
    "deepseek_v3": _deepseek("deepseek_v3", q_lora_rank=16, n_group=2, num_key_value_heads=4),
    "llama4": _mixture("llama4_text", num_local_experts=4, intermediate_size_mlp=48)
    | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "glm4_moe": _deepseek("glm4_moe", n_group=1),
    "ernie4_5_moe": _mixture("ernie4_5_moe", moe_num_experts=4, moe_k=2),
    "qwen3_next": _mixture("qwen3_next", num_experts=4, **_LINEAR),
    "qwen3_5_moe": _mixture("qwen3_5_moe_text", num_experts=4, **_LINEAR),
    "granitemoe": _mixture("granitemoe", num_local_experts=4),
    "minimax_m2": _mixture("minimax_m2", num_local_experts=4),
    "phimoe": _mixture("phimoe", num_local_experts=4),
    "hunyuan": _mixture("hunyuan_v1_moe", num_experts=4, moe_topk=2),
    "jamba": _mixture("jamba", num_experts=4, attn_layer_period=2, attn_layer_offset=1)
    | {"use_mamba_kernels": False},
    "lfm2_moe": _mixture("lfm2_moe", num_experts=4, num_dense_layers=1)
    | {"layer_types": ["conv", "full_attention"]},
    "qwen3": _tiny("qwen3"),
    "qwen3_tied": _tiny("qwen3", tie_word_embeddings=True),
    "llama": _tiny("llama"),
    "gemma3": _tiny("gemma3_text"),
    "phi3": _tiny("phi3"),
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


# Further ones that transformers converts on load, with all names that configurations use for one
# property; names that an architecture does not know are kept and have no effect.
_ANY = _mixture(
    "",
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    n_shared_experts=1,
    num_shared_experts=1,
    first_k_dense_replace=1,
    num_dense_layers=1,
    n_group=1,
    topk_group=1,
    shared_expert_intermediate_size=24,
)
FURTHER = {
    name: _ANY | {"model_type": name}
    for name in (
        "afmoe",
        "beam",
        "cohere2_moe",
        "dots1",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "granitemoeshared",
        "hy_v3",
        "kolibri1",
        "laguna",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "solar_open",
    )
}


def make(name: str, seed: int = 0) -> Any:
    """A model of `ARCHITECTURES` or `FURTHER` in float32 with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values = ARCHITECTURES.get(name) or FURTHER[name]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    return model.eval()


# 50 million parameters, so that tensors are large compared with a process's other memory.
LARGE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 40_960,
    "hidden_size": 256,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
