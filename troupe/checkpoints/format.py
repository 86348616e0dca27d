"""The checkpoint format of a model: names and shapes of its tensors in files and for engines.

transformers keeps some tensors of a model in another form in memory than in checkpoint files: the
experts of a mixture are one stacked tensor in memory and one tensor each in a file, and some
modules are renamed. Inference engines know only the names in files, and silently skip others.
Therefore published, exported and transferred weights have the format of files.

Both directions use transformers' own conversions (`transformers.core_model_loading`):
`CheckpointFormat` does what `save_pretrained` does, `ModelArrangement` what `from_pretrained` does.
They convert one group of tensors at a time (a layer's experts), never a second copy of the model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from troupe.checkpoints.reading import StoredTensors
from troupe.transfer.deferred import DeferredTensors, Layout, TensorGroup

Tensors = Mapping[str, torch.Tensor]
# Function that returns a tensor, given its name.
Read = Callable[[str], torch.Tensor]
# Function that returns a full tensor for one of which this process may have a part only.
Whole = Callable[[torch.Tensor], torch.Tensor]


class FormatMismatch(ValueError):
    """The tensors do not form a checkpoint of the model; `name`: a tensor that does not fit."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Conversion:
    """One group of tensors that is converted as a unit, from the names in `sources` to `layout`."""

    sources: tuple[str, ...]
    layout: Layout
    convert: Callable[[Read], Tensors]

    @classmethod
    def unchanged(cls, name: str, tensor: torch.Tensor, target: str = "") -> Conversion:
        """Return a conversion that leaves the tensor as it is; `target`: its new name, if it has
        one."""
        target = target or name
        return cls((name,), {target: tensor}, _Same(name, target))

    def rows(self, part: range) -> Conversion | None:
        """Return the conversion of some rows (of the first dimension) of its only target, from the
        sources of these rows; None if all sources are needed."""
        return self.convert.rows(self, part) if isinstance(self.convert, _Converted) else None

    @property
    def renames(self) -> tuple[str, str] | None:
        """The names (source, target) if the tensor is at most renamed; None if it is converted."""
        is_same = isinstance(self.convert, _Same)
        return (self.sources[0], next(iter(self.layout))) if is_same else None


class CheckpointFormat:
    """The format of a model's checkpoint, and the conversion of the model's tensors to it.

    `layout`: the checkpoint's tensors on the meta device, by the names that `save_pretrained` gives
    them, in the dtypes of a model loaded in `dtype`: some architectures keep a few in float32.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Derive the format of `model`, a transformers model that may be sharded by FSDP.

        Tensors of any other module keep their names and shapes.
        """
        outline = _outline(model, dtype)
        state = _saved(outline, dtype)
        self._aliases = _aliases(outline)
        # The model's own tensors, in the dtypes of the checkpoint.
        self._state = state
        self.conversions = _to_checkpoint(model, outline, state)
        self.layout: Layout = _joined(self.conversions)

    def of(self, tensors: Tensors) -> DeferredTensors:
        """Return the model's `tensors` in checkpoint format; each group is converted when it is
        read.

        A tied tensor may be given under any of its names.
        """
        read = functools.partial(self.read, tensors)
        if isinstance(tensors, StoredTensors | DeferredTensors):  # avoids reading them all
            on_device = isinstance(tensors, DeferredTensors) and tensors.on_device
        else:
            on_device = any(tensor.device.type == "cuda" for tensor in tensors.values())
        return _deferred(self.conversions, read, on_device=on_device)

    def read(self, tensors: Tensors, name: str) -> torch.Tensor:
        """Return one tensor by its name in the model, cast to its dtype in checkpoints.

        Raises FormatMismatch if there is none.
        """
        known = (alias for alias in self._aliases.get(name, (name,)) if alias in tensors)
        if (found := next(known, None)) is None:
            raise FormatMismatch(f"it lacks '{name}'", name)
        dtype = self._state[name].dtype
        if isinstance(tensors, StoredTensors):
            return tensors.read(found, dtype)  # cast while it is read
        return tensors[found].detach().to(dtype)

    def rounded(self, tensors: Tensors, whole: Whole = lambda tensor: tensor) -> DeferredTensors:
        """Return the model's `tensors` by its own names, with the values that a checkpoint gives
        them; each is cast, and made `whole`, when it is read."""

        def make(name: str) -> Tensors:
            return {name: whole(self.read(tensors, name))}

        groups = [
            TensorGroup({name: tensor}, functools.partial(make, name))
            for name, tensor in self._state.items()
        ]
        return DeferredTensors(groups)


