"""A whole update under `FakeTensorMode` on a device "cuda" that is not there.

Tensors on "cuda" are fake: they have shapes, types and devices, and no bytes; operators compute
with them as far as these go, and refuse operands on two devices. Tensors on the host are real, so
that rows are planned, advantages computed and statistics read as ever. Values that come from the
device are zeros and ones.

Run as a module, `python -m tests.trainer.memory.fake_step CASE.json [PHASE]`, in a process of its
own that has loaded `fake_cuda.cpp` before torch, it prints what a step needed as JSON; with a phase
("forward", "backward" or "update") also which tensors were there when that was fullest. With
"suspension" it prints what stays on the device while the policy is suspended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.trainer.learning import forward, frozen_base, pass_budget, passes
from services.trainer.learning.kernels import half
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from tests.trainer.peak import rows
from troupe.algorithms import linear_loss
from troupe.job import JobSpec

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[3]
PRODUCT = tuple(f"{ROOT / folder}{os.sep}" for folder in ("services", "troupe"))
aten = torch.ops.aten
# Elements above which a tensor on the host is fake, too: moments and copies of gradients.
LARGE = 1 << 18
UPDATE = "update"
# The GPU's allocator returns multiples of this number of bytes.
ROUNDED = 512


class FakeCuda(TorchDispatchMode):
    """Runs operators on fake tensors if they are on "cuda", and counts bytes on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.live: dict[str, int] = {"cuda": 0, "cpu": 0}
        self.peak: dict[str, int] = {"cuda": 0, "cpu": 0}
        self._known: dict[int, tuple[int, str, str]] = {}
        # Number of operations, by operation and calling function.
        self.on_host: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        # Bytes that casts read, by calling function.
        self.casts: Counter[str] = Counter()
        # The present phase: a "forward" or "backward" pass, else "update".
        self.phase = UPDATE
        self.phases: dict[str, int] = {}
        self.largest: dict[str, int] = {}
        self.explains = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not fakes and (to is None or to.type == "cpu"):
            found = self._on_host(func, args, kwargs)
            if found is not None:
                return found
        if func is aten._local_scalar_dense.default:
            self.waits[f"item: {_place()}"] += 1
            return {torch.bool: True}.get(
                args[0].dtype, 1 if not args[0].is_floating_point() else 1.0
            )
        if func is aten._to_copy.default and to == torch.device("cpu"):
            self.waits[f"copy: {_place()}"] += 1
            if args[0].numel() <= LARGE:
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten._to_copy.default and kwargs.get("dtype") not in (None, args[0].dtype):
            self.casts[_place()] += args[0].nbytes
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.waits[f"copy: {_place()}"] += 1
            return args[0]
        if func is aten.equal.default:
            self.waits[f"equal: {_place()}"] += 1
            return True
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            self.waits[f"mask: {_place()}"] += 1
            func, args = aten.clone.default, args[:1]  # a mask that hides nothing
        if func is aten.index_put.default:
            # The gradient of an index, into zeros: of tensors that are not fake it is in place.
            func = aten.index_put_.default
        with self.fake:
            if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
                # CUDA's kernel accepts it; shapes are only known for bfloat16.
                half = func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs)
                out = torch.empty_like(half, dtype=torch.float32)
            else:
                out = func(*args, **kwargs)
        for one in tree_leaves(out):
            if isinstance(one, FakeTensor):
                self._track(one, func)
        return out

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator on the host's tensors; None if it is too large."""
        size = args[0] if args and isinstance(args[0], list | tuple | torch.Size) else ()
        if len(size) and all(isinstance(n, int) for n in size):
            count = 1
            for n in size:
                count *= n
            if count > LARGE:
                return None
        found = func(*args, **kwargs)
        if self.phase != UPDATE and isinstance(found, torch.Tensor) and found.ndim:
            self.on_host[f"{func.__name__}: {_place()}"] += 1
        return found

    def _track(self, tensor: FakeTensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        kind = tensor.device.type
        if kind not in self.live:
            return
        size = -(-storage.nbytes() // ROUNDED) * ROUNDED
        place = (
            f"{func.__name__}{list(tensor.shape)} {tensor.dtype} {_place()}"
            if self.explains
            else ""
        )
        self._known[key] = size, kind, place
        weakref.finalize(storage, self._freed, key)
        self.live[kind] += size
        self.peak[kind] = max(self.peak[kind], self.live[kind])
        if kind == "cuda" and self.live[kind] > self.phases.get(self.phase, 0):
            self.phases[self.phase] = self.live[kind]
            if self.explains == self.phase:
                self.largest = {}
                for number, of, where in self._known.values():
                    if of == "cuda":
                        self.largest[where] = self.largest.get(where, 0) + number

    def _freed(self, key: int) -> None:
        size, kind, _ = self._known.pop(key)
        self.live[kind] -= size

    def __enter__(self) -> Any:
        # As `FakeTensorMode` does: Python's numbers go to the device by an operator.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*raised)

    def restart(self) -> None:
        """Reset peaks and counts."""
        self.peak = dict(self.live)
        self.phases.clear()
        self.on_host.clear()
        self.waits.clear()
        self.casts.clear()


def _place() -> str:
    """Return the product's function that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PRODUCT):
            return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_name}"
        frame = frame.f_back
    return "?"


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """`Module._apply`, which cannot exchange fake tensors in place: with new parameters instead."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    found = function(tensor.detach())
                    if (found.device, found.dtype) == (tensor.device, tensor.dtype):
                        found = tensor
                    elif held is part._parameters:
                        found = torch.nn.Parameter(found, tensor.requires_grad)
                    made[id(tensor)] = found, tensor  # which stays, for its id
                held[name] = made[id(tensor)][0]
    return module


@contextlib.contextmanager
def pretending(mode: FakeCuda) -> Iterator[None]:
    """What a GPU would answer, and stand-ins for what computes with values or launches Triton."""
    capable = forward.Capabilities(packs=True, linear_head=True)
    loss, call = passes.Passes._loss, torch.autograd.backward

    def noted(phase: str, function: Any) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            before, mode.phase = mode.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                mode.phase = before

        return compute

    # In torch's CPU build this operator has no kernel for "cuda" and would be decomposed.
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu_backward", torch.library.fallthrough_kernel, "AutogradCUDA")
    answers = {
        (torch.cuda, "get_device_capability"): lambda *_: (9, 0),
        (torch.cuda, "is_bf16_supported"): lambda *_, **__: True,
        (torch.cuda, "get_rng_state"): lambda *_: torch.zeros(16, dtype=torch.uint8),
        (torch.cuda, "set_rng_state"): lambda *_: None,
        (torch.cuda, "_lazy_init"): lambda: None,
        (torch.cuda.amp.common, "amp_definitely_not_available"): lambda: False,
        (torch.nn.Module, "_apply"): _apply,
        (frozen_base, "checksum_of"): lambda _: "fake",
        (passes, "gpu_memory"): lambda _: 80 << 30,
        (pass_budget, "gpu_memory"): lambda _: 80 << 30,
        (forward, "capabilities_of"): lambda *_, **__: capable,
        (linear_loss, "serves"): lambda *_: True,
        (linear_loss, "score_rows"): lambda *_: None,
        (linear_loss, "slope_rows"): lambda *_: None,
        # Like CUDA's kernel, they allocate only the sum.
        (linear_loss, "add_product"): lambda total, left, right: total.add_(0.0),
        (half, "add_product"): lambda total, left, right: total.add_(0.0),
        (passes.Passes, "_loss"): noted("forward", loss),
        (torch.autograd, "backward"): noted("backward", call),
    }
    with contextlib.ExitStack() as stack:
        for (where, name), answer in answers.items():
            stack.enter_context(mock.patch.object(where, name, answer))
        yield
    library._destroy()


def _learner(spec: JobSpec) -> Learner:
    policy = spec.policies["solver"]
    if policy.lora is None:
        model = load_model("solver", policy, 0)
    else:
        model = load_adapted("solver", policy, 0, CUDA)
    learner = Learner(model, spec, "solver", device=CUDA, share_prefixes=False)
    if learner.needs_reference:
        learner.set_reference(learner.weights())
    return learner


def suspension(values: dict[str, Any]) -> dict[str, Any]:
    """Bytes on the device: while the policy is `bound` in the middle of a step, after it was
    `suspended`, once other processes have the device (`free`), and after it was `resumed`."""
    spec = JobSpec.model_validate(values)
    mode = FakeCuda()
    with mode, pretending(mode):
        learner = _learner(spec)
        batch = rows(learner.vocabulary, 2, 64)
        learner.accumulate(batch)
        assert learner.apply(0).applied
        learner.accumulate(batch)
        found = {"bound": _live(mode)}
        tensors, plain = learner.suspended()
        tensors = {name: tensor.to("cpu") for name, tensor in tensors.items()}
        learner.release()
        found["suspended"] = _live(mode)
        frozen_base.leave_unused_bases()
        found["free"] = _live(mode)
        learner.adopt({name: tensor.to(CUDA) for name, tensor in tensors.items()}, plain)
        found["resumed"] = _live(mode)
        learner.accumulate(batch)
        assert learner.apply(1).applied
    return found


def _live(mode: FakeCuda) -> int:
    gc.collect()  # modules refer to one another
    return mode.live["cuda"]


def step(values: dict[str, Any], *, explains: str = "") -> dict[str, Any]:
    """What the second step of a policy needs: `cuda` and `cpu`, peaks in bytes; `state`, bytes that
    stay between its passes; `host`, tensors that passes make on the host; `waits`, values that the
    host gets from the device; `casts`, bytes that casts to another type read, by function."""
    spec = JobSpec.model_validate(values)
    policy = spec.policies["solver"]
    mode = FakeCuda()
    with mode, pretending(mode):
        learner = _learner(spec)
        tokens, length = policy.trainer.forward_tokens or 0, policy.engine.max_context or 0
        batch = rows(learner.vocabulary, tokens // length, length)
        learner.accumulate(batch[:2])
        assert learner.apply(0).applied  # moments are made by the first step
        learner.accumulate(batch[:2])
        mode.restart()
        mode.explains = explains
        state = mode.live["cuda"]
        learner.accumulate(batch)
        applied = learner.apply(1)
        assert applied.applied, applied.reason
        devices = {p.device.type for p in learner.model.parameters()}
    assert devices == {"cuda"}, devices
    found: dict[str, Any] = {"state": state, **mode.peak, "phases": mode.phases}
    found |= {"host": dict(mode.on_host), "waits": dict(mode.waits), "casts": dict(mode.casts)}
    if explains:
        top = sorted(mode.largest.items(), key=lambda one: -one[1])[:40]
        found["largest"] = dict(top)
    return found


def main() -> None:
    """Measure the step of a case."""
    values = json.loads(Path(sys.argv[1]).read_text())
    what = sys.argv[2] if len(sys.argv) > 2 else ""
    print(json.dumps(suspension(values) if what == "suspension" else step(values, explains=what)))


if __name__ == "__main__":
    main()
