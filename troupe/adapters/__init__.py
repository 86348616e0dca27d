"""LoRA adapters between trainer, engines and files: their published form, and merging them."""

from troupe.adapters.content import AdapterContent, NotAnAdapter, base_key, is_adapter
from troupe.adapters.merge import MergeMismatch, linear_layers, merged, output_layer

__all__ = [
    "AdapterContent",
    "MergeMismatch",
    "NotAnAdapter",
    "base_key",
    "is_adapter",
    "linear_layers",
    "merged",
    "output_layer",
]
