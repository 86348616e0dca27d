"""Check that a checkpoint has exactly its model's tensors: none missing, extra or misshaped.

transformers fills a tensor that the checkpoint lacks with random values, drops one that the model
does not have, and only logs it. A policy would then be trained or served with partly random
weights. All code that loads weights from a directory, a hub or another service uses this check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from troupe.checkpoints.format import CheckpointFormat, FormatMismatch, ModelArrangement
from troupe.checkpoints.reading import StoredTensors
from troupe.transfer.deferred import Layout

# Maximum number of tensor names in an error message; a model may have thousands.
_NAMED: Final = 3
_TIED_REMEDY: Final = (
    "If the output layer is the embedding, set `tie_word_embeddings: true` in its config.json; "
    "else save the model again with all of its tensors."
)
_UNTIED_REMEDY: Final = (
    "If the output layer has its own weights, set `tie_word_embeddings: false` in its config.json; "
    "else save the model again without that tensor."
)
_REMEDY: Final = (
    "Save the whole model again (`save_pretrained`), with the configuration that belongs to it."
)

Shapes = Mapping[str, Sequence[int]]


class TensorsDoNotFit(ValueError):
    """A checkpoint's tensors do not match its model. `remedy`: what the user can do."""

    def __init__(self, message: str, remedy: str = _REMEDY) -> None:
        super().__init__(message)
        self.remedy = remedy


def difference(
    missing: Iterable[str],
    superfluous: Iterable[str],
    reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
) -> str:
    """Return a text that lists how a checkpoint's tensors differ from its model's; empty if they
    agree.

    `reshaped`: (shape in the checkpoint, shape in the model) by tensor name.
    """
    parts = []
    if lacking := sorted(missing):
        parts.append(f"it lacks {_listed(lacking)}")
    if spare := sorted(superfluous):
        parts.append(f"the model has no {_listed(spare)}")
    if other := sorted((reshaped or {}).items()):
        named = [f"'{n}' is {list(a)} and not {list(b)}" for n, (a, b) in other[:_NAMED]]
        parts.append("; ".join(named) + _more(len(other)))
    return "; ".join(parts)


def shape_difference(found: Shapes, expected: Shapes) -> str:
    """Return the `difference` between found and expected tensors, given as shapes by name."""
    both = found.keys() & expected.keys()
    reshaped = {
        name: (found[name], expected[name])
        for name in both
        if list(found[name]) != list(expected[name])
    }
    return difference(expected.keys() - both, found.keys() - both, reshaped)


def load_causal_lm(source: str | Path, *, dtype: Any, revision: str | None = None) -> Any:
    """Load a transformers model from a checkpoint that must have exactly its tensors.

    Blocking; needs torch. Raises TensorsDoNotFit, ValueError for malformed files, and the errors of
    `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    if Path(source).is_dir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # transformers reports that, or knows other formats
            StoredTensors.of_checkpoint(Path(source))
    try:
        model, about = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            dtype=dtype,
            output_loading_info=True,
            # Raised with the tensor names: transformers' own error refers to a table in the log.
            ignore_mismatched_sizes=True,
        )
    except RuntimeError:  # tensors that cannot be converted, such as a stack of too few experts
        _compare(source, None)
        raise
    missing, superfluous = set(about["missing_keys"]), set(about["unexpected_keys"])
    reshaped = {str(name): (tuple(a), tuple(b)) for name, a, b in about["mismatched_keys"]}
    missing -= reshaped.keys()
    if missing or superfluous or reshaped:
        _compare(source, model)
    _refuse(model, missing, superfluous, reshaped)
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    inner, outer = (getattr(one, "weight", None) for one in embeddings)
    if claims_tied(model) and inner is not outer:
        raise untied(model)
    return model


def _compare(source: str | Path, model: Any) -> None:
    """Raise TensorsDoNotFit, with the names in its files, if a directory's checkpoint does not
    match its model; None: the model of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(source)
    if not folder.is_dir():
        return
    if model is None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with contextlib.suppress(OSError):  # in another format than safetensors
        fitted(model, StoredTensors.of_checkpoint(folder).layout)


def fitted(model: Any, stored: Layout) -> ModelArrangement:
    """Return the conversion of a checkpoint's tensors, `stored`, to the tensors of a transformers
    model, which may be on the meta device. Raises TensorsDoNotFit, by the names in the files."""
    strays: list[str] = []
    try:
        found = ModelArrangement(model, stored, strays)
    except FormatMismatch as error:
        expected = CheckpointFormat(model, model.dtype).layout
        problem = shape_difference(_shapes(stored), _shapes(expected))
        raise TensorsDoNotFit(problem or str(error)) from error
    own = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    lacking = {one[0] for one in names.values() if not any(name in found.layout for name in one)}
    about = SimpleNamespace(missing_keys=lacking, unexpected_keys=set(strays))
    model._adjust_missing_and_unexpected_keys(about)
    missing, superfluous = set(about.missing_keys), set(about.unexpected_keys)
    both = {name: tensor for name, tensor in found.layout.items() if name in own}
    reshaped = {
        name: (tuple(tensor.shape), tuple(own[name].shape))
        for name, tensor in both.items()
        if tensor.shape != own[name].shape
    }
    if missing or reshaped:
        # Missing sources of converted tensors, such as one expert of a stack.
        for one in CheckpointFormat(model, model.dtype).conversions:
            wanted = {n for n in one.sources if n in missing or n in reshaped}
            absent = one.layout.keys() - stored.keys()
            if one.renames is None and wanted and absent:
                missing = (missing - wanted) | absent
                reshaped = {n: shapes for n, shapes in reshaped.items() if n not in wanted}
    _refuse(model, missing, superfluous, reshaped)
    return found


def untied(model: Any) -> TensorsDoNotFit:
    """Return the error about a checkpoint with its own output layer, although the model's is the
    embedding."""
    return TensorsDoNotFit(
        f"its config.json says that the output layer is the embedding (tie_word_embeddings: "
        f"true), but it has '{_output_weight(model)}' with other values",
        _UNTIED_REMEDY,
    )


def _refuse(
    model: Any,
    missing: set[str],
    superfluous: set[str],
    reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]],
) -> None:
    output = _output_weight(model)
    if missing == {output}:
        raise TensorsDoNotFit(
            f"it lacks '{output}', the output layer, and its config.json says that this is not the "
            "embedding (tie_word_embeddings: false)",
            _TIED_REMEDY,
        )
    if wrong := difference(missing, superfluous, reshaped):
        raise TensorsDoNotFit(wrong)


def _shapes(layout: Layout) -> dict[str, Sequence[int]]:
    return {name: tuple(tensor.shape) for name, tensor in layout.items()}


def _output_weight(model: Any) -> str:
    """Return the name of the output layer's weight; empty if the model has none."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    owner = next((n for n, module in model.named_modules() if module is head), None)
    return next((n for n, p in named if p is weight and n.rpartition(".")[0] == owner), "")


def claims_tied(model: Any) -> bool:
    """Return whether the configuration ties input and output embeddings, and the architecture,
    which has an output layer, can."""
    if not _output_weight(model):
        return False
    config = model.config
    text = config.get_text_config()
    asked = getattr(config, "tie_word_embeddings", False)
    return bool(asked and getattr(text, "tie_word_embeddings", True) and model._tied_weights_keys)


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names[:_NAMED])
    count = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{count} {listed}{_more(len(names))}"


def _more(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""
