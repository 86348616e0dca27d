"""The functions that `algorithm.loss`, `algorithm.correction` and `algorithm.advantage` name.

A plain name selects a built-in function (`LOSSES`, `CORRECTIONS`, `ADVANTAGES`);
`package.module:function` selects a user's own with the same interface: one argument, `Tokens` or
`SampleBatch`, and a tensor as the result. A user's function is tested when it is loaded, and the
result of every call is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch

from troupe.algorithms.advantages import (
    AdvantageFunction,
    SampleBatch,
    dr_grpo,
    grpo,
    maxrl,
    rae,
    reinforce_plus_plus,
    rloo,
)
from troupe.algorithms.corrections import CORRECTIONS, CorrectionFunction, sequence_masked
from troupe.algorithms.objectives import LOSSES, LossFunction, Tokens, traits_of
from troupe.algorithms.step_groups import gigpo, hgpo
from troupe.functions.shipped import opened, using
from troupe.job import JobSpec
from troupe.outcomes import described
from troupe.user_code import call_contained
from troupe.workflow.errors import EntrypointError
from troupe.workflow.loading import load_attribute

# `gae` is the critic's (values.py).
ADVANTAGES: Final[Mapping[str, AdvantageFunction]] = {
    one.__name__: one for one in (grpo, dr_grpo, rloo, maxrl, reinforce_plus_plus, rae, gigpo, hgpo)
}

Field = Literal["loss", "correction", "advantage"]
_ARGUMENT: Final = {"loss": "tokens", "correction": "tokens", "advantage": "samples"}
_REMEDY: Final = "docs/algorithms.md, `Your own functions`, describes its argument and result."


class FunctionFault(Exception):
    """A user's function failed or returned an unusable result. `field`: the job's field."""

    def __init__(self, field: str, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.field, self.path, self.message = field, path, message


class OwnFunction:
    """A user's function; calls raise `FunctionFault` for results that cannot be used."""

    def __init__(self, field: Field, path: str) -> None:
        """Load the function and test it. Raises `EntrypointError`."""
        self._kind, self.field, self.path = field, f"algorithm.{field}", path
        self._function: Callable[..., Any] = load_attribute(path, self.field)
        # For an advantage: whether it needs the statistics of the whole step, or whole groups.
        self.whole_step = bool(getattr(self._function, "whole_step", False))
        self.whole_group = bool(getattr(self._function, "whole_group", False))
        example = _samples() if field == "advantage" else _tokens(gradient=field == "loss")
        try:
            inspect.signature(self._function).bind(None)
        except (TypeError, ValueError) as error:
            raise EntrypointError(
                f"must be a function of one argument: {error}",
                field=self.field,
                value=path,
                remedy=f"Write `def {path.rpartition(':')[2]}({_ARGUMENT[field]}): ...`.",
            ) from error
        try:
            self(example)
        except FunctionFault as fault:
            raise EntrypointError(
                f"on an example, {fault.message}", field=self.field, value=path, remedy=_REMEDY
            ) from fault

    def __call__(self, given: Tokens | SampleBatch) -> torch.Tensor:
        """Return the result, in the type of the arguments. Raises `FunctionFault`."""
        tensors = [one for one in vars(given).values() if isinstance(one, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        hooked = [one for one in tensors if one.requires_grad]
        derived: list[torch.Tensor] = []
        hooks = [one.register_hook(derived.append) for one in hooked]  # type: ignore[no-untyped-call]
        try:
            result = call_contained(self._function, given)
        except Exception as error:
            raise self._fault(f"it raised {described(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if derived:
            raise self._fault(
                "it ran a backward pass itself; the trainer differentiates its result"
            )
        if before != [tensor._version for tensor in tensors]:
            raise self._fault("it changed its arguments in place; compute with copies")
        if problem := self._problem(result, given):
            raise self._fault(problem)
        first = given.rewards if isinstance(given, SampleBatch) else given.logprobs
        checked: torch.Tensor = result.to(first.device, first.dtype)
        return checked

    def _problem(self, result: Any, given: Tokens | SampleBatch) -> str:
        """Return why a result cannot be used; empty if it can."""
        if isinstance(given, SampleBatch):
            shapes = [[len(given.rewards)], [int(given.lengths.sum())]]
        else:
            shapes = [[len(given.logprobs)]]
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            kind = result.dtype if isinstance(result, torch.Tensor) else type(result).__name__
            return f"it returned {kind}, not a tensor of floating-point numbers"
        if list(result.shape) not in shapes:
            wanted = " or ".join(map(str, dict.fromkeys(map(tuple, shapes))))
            return f"it returned shape {tuple(result.shape)}, not {wanted}"
        if self._kind == "loss" and isinstance(given, Tokens):
            if given.logprobs.requires_grad and len(result) and not result.requires_grad:
                return (
                    "its result is detached from `tokens.logprobs`, so there would be no learning"
                )
        elif result.requires_grad:
            return "its result carries gradients; return a constant (`.detach()`)"
        whole = [one for one in vars(given).values() if isinstance(one, torch.Tensor)]
        if not bool(torch.isfinite(result).all()) and all(
            bool(torch.isfinite(one).all()) for one in whole
        ):
            at = int((~torch.isfinite(result)).nonzero()[0])
            found = float(result.detach()[at])
            return f"its result at index {at} is {found}, with finite arguments"
        if self._kind == "correction" and bool((result < 0).any()):
            return f"its smallest weight is {float(result.min()):g}; weights must not be negative"
        return ""

    def _fault(self, message: str) -> FunctionFault:
        return FunctionFault(self.field, self.path, message)


@dataclass(frozen=True)
class AlgorithmFunctions:
    """The functions of one job."""

    loss: LossFunction
    # None: tokens are not corrected.
    correction: CorrectionFunction | None
    # None: the critic computes advantages.
    advantage: AdvantageFunction | None

    @classmethod
    def of(cls, spec: JobSpec) -> Self:
        """Load the functions of `spec`. Raises `EntrypointError` naming the field."""
        with using(opened(spec.code.sha256) if spec.code else None):
            made = cls(
                _function("loss", spec.algorithm.loss, LOSSES),
                _function("correction", spec.correction, CORRECTIONS),
                _function("advantage", spec.algorithm.advantage, {**ADVANTAGES, "gae": None}),
            )
        if getattr(made.advantage, "whole_step", False) and spec.pipeline.mode == "micro_batch":
            raise EntrypointError(
                "has the attribute `whole_step`, but mode `micro_batch` begins before all rewards "
                "of the step are known",
                field="algorithm.advantage",
                value=spec.algorithm.advantage,
                remedy="Use pipeline.mode `sync`, `serial` or `async`.",
            )
        return made

    @property
    def scales_with_advantage(self) -> bool:
        """Whether a token without an advantage has no loss; false for a user's loss, where this is
        unknown."""
        return traits_of(self.loss).scales_with_advantage

    @property
    def couples_tokens(self) -> bool:
        """Whether a token's loss may depend on the other tokens of its sample."""
        coupled = isinstance(self.correction, OwnFunction) or self.correction is sequence_masked
        return coupled or traits_of(self.loss).couples_tokens


def _function(field: Field, name: str, built_in: Any) -> Any:
    return OwnFunction(field, name) if ":" in name else built_in[name]


def _tokens(*, gradient: bool) -> Tokens:
    """Return an example of three samples with seven tokens."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7, -1.5], requires_grad=gradient)
    behaviour = torch.tensor([-0.6, -0.9, -2.5, -0.1, -2.0, -0.7, -1.4])
    return Tokens(
        logprobs,
        behaviour,
        behaviour,
        torch.tensor([1.0, 1.0, 1.0, -0.5, 0.3, 0.3, 0.3]),
        torch.tensor([0, 0, 0, 1, 2, 2, 2]),
        torch.ones(7, dtype=torch.bool) if gradient else None,
    )


def _samples() -> SampleBatch:
    """Return an example of three samples with seven tokens."""
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    return SampleBatch(
        rewards,
        [[0.0, 1.0], [0.0, 1.0], [0.5]],
        ["one", "one", "two"],
        torch.tensor([0, 0, 1]),
        torch.tensor([3, 1, 3]),
        torch.tensor([-0.6, -0.9, -2.5, -0.1, -2.0, -0.7, -1.4]),
        torch.zeros(3, dtype=torch.float64),
        torch.full((3,), 0.5, dtype=torch.float64),
        torch.full((3,), 0.4, dtype=torch.float64),
        queries=["q0", "q0", "q1"],
        trajectories=["q0-t0", "q0-t1", "q1-t0"],
        groups=["q0/one", "q0/one", "q1/two"],
        chains=["", "", ""],
        prompts=[11, 11, 12],
        columns=[{}, {}, {}],
        observations=[11, 11, 12],
        own_entries=rewards,
        earned=rewards,
    )