def unchanged(tensors: Tensors) -> DeferredTensors:
    """Wrap tensors that are in checkpoint format already."""
    conversions = [Conversion.unchanged(name, tensor) for name, tensor in tensors.items()]
    return _deferred(conversions, tensors.__getitem__)


class ModelArrangement:
    """The conversion of a checkpoint's tensors to the tensors of `model`, for every variant of its
    format.

    `layout`: the model's tensors on the meta device, by the model's names. `conversions`: from the
    checkpoint's names to the model's.
    """

    def __init__(
        self, model: torch.nn.Module, checkpoint: Layout, strays: list[str] | None = None
    ) -> None:
        """Plan the conversion of a checkpoint of this layout. `strays` collects the names of
        tensors that the model does not have, which are left out.

        Raises FormatMismatch for a tensor that the model does not have, without `strays`, or that
        cannot be converted.
        """
        self.conversions, self._used = _to_model(model, checkpoint, strays)
        self.layout: Layout = _joined(self.conversions)

    def note_in(self, model: Any) -> None:
        """Record in `model`, as `from_pretrained` does, the conversions used for loading, which its
        `CheckpointFormat` then reverts."""
        model._weight_conversions = [one for one in self._used if one.was_used()]

    @classmethod
    def of(cls, model: torch.nn.Module, checkpoint: Tensors) -> ModelArrangement:
        """Return the arrangement for `checkpoint`, cached per model: a policy's versions share a
        layout.

        Raises the errors of the constructor.
        """
        layout = checkpoint.layout if isinstance(checkpoint, DeferredTensors) else checkpoint
        known = model.__dict__.get("_troupe_arrangement")
        marks = {name: (tensor.dtype, tensor.shape) for name, tensor in layout.items()}
        if known is None or known[0] != marks:
            meta = {name: _meta(tensor, tensor.dtype) for name, tensor in layout.items()}
            known = model.__dict__["_troupe_arrangement"] = marks, cls(model, meta)
        return known[1]

    @property
    def renamed(self) -> dict[str, str]:
        """Checkpoint names by model names, for the tensors that are at most renamed."""
        pairs = [one.renames for one in self.conversions]
        return {target: source for source, target in filter(None, pairs)}

    def arranged(self, checkpoint: Tensors) -> DeferredTensors:
        """Return the model's tensors, converted from `checkpoint` when they are read."""
        return _deferred(self.conversions, checkpoint.__getitem__)


