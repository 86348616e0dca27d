"""Check that a checkpoint has exactly its model's tensors: none missing, extra or misshaped.

transformers fills a tensor that the checkpoint lacks with random values, drops one that the model
does not have, and only logs it. A policy would then be trained or served with partly random
weights. All code that loads weights from a directory, a hub or another service uses this check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# At most this many tensor names in an error message; a model may have thousands.
_NAMED: Final = 3
_TIED_REMEDY: Final = (
    "Set `tie_word_embeddings: true` in its config.json where the output layer is the embedding; "
    "else save the model again with all of its tensors."
)
_UNTIED_REMEDY: Final = (
    "Set `tie_word_embeddings: false` in its config.json where the output layer has weights of its "
    "own; else save the model again without that tensor."
)
_REMEDY: Final = (
    "Save the whole model again (`save_pretrained`), with the configuration that belongs to it."
)

Shapes = Mapping[str, Sequence[int]]


class TensorsDoNotFit(ValueError):
    """A checkpoint's tensors are not those of its model. `remedy`: what the user can do."""

    def __init__(self, message: str, remedy: str = _REMEDY) -> None:
        super().__init__(message)
        self.remedy = remedy


def difference(
    missing: Iterable[str],
    superfluous: Iterable[str],
    reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
) -> str:
    """A text that lists how a checkpoint's tensors differ from its model's; empty if they agree.

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
    """The `difference` between found and expected tensors, given as shapes by name."""
    both = found.keys() & expected.keys()
    reshaped = {
        name: (found[name], expected[name])
        for name in both
        if list(found[name]) != list(expected[name])
    }
    return difference(expected.keys() - both, found.keys() - both, reshaped)


def load_causal_lm(source: str | Path, *, dtype: Any, revision: str | None = None) -> Any:
    """Load a transformers model from a checkpoint that must have exactly its tensors.

    Blocking; needs torch. Raises TensorsDoNotFit, and what `from_pretrained` raises.
    """
    from transformers import AutoModelForCausalLM

    model, about = AutoModelForCausalLM.from_pretrained(
        source,
        revision=revision,
        dtype=dtype,
        output_loading_info=True,
        # Raised with the tensor names: transformers' own error refers to a table in the log.
        ignore_mismatched_sizes=True,
    )
    missing, superfluous = set(about["missing_keys"]), set(about["unexpected_keys"])
    reshaped = {str(name): (tuple(a), tuple(b)) for name, a, b in about["mismatched_keys"]}
    missing -= reshaped.keys()
    output = _output_weight(model)
    if missing == {output}:
        raise TensorsDoNotFit(
            f"it lacks '{output}', the output layer, and its config.json says that this is not the "
            "embedding (tie_word_embeddings: false)",
            _TIED_REMEDY,
        )
    if wrong := difference(missing, superfluous, reshaped):
        raise TensorsDoNotFit(wrong)
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    inner, outer = (getattr(one, "weight", None) for one in embeddings)
    if output and _claims_tied(model) and inner is not outer:
        raise TensorsDoNotFit(
            f"its config.json says that the output layer is the embedding (tie_word_embeddings: "
            f"true), and it has '{output}' with other values",
            _UNTIED_REMEDY,
        )
    return model


def _output_weight(model: Any) -> str:
    """The name of the output layer's weight; empty if the model has none."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    owner = next((n for n, module in model.named_modules() if module is head), None)
    return next((n for n, p in named if p is weight and n.rpartition(".")[0] == owner), "")


def _claims_tied(model: Any) -> bool:
    """Whether the configuration ties input and output embeddings, and the architecture can."""
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
