"""Imports what every architecture of transformers needs, before the first model is loaded.

Its Auto classes are lazy. `modeling_utils` also imports the losses of all architectures; losses of
object detectors import `scipy.optimize` if it is installed: 0.2 of the 2.1 CPU seconds that all of
this takes, and 22 MiB in every worker. No policy is an object detector, so they get none here.

Both `transformers` and `transformers.models` read the sources of all architectures to learn what
they export, under two spellings of the same directory. The second reading, 0.3 CPU seconds, gets
the result of the first.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import utils
from transformers.utils import import_utils

_CLASSES: Final = ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig")
_MODULES: Final = ("modeling_utils", "modeling_layers", "activations", "masking_utils")


def _import() -> None:
    with _replaced(import_utils, "create_import_structure_from_path", _by_directory):
        for name in _CLASSES:
            getattr(transformers, name)
    with _replaced(utils, "is_scipy_available", lambda _: lambda: False):
        for name in _MODULES:
            with contextlib.suppress(ImportError):  # another release imports it with the model
                importlib.import_module(f"transformers.{name}")


@contextlib.contextmanager
def _replaced(module: Any, name: str, changed: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the function `name` of `module` by `changed` of it, if there is such a function."""
    function = getattr(module, name, None)
    if function is None:
        yield
        return
    setattr(module, name, changed(function))
    try:
        yield
    finally:
        setattr(module, name, function)


def _by_directory(read: Callable[[Path], Any]) -> Callable[[str | Path], Any]:
    """Return `read` for directories: for a file it reads the file's directory anyway, but caches
    the result under another argument."""

    def read_directory(path: str | Path) -> Any:
        return read(Path(path).parent if Path(path).is_file() else Path(path))

    return read_directory


_import()