def cast(model: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """Cast a model's parameters and persistent buffers, in place; also move it to `device`.

    Computed buffers, such as rotary frequencies, are not cast, as in a model that transformers
    loads in `dtype`: rounded to bfloat16, they would misplace distant positions.
    """
    computed = [
        (module, leaf, buffer)
        for module in model.modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if leaf in module._non_persistent_buffers_set
    ]
    exact = in_float32(model, dtype)
    model = model.to(device=device, dtype=dtype)
    keep_float32(model, exact)
    for module, leaf, buffer in computed:
        setattr(module, leaf, buffer if device is None else buffer.to(device))
    return model


def in_float32(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that stay float32 in a model loaded in `dtype`, by name; not copies.

    transformers lists them in `_keep_in_fp32_modules_strict`.
    """
    plan = model._get_dtype_plan(dtype) if is_transformers(model) else {}
    if not plan:
        return {}
    from transformers.core_model_loading import build_glob_alternation

    pattern = build_glob_alternation(list(plan))[0]
    state = model.state_dict()
    return {n: t for n, t in state.items() if pattern.search(n) and t.is_floating_point()}


def keep_float32(model: Any, exact: Tensors) -> None:
    """Set the tensors that `in_float32` found back to float32 with their exact values.

    Creating or casting a model in another dtype has rounded them.
    """
    own = model.state_dict(keep_vars=True)
    for name, tensor in exact.items():
        own[name].data = tensor.to(device=own[name].device, dtype=torch.float32)


class _Same:
    """A conversion that only renames a tensor."""

    def __init__(self, source: str, target: str) -> None:
        self._source, self._target = source, target

    def __call__(self, read: Read) -> Tensors:
        return {self._target: read(self._source)}


class _Converted:
    """One of transformers' converters, applied to the tensors that it collects."""

    def __init__(
        self,
        converter: Any,
        first: str,
        model: Any,
        rename: Callable[[str], str],
    ) -> None:
        """Wrap `converter`. `first`: the first of the names that it produces; `rename`: maps the
        produced names to the final ones."""
        self._converter, self._first, self._model = converter, first, model
        self._rename = rename
        # (tensor name, the pattern that matched it), in the order of a checkpoint.
        self.collected: list[tuple[str, str]] = []

    def __call__(self, read: Read) -> Tensors:
        converter = copy.deepcopy(self._converter)
        for name, pattern in self.collected:
            converter.add_tensor(self._first, name, pattern, read(name))
        made = converter.convert(self._first, model=self._model, config=self._model.config)
        return {
            self._rename(name): found[0] if isinstance(found, list) else found
            for name, found in made.items()
        }

    def rows(self, whole: Conversion, part: range) -> Conversion | None:
        """Implement `Conversion.rows` for targets that stack their sources (a layer's experts), if
        no other operation changes the stacking dimension."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *others = self._converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        alone = all(isinstance(one, Concatenate) and one.dim > 0 for one in others)
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in self.collected:
            by_pattern.setdefault(pattern, []).append(name)
        if not (stacks and alone and part) or len(whole.layout) != 1:
            return None
        ((target, tensor),) = whole.layout.items()
        if any(len(names) != len(tensor) for names in by_pattern.values()):
            return None
        taken = {name for names in by_pattern.values() for name in names[part.start : part.stop]}
        some = _Converted(self._converter, self._first, self._model, self._rename)
        some.collected = [(name, pattern) for name, pattern in self.collected if name in taken]
        layout = {target: tensor[part.start : part.stop]}
        return Conversion(tuple(name for name, _ in some.collected), layout, some)


def _to_checkpoint(model: Any, outline: Any, state: Tensors) -> list[Conversion]:
    """Return the conversions from the model's names to a checkpoint's.

    They follow `transformers.core_model_loading.revert_weight_conversion`, which converts a whole
    state at once.
    """
    if not is_transformers(outline):
        return [Conversion.unchanged(name, tensor) for name, tensor in state.items()]
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
    )

    reverse = [one.reverse_transform() for one in _conversions(model, outline, state)[::-1]]
    renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    return _planned(
        outline,
        state,
        lambda name: apply_converters(name, converters),
        {pattern: one for one in converters for pattern in one.source_patterns},
        lambda name: apply_renamings(name, renamings),
    )


def _to_model(
    model: Any, checkpoint: Layout, strays: list[str] | None
) -> tuple[list[Conversion], list[Any]]:
    """Return the conversions from a checkpoint's names to the model's, and the transformers
    conversions among them.

    They follow `transformers.core_model_loading.convert_and_load_state_dict_in_model`.
    """
    own = model.state_dict()
    if not is_transformers(model):
        for name in checkpoint:
            _require(name, name, own)
        return [Conversion.unchanged(name, tensor) for name, tensor in checkpoint.items()], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    prefix = model.base_model_prefix

    def matched(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if strays is not None and target not in own:
            strays.append(name)
            return "", None
        _require(name, target, own)
        return target, pattern

    conversions = _planned(
        model,
        checkpoint,
        matched,
        {pattern: one for one in converters for pattern in one.source_patterns},
        lambda name: name,
    )
    return conversions, mapping


def _planned(
    model: Any,
    tensors: Layout,
    matched: Callable[[str], tuple[str, str | None]],
    converters: Mapping[str, Any],
    rename: Callable[[str], str],
) -> list[Conversion]:
    """Group `tensors` (on the meta device) into conversions.

    `matched`: returns a tensor's name after conversion (empty: it is left out) and the pattern that
    matched it, or None.
    """
    from transformers.core_model_loading import dot_natural_key

    together: dict[str, _Converted] = {}
    made: list[Conversion] = []
    # The order matters to some conversions: experts are stacked in the order of the names.
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = matched(name)
        if not target:
            continue
        if pattern is None:
            made.append(Conversion.unchanged(name, tensors[name], rename(target)))
            continue
        if target not in together:
            together[target] = _Converted(converters[pattern], target, model, rename)
        together[target].collected.append((name, pattern))
    for convert in together.values():
        sources = tuple(name for name, _ in convert.collected)
        try:
            with torch.no_grad():
                layout = convert(tensors.__getitem__)
        except (RuntimeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise FormatMismatch(
                f"'{sources[0]}' and {len(sources) - 1} more cannot be converted: {error}",
                sources[0],
            ) from error
        made.append(Conversion(sources, layout, convert))
    return made


def _conversions(model: Any, outline: Any, names: Iterable[str]) -> list[Any]:
    """Return the load-time conversions that saving a checkpoint of `model` has to revert.

    These are the conversions that `model` was loaded with, or by default its architecture's.
    A checkpoint with stacked experts (`save_original_format=False`) was loaded without some of
    them; engines do not know that variant, so its model is saved like a newly made one. A prefix is
    restored only if loading removed it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters

    def marks(one: Any) -> tuple[Any, ...]:
        patterns = one._original_source_patterns, one._original_target_patterns
        return type(one), *map(tuple, patterns), one.scope_prefix

    used = getattr(model, "_weight_conversions", None)
    known = {marks(one) for one in used or ()}
    own = [
        one
        for one in get_model_conversion_mapping(outline, add_legacy=False)
        if not isinstance(one, PrefixChange) or marks(one) in known
    ]
    if used is None:
        return own
    for one in own:
        if isinstance(one, WeightConverter) and marks(one) not in known:
            back = [one.reverse_transform()]
            if any(apply_converters(name, back)[1] is not None for name in names):
                return own
    return list(used)


class _MadeIn(TorchFunctionMode):
    """Default dtype of new floating-point tensors, for the current thread only.

    It applies to tensors that are made without a dtype and without a floating-point input.
    transformers itself would set the default of the process, where other threads compute.
    """

    _NAMING = frozenset({torch.Tensor.to, torch.Tensor.float, torch.Tensor.double})

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor) or not made.is_floating_point():
            return made
        if func in self._NAMING or kwargs.get("dtype") is not None:
            return made
        given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
        if any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in given):
            return made
        return made.to(self._dtype)


