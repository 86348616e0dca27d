"""The tensors of a model by name, as the trainer's rooms share them."""

from troupe.adapters.merge import Tensors, distinct_tensors

__all__ = ["Tensors", "distinct_tensors"]
