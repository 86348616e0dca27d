"""Imports what every architecture of transformers needs, before the first model is loaded.

Its Auto classes are lazy. `modeling_utils` also imports the losses of all architectures; those of
object detectors import `scipy.optimize` if it is installed: 0.2 of the 2.1 CPU seconds that all of
this takes, and 22 MiB in every worker. No policy is an object detector, so they get none here.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Final

import transformers
from transformers import utils

_CLASSES: Final = ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig")
_MODULES: Final = ("modeling_utils", "modeling_layers", "activations", "masking_utils")


def _import() -> None:
    for name in _CLASSES:
        getattr(transformers, name)
    available = utils.is_scipy_available
    utils.is_scipy_available = lambda: False
    try:
        for name in _MODULES:
            with contextlib.suppress(ImportError):  # another release imports it with the model
                importlib.import_module(f"transformers.{name}")
    finally:
        utils.is_scipy_available = available


_import()
