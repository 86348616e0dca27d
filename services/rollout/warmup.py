"""Loads the libraries of the embedded engine while nobody waits for them.

A worker that comes back after a crash is prepared within a second or two of its first heartbeat;
what it imports until then is not waited for.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading

import structlog

from services.rollout.memory import collect_seldom
from troupe.workflow.languages import IMPORTING

log = structlog.get_logger(__name__)

# The Auto classes import next to nothing by themselves: the rest would come with the first model.
_MODULES = ("modeling_utils", "modeling_layers", "activations", "masking_utils")


def warm_up() -> None:
    """Import in a thread of its own, which nobody has to wait for. Repeatable."""
    threading.Thread(target=_import, name="warm-up", daemon=True).start()


def _import() -> None:
    try:
        with IMPORTING:
            transformers = importlib.import_module("transformers")
        for name in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
            getattr(transformers, name)
        for name in _MODULES:
            with contextlib.suppress(ImportError):  # another release: it comes with the model
                importlib.import_module(f"transformers.{name}")
        importlib.import_module("services.rollout.engines.embedded")
    except Exception as error:  # who needs it will say so
        log.warning("libraries cannot be imported", error=str(error))
    finally:
        if not gc.isenabled():  # turned off by `__main__`: collecting takes a fifth of an import
            collect_seldom()
