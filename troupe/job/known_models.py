"""Dimensions of models that are known by name, so that jobs can be sized where no file of the model
is: on a laptop, or on a host that has not downloaded it yet."""

from __future__ import annotations

from typing import Any, Final

from troupe.rpc import InvalidArgument

# Sizes in the order of `_NAMES`, and what else is the model's own: as the models' own
# configurations say.
_NAMES: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
_QWEN3: Final[dict[str, tuple[tuple[int, ...], dict[str, int | bool]]]] = {
    "Qwen3-0.6B": ((28, 1024, 3072, 16, 8), {"tie_word_embeddings": True}),
    "Qwen3-1.7B": ((28, 2048, 6144, 16, 8), {"tie_word_embeddings": True}),
    "Qwen3-4B": ((36, 2560, 9728, 32, 8), {"tie_word_embeddings": True}),
    "Qwen3-8B": ((36, 4096, 12_288, 32, 8), {}),
    "Qwen3-14B": ((40, 5120, 17_408, 40, 8), {}),
    "Qwen3-32B": ((64, 5120, 25_600, 64, 8), {}),
    "Qwen3-30B-A3B": ((48, 2048, 6144, 32, 4), {"moe_intermediate_size": 768}),
    "Qwen3-235B-A22B": ((94, 4096, 12_288, 64, 4), {"moe_intermediate_size": 1536}),
}
_COMMON: Final = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
_DENSE: Final = {"model_type": "qwen3"}
_MIXTURE: Final = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}


def model_config(name: str) -> dict[str, Any]:
    """Return the configuration of a Qwen3 model by its name. Raises InvalidArgument for another
    one."""
    if name not in _QWEN3:
        raise InvalidArgument(
            f"the dimensions of the model {name!r} are unknown",
            field="model",
            value=name,
            remedy=f"Give a configuration, or one of {', '.join(_QWEN3)}.",
        )
    sizes, own = _QWEN3[name]
    kind = _MIXTURE if "moe_intermediate_size" in own else _DENSE
    return {**_COMMON, **kind, **dict(zip(_NAMES, sizes, strict=True)), **own}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the configuration of a model by its path or its id on the hub, if the name is a Qwen3
    model's."""
    name = path.rstrip("/").rpartition("/")[2]
    return model_config(name) if name in _QWEN3 else None
