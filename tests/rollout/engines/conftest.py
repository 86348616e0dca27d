"""Settings of all engine tests."""

from __future__ import annotations

import gc

import torch
import transformers  # noqa: F401 - imported before the freeze

torch.set_num_threads(1)
# transformers collects garbage whenever an engine stops; without this each of those passes walks
# through everything that torch and transformers ever imported (about a second).
gc.collect()
gc.freeze()
