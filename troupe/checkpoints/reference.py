"""A forward pass of any causal language model in float32, whose weights come layer by layer.

`ReferenceModel` has no weights of its own. Its tensors are made while it computes and freed behind
it, so that a model of any size needs the memory of one layer, on a CPU as on a trainer's device.
Ranks of a gang make them together: they compute the same pass, and gather each layer as it comes.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from troupe.checkpoints.format import ModelArrangement, is_transformers
from troupe.transfer.deferred import DeferredTensors

# Bits of float32's mantissa that TensorFloat-32 lacks.
_DROPPED_BITS: Final = 13
# Building a model sets process-wide defaults of transformers for a moment.
_BUILDING: Final = threading.Lock()


@dataclass(frozen=True)
class _Place:
    """An attribute of a module that holds a tensor, and the part of the model whose call needs it:
    a layer or a single module; empty for the whole model."""

    module: torch.nn.Module
    leaf: str
    part: str

    def put(self, tensor: torch.Tensor) -> None:
        """Let the module have `tensor` there."""
        if self.leaf in self.module._parameters:
            kept = torch.nn.Parameter(tensor, requires_grad=False)
            self.module._parameters[self.leaf] = kept
        else:
            self.module._buffers[self.leaf] = tensor


class ReferenceModel:
    """Computes the log-probs of prompts by tensors that are given to each call. Thread-safe."""

    def __init__(self, config: Any, device: torch.device | None = None) -> None:
        """Make the model of a transformers `config`, to compute on `device` (default: the CPU).

        Raises ValueError for an architecture that AutoModelForCausalLM does not know.
        """
        self.config, self.device = config, device or torch.device("cpu")
        self._model = _without_weights(config, self.device)
        self._lock = threading.Lock()
        self._places: dict[str, list[_Place]] = {}
        together: dict[int, list[_Place]] = {}  # tied names share an object
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            path, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(path)
            places = self._places[name] = together.setdefault(id(tensor), [])
            places.append(_Place(module, leaf, self._part_of(path, module)))
        for places in together.values():
            # Zeros that take no memory: models ask for the device of weights that they do not use.
            meta = getattr(places[0].module, places[0].leaf)
            zeros = torch.zeros((), dtype=meta.dtype, device=self.device).expand(meta.shape)
            for place in places:
                place.put(zeros)

    def arranged(self, published: Mapping[str, torch.Tensor]) -> DeferredTensors:
        """Return published tensors, which fit, by the names of the model."""
        return ModelArrangement.of(self._model, published).arranged(published)

    def logprobs(
        self, tensors: DeferredTensors, ids: Sequence[int], *, rounded: bool = False
    ) -> torch.Tensor:
        """Return log-probs [T - 1] of `ids` after its first token; `tensors`: by the names of the
        model. Blocking: all of them are made once, or twice if they are tied.

        `rounded`: not in float32, but as a server computes: in the dtype of the tensors, and where
        that is float32, with TensorFloat-32.
        """
        with self._lock, torch.no_grad(), contextlib.ExitStack() as hooks, _exact_products():
            for part, numbers in self._parts(tensors).items():
                load = self._loader(part, tensors, numbers, exact=not rounded)
                if not part:
                    hooks.enter_context(load())
                    continue
                self._around(self._model.get_submodule(part), load, hooks)
            if rounded:
                self._round_float32(hooks)
            prompt = torch.tensor([list(ids)], device=self.device)
            logits = self._model(prompt, use_cache=False).logits[0, :-1].float()
            return torch.log_softmax(logits, -1).gather(1, prompt[0, 1:, None])[:, 0].cpu()

    def _part_of(self, path: str, module: torch.nn.Module) -> str:
        """Return the layer (an item of a module list) that the module at `path` is in, or the
        module itself if it contains no others; empty for parameters that no single call needs."""
        names = path.split(".")
        for at, name in enumerate(names):
            if name.isdigit() and isinstance(
                self._model.get_submodule(".".join(names[:at])), torch.nn.ModuleList
            ):
                return ".".join(names[: at + 1])
        return path if next(module.children(), None) is None else ""

    def _parts(self, tensors: DeferredTensors) -> dict[str, list[int]]:
        """Return the numbers of the groups of tensors that each part of the model needs."""
        found: dict[str, list[int]] = {}
        for number, group in enumerate(tensors.groups):
            places = [place for name in group.layout for place in self._places[name]]
            for part in dict.fromkeys(place.part for place in places):
                found.setdefault(part, []).append(number)
        return found

    def _loader(
        self, part: str, tensors: DeferredTensors, numbers: Sequence[int], *, exact: bool
    ) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a context in which a part of the model has its tensors."""

        @contextlib.contextmanager
        def loaded() -> Iterator[None]:
            before: list[tuple[_Place, torch.Tensor]] = []
            try:
                for number in numbers:
                    for name, tensor in tensors.made(number).items():
                        widened = exact and tensor.is_floating_point()
                        given = tensor.to(self.device, torch.float32 if widened else None)
                        for place in self._places[name]:
                            if place.part == part:
                                before.append((place, getattr(place.module, place.leaf)))
                                place.put(given)
                yield
            finally:
                for place, tensor in before:
                    place.put(tensor)

        return loaded

    @staticmethod
    def _around(
        module: torch.nn.Module,
        load: Callable[[], contextlib.AbstractContextManager[None]],
        hooks: contextlib.ExitStack,
    ) -> None:
        """Load the tensors of `module` before each of its calls, and free them afterwards."""
        loaded = contextlib.ExitStack()

        def before(*_: Any) -> None:
            loaded.enter_context(load())

        def after(*_: Any) -> None:
            loaded.close()

        hooks.callback(module.register_forward_pre_hook(before).remove)
        hooks.callback(module.register_forward_hook(after, always_call=True).remove)

    def _round_float32(self, hooks: contextlib.ExitStack) -> None:
        """Round float32 values that single modules return to the mantissa of TensorFloat-32."""

        def after(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            for one in output if isinstance(output, tuple | list) else (output,):
                given = any(one is tensor for tensor in inputs)
                if torch.is_tensor(one) and one.dtype == torch.float32 and not given:
                    _round_mantissa(one)

        for module in self._model.modules():
            if next(module.children(), None) is None:
                hooks.callback(module.register_forward_hook(after).remove)


@torch.no_grad()
def compute_buffers(module: Any, device: torch.device) -> None:
    """Make the buffers on the meta device that checkpoints lack, such as rotary frequencies.

    They are made as in `from_pretrained`: modules initialize everything that is not marked as
    loaded.
    """
    for one in module.modules():
        one._is_hf_initialized = False
        kept = one._non_persistent_buffers_set
        for leaf, buffer in one.named_buffers(recurse=False):
            if buffer.is_meta and leaf in kept:
                setattr(one, leaf, torch.empty_like(buffer, device=device))
            else:
                buffer._is_hf_initialized = True
        for parameter in one.parameters(recurse=False):
            parameter._is_hf_initialized = True
    if is_transformers(module):
        module.initialize_weights()


def _without_weights(config: Any, device: torch.device) -> Any:
    """Return a model of `config` with parameters on the meta device, and the buffers that it
    computes itself on `device`."""
    from transformers import AutoModelForCausalLM

    def build(attention: str) -> Any:
        own = copy.deepcopy(config)
        with _BUILDING, torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                own, dtype=torch.float32, attn_implementation=attention
            )

    try:
        model = build("sdpa")
    except ValueError:  # some architectures know nothing faster
        model = build("eager")
    model.tie_weights()
    model.eval().requires_grad_(False)
    if getattr(model.config, "_experts_implementation", None) is not None:
        # Other implementations read every expert; a prompt needs a part of them.
        model.set_experts_implementation("eager")
    compute_buffers(model, device)
    return model


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Compute products of float32 matrices without TensorFloat-32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _round_mantissa(tensor: torch.Tensor) -> None:
    """Round float32 values to the mantissa of TensorFloat-32, in place; ties go away from zero."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = (bits + (1 << (_DROPPED_BITS - 1))) & (-1 << _DROPPED_BITS)
    tensor.copy_(rounded.view(torch.float32))