def _outline(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy of `model` in `dtype` on the meta device, or `model` itself if it is not a
    transformers model."""
    if not is_transformers(model):
        return model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), _MadeIn(dtype):
        config = copy.deepcopy(model.config)
        outline = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    outline.tie_weights()
    keep_float32(outline, in_float32(outline, dtype))
    return outline


def _saved(outline: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_pretrained` writes, before conversions, on the meta device."""
    state = {n: t for n, t in outline.state_dict(keep_vars=True).items() if torch.is_tensor(t)}
    if not is_transformers(outline):
        found: dict[int, str] = {}
        for name, tensor in state.items():
            found.setdefault(id(tensor), name)
        kept = {name: state[name] for name in found.values()}
        return {n: _meta(t, dtype if t.is_floating_point() else t.dtype) for n, t in kept.items()}
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    for name in outline._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, outline)
    return {name: _meta(tensor, tensor.dtype) for name, tensor in state.items()}


def _aliases(outline: Any) -> dict[str, Sequence[str]]:
    """Return all names of each tied tensor, by each of its names."""
    together: dict[int, list[str]] = {}
    for name, tensor in outline.state_dict(keep_vars=True).items():
        together.setdefault(id(tensor), []).append(name)
    return {name: names for names in together.values() if len(names) > 1 for name in names}


def is_transformers(model: Any) -> bool:
    """Return whether `model` is a transformers model, whose checkpoint format the library
    defines."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _require(name: str, target: str, own: Mapping[str, Any]) -> None:
    if target not in own:
        raise FormatMismatch(f"'{name}' is published, but the model has no such tensor", name)


def _joined(conversions: Iterable[Conversion]) -> Layout:
    return {name: tensor for one in conversions for name, tensor in one.layout.items()}


def _deferred(
    conversions: Iterable[Conversion], read: Read, *, on_device: bool = False
) -> DeferredTensors:
    groups = [TensorGroup(one.layout, functools.partial(one.convert, read)) for one in conversions]
    return DeferredTensors(groups, on_device=on_device)


def _meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
