"""LoRA adapters between trainer, engines and files: their published form, and merging them."""

from troupe.adapters.content import AdapterContent as AdapterContent
from troupe.adapters.content import NotAnAdapter as NotAnAdapter
from troupe.adapters.content import base_key as base_key
from troupe.adapters.content import is_adapter as is_adapter
from troupe.adapters.merge import MergeMismatch as MergeMismatch
from troupe.adapters.merge import linear_layers as linear_layers
from troupe.adapters.merge import merged as merged
from troupe.adapters.merge import output_layer as output_layer
