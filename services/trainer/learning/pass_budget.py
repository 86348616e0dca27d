"""The token budget of forward and backward passes, halved when a pass runs out of memory.

`PassBudget.fitting` runs the passes of one micro-batch. If memory runs out, it takes back what they
added to the gradients, halves the budget and runs them again, down to one row per pass. All ranks
of a gang do so together; gang/group.py says how the others get through a pass that one of them
gave up.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog
import torch

from services.trainer.compute import give_back_memory, gpu_memory
from services.trainer.learning.optimizer import capture, local_part, restore
from services.trainer.learning.ranks import PassTooLarge, RankGroup, is_out_of_memory
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.packing import PackedBatch
from troupe.devices import host_memory
from troupe.job import JobSpec
from troupe.job.sizing import setup_of, shape_of_config
from troupe.rpc import Aborted, FailedPrecondition
from troupe.scheduling.memory import rank_memory

log = structlog.get_logger("troupe.trainer")
T = TypeVar("T")
# Devices whose gradients are copied to the host before passes that are larger than any so far. On a
# CPU there is no other memory to copy them to: the step begins again instead.
COPIED: Final = {"cuda"}
# Tokens of a piece (sequences/history.py) below which a smaller one saves no memory to speak of.
SMALLEST_PIECE: Final = 256


@dataclass
class PassShortage:
    """A micro-batch that did not fit, as all ranks together know it."""

    # Tokens of the largest pass, and of the longest row.
    pass_max: int = 0
    row_max: int = 0
    # Whether some pass has several rows.
    splits: bool = False
    # Whether a rank cannot take back what the passes added to its gradients.
    lost: bool = False
    # Whether a pass is larger than any that a rank has computed so far.
    unproven: bool = False


class PassBudget:
    """Tokens of one pass of a policy, and what has been learned about them on this device."""

    def __init__(
        self,
        tokens: int,
        spec: JobSpec,
        policy: str,
        model: Any,
        device: torch.device,
        ranks: RankGroup,
    ) -> None:
        """`tokens`: the budget to begin with; `model`: a Hugging Face model on `device`."""
        self.tokens = tokens
        self._job, self._policy, self._model = spec, policy, model
        self._device, self._ranks = device, ranks
        # Times that memory ran out in the current step, and since the policy is bound.
        self._shortages = self._all_shortages = 0
        # Tokens of the largest pass whose gradient was computed.
        self._proven = 0
        # Of the micro-batch that is computed: the parameters whose gradients are to be kept, unless
        # that is decided already, and the gradients before it, for `_taken_back`.
        self._undecided: Sequence[torch.nn.Parameter] | None = None
        self._saved: list[torch.Tensor | None] | None = None
        # Host memory for them, by the parameter's id; made once per step.
        self._memory: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._planned = PassShortage()

    def planned(
        self, batches: Sequence[PackedBatch], *, cuts: bool = False
    ) -> Sequence[PackedBatch]:
        """Note passes that are about to be computed, all of a micro-batch before the first, and
        keep the gradients if a pass is larger than any so far; return the passes. From several
        threads. `cuts`: with a smaller budget a row would be computed in pieces."""
        with self._lock:
            for batch in batches:
                self._planned.pass_max = max(self._planned.pass_max, batch.input_ids.numel())
                cuttable = cuts and batch.input_ids.numel() > SMALLEST_PIECE
                self._planned.splits |= len(batch.spans) > 1 or cuttable
            parameters, self._undecided = self._undecided, None
            if parameters is not None and self._any_unproven():
                self._saved = self._copied(parameters)
        return batches

    def fitting(
        self,
        compute: Callable[[], T],
        rows: Sequence[Row],
        parameters: Sequence[torch.nn.Parameter] = (),
    ) -> T:
        """Return the result of `compute`, which runs `rows` through the model in planned passes and
        adds to nothing but the gradients of `parameters`; repeated with smaller passes if it must
        be.

        Raises FailedPrecondition of kind "row_out_of_memory" for a row that does not fit alone, and
        Aborted of kind "out_of_memory", for the step to begin again, where gradients of earlier
        micro-batches cannot be brought back.
        """
        while True:
            self._planned = PassShortage(row_max=max((len(row.ids) for row in rows), default=0))
            self._undecided = self._saved = None
            if all(p.grad is None for p in parameters):
                self._saved = [None] * len(parameters)
            elif self._device.type in COPIED:
                self._undecided = parameters
            generators = capture(self._device)
            try:
                found = compute()
            except Exception as error:
                # In a gang only what all ranks agree on: another error ends this rank.
                alone = self._ranks.size == 1 and is_out_of_memory(error)
                if not alone and not isinstance(error, PassTooLarge):
                    raise
                message = str(error)
            else:
                if parameters:
                    self._proven = max(self._proven, self._planned.pass_max)
                self._saved = None
                return found
            # Here the error is gone, and with it the tensors that its frames held.
            gc.collect()
            give_back_memory()
            restore(generators, self._device)
            self._planned.lost = not _taken_back(parameters, self._saved)
            self._halve(message)

    def _any_unproven(self) -> bool:
        """Return whether any rank plans a pass that is larger than all that it has computed: such a
        one may run out of memory, and all ranks then take back what they have added."""
        self._planned.unproven = self._planned.pass_max > self._proven
        return self._ranks.merged(self._planned).unproven

    def _copied(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """Copy gradients to host memory."""
        found: list[torch.Tensor | None] = []
        for parameter in parameters:
            if parameter.grad is None:
                found.append(None)
                continue
            gradient = local_part(parameter.grad)
            if id(parameter) not in self._memory:
                self._memory[id(parameter)] = torch.empty_like(gradient, device="cpu")
            found.append(self._memory[id(parameter)].copy_(gradient))
        return found

    def _halve(self, message: str) -> None:
        """Continue with a smaller budget, the same on all ranks, or raise the reason why that is
        useless."""
        found = self._ranks.merged(self._planned)
        self._shortages, self._all_shortages = self._shortages + 1, self._all_shortages + 1
        before = min(self.tokens, found.pass_max)
        if not found.splits or before <= 1:
            raise self._too_long(found.row_max, message)
        self.tokens = before // 2
        log.warning(
            "out of memory in a pass, passes become smaller",
            policy=self._policy,
            pass_tokens=found.pass_max,
            forward_tokens=self.tokens,
            error=message,
        )
        if found.lost:
            raise Aborted(
                f"a pass of {found.pass_max:,} tokens of policy {self._policy} ran out of memory; "
                f"the step begins again with passes of {self.tokens:,}",
                kind="out_of_memory",
                field=f"policies.{self._policy}.trainer.forward_tokens",
                value=self.tokens,
                remedy="Nothing, if it happens once. Set `trainer.forward_tokens` to what the "
                "device has room for, so that no step begins twice.",
            )

    def _too_long(self, length: int, message: str) -> FailedPrecondition:
        cpu = self._device.type == "cpu"
        memory = host_memory()[0] if cpu else gpu_memory(self._device) or 0
        need = ""
        shape = shape_of_config(self._model.config.to_dict())
        if shape is not None:
            setup = setup_of(
                self._job, self._policy, shape, device=self._device.type, memory=memory
            )
            alone = replace(setup, tokens=min(length, self.tokens), history=length)
            needed = rank_memory(shape, alone)
            need = (
                f"; by the memory model its last pass needs {needed.total:,} bytes, "
                f"{needed.working:,} of them in addition to weights, gradients and optimizer"
            )
        return FailedPrecondition(
            f"a row of {length:,} tokens of policy {self._policy} does not fit into the memory of "
            f"the device ({memory:,} bytes), also cut into pieces{need}: {message}",
            kind="row_out_of_memory",
            field=f"policies.{self._policy}.trainer",
            value=length,
            remedy="Use a larger gang (`trainer.gang`) whose ranks divide its tokens "
            "(`trainer.context_parallel`), `trainer.activation_checkpointing: true`, "
            "`trainer.offload`, or shorter conversations (`engine.max_context`, "
            "`sampling.max_tokens`).",
        )

    def forget(self) -> None:
        """Free the copies of gradients: the step is over, or was given up."""
        self._memory.clear()
        self._saved = self._undecided = None

    def metrics(self) -> dict[str, float]:
        """End the step; return what it has to say: nothing on a device that never ran out."""
        found, self._shortages = self._shortages, 0
        self.forget()
        if not self._all_shortages:
            return {}
        return {"train/out_of_memory": float(found), "train/forward_tokens": float(self.tokens)}


@torch.no_grad()
def _taken_back(
    parameters: Sequence[torch.nn.Parameter], saved: Sequence[torch.Tensor | None] | None
) -> bool:
    """Give parameters the gradients that `_saved` kept; returns whether it did."""
    if saved is None:
        return False
    for parameter, before in zip(parameters, saved, strict=True):
        if before is None:
            parameter.grad = None
        elif parameter.grad is not None:
            local_part(parameter.grad).copy_(before)
    return True
