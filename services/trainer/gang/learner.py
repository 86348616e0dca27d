"""A learner whose model is held by a gang: every call is an order to all of its ranks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from services.trainer.disk import in_memory
from services.trainer.gang.frames import encode_rows
from services.trainer.gang.gangs import Gangs
from services.trainer.learner import Applied
from services.trainer.named import Tensors
from services.trainer.optimizer import Moments
from services.trainer.policy_model import load_model, outline, positions_of
from services.trainer.rows import Load, Row, columns_of, parse_rows
from troupe.job import JobSpec
from troupe.rpc import DataLoss
from troupe.transfer.checksum import dtype_name
from troupe.v1 import experience_store_pb2 as store_pb


class GangLearner:
    """What `Binding` and `StepRun` use of a `Learner`, for a policy that a gang trains.

    Raises what `Learner` does, and Aborted of kind "gang_lost" when a rank has ended. Then it is
    `lost` until `restore`, `load` or `adopt`, which start another gang.
    """

    def __init__(
        self, gangs: Gangs, key: str, spec: JobSpec, policy: str, options: Mapping[str, Any]
    ) -> None:
        """`key` tells apart the policies that a gang holds; `options`: those of `Learner`."""
        self._gangs, self._key = gangs, key
        self._job, self._policy, self._options = spec, policy, dict(options)
        self._size = spec.policies[policy].trainer.gang
        self._reference: Path | None = None
        gangs.check(policy, self._size)
        self._open()

    @property
    def lost(self) -> bool:
        """Whether the ranks that held the model have gone, and with them its state."""
        return self._gang.lost

    @property
    def model(self) -> Any:
        """The Hugging Face model, whole and with its first weights; made for who asks."""
        return load_model(self._policy, self._job.policies[self._policy], self._job.seed)

    @functools.cached_property
    def _longest(self) -> int:
        """Positions of the model, which is too large to be made for every claim."""
        return positions_of(outline(self._policy, self._job.policies[self._policy]))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss contains a divergence from the first version."""
        brought = "reference_logprobs" in self._job.pipeline.required_columns
        return self._job.algorithm.kl_coefficient > 0 and not brought

    @property
    def base(self) -> None:
        """None: all weights are trained."""
        return

    def load_reference(self, directory: Path) -> None:
        """Keep a frozen model with the weights of a state in `directory` for the divergence."""
        self._reference = directory  # another gang reads it again
        self._order("reference", directory=str(directory))

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[Row]:
        """What `accumulate` takes of a claim. Raises as `parse_rows`."""
        columns = columns_of(self._job.algorithm)
        return parse_rows(claimed, self.vocabulary, load, columns, longest=self._longest)

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Add the gradient of these rows' summed loss. Raises `Stopped` between passes."""
        described, data = encode_rows(rows)
        self._order("accumulate", data, stop, rows=described)

    def complete(self, stop: threading.Event | None = None) -> None:
        """All of the step's rows have come. Raises `Stopped`."""
        self._order("complete", stop=stop)

    def apply(self, version: int, stop: threading.Event | None = None) -> Applied:
        """Step with what was accumulated since the last step, if it is finite. Raises `Stopped`."""
        return Applied(**self._order("apply", stop=stop, version=version).header)

    def discard(self) -> None:
        """Forget what was accumulated."""
        self._order("discard")

    # State.

    def published(self) -> Tensors:
        """What engines load; whole, in memory that ranks and this process share."""
        return self._gathered("published")

    def weights(self) -> Tensors:
        """Parameters and persistent buffers in full precision, whole."""
        return self._gathered("weights")

    def moments(self) -> Moments:
        """The state of the optimizer and of the baselines, whole."""
        return self._gathered("moments")

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Take over whole weights and moments; forgets accumulated gradients."""
        self._revive()
        self._hand_over("receive", {**weights, **moments})

    def save(self, directory: Path) -> dict[str, str]:
        """Have every rank write its part of weights and moments; the files' checksums."""
        files: dict[str, str] = self._order("save", directory=str(directory)).header["files"]
        return files

    def load(self, directory: Path) -> None:
        """Have every rank read its part of what `save` or a single device has written."""
        self._revive()
        try:
            self._order("load", directory=str(directory))
        except ValueError as error:
            raise DataLoss(
                f"training state {directory} is not of this model: {error}",
                kind="state_corrupt",
                remedy="Restore the directory from a copy and resume the job; or begin a new one "
                "with the newest checkpoint as its policy's `model.path`.",
            ) from error

    # Suspension: all of it, in the middle of a step too.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Whole tensors and plain values (JSON) from which `adopt` goes on."""
        path = self._gang.new_file()
        try:
            answer = self._order("suspend", path=str(path))
            return load_file(path), answer.header["values"]
        finally:
            path.unlink(missing_ok=True)

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Go on from what `suspended` gave, here or where one device trained the policy."""
        self._revive()
        self._hand_over("resume", tensors, values=dict(values))

    def leave(self) -> list[torch.Tensor]:
        """Let the ranks forget the policy; only `adopt` makes a learner of this again."""
        self._left = True
        self._gangs.forget(self._gang, self._key)
        return []

    # How.

    def _open(self) -> None:
        self._left = False
        self._gang = self._gangs.of(self._size)
        self._gangs.keep(self._gang, self._key)
        try:
            answer = self._order(
                "open",
                spec=self._job.model_dump_json(),
                policy=self._policy,
                options=self._options,
            )
            self.vocabulary: int = answer.header["vocabulary"]
            self.num_parameters: int = answer.header["parameters"]
            if self._reference is not None:
                self.load_reference(self._reference)
        except BaseException:
            self.leave()  # nobody else would
            raise

    def _revive(self) -> None:
        """Have ranks that know the policy, if need be of another gang."""
        if self._left or self.lost:
            self._open()

    def _order(
        self,
        name: str,
        body: bytes = b"",
        stop: threading.Event | None = None,
        **header: Any,
    ) -> Any:
        return self._gang.order(name, body, stop, key=self._key, **header)

    def _hand_over(self, name: str, tensors: Mapping[str, torch.Tensor], **header: Any) -> None:
        """Give whole tensors to the ranks, in a file in memory."""
        path = self._gang.new_file()
        plain = {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}
        described = {n: (dtype_name(t.dtype), list(t.shape)) for n, t in plain.items()}
        try:
            with in_memory(path, "state"):
                save_file(plain, path)
            self._order(name, path=str(path), tensors=described, **header)
        finally:
            path.unlink(missing_ok=True)

    def _gathered(self, what: Literal["published", "weights", "moments"]) -> Tensors:
        path = self._gang.new_file()
        try:
            self._order("gather", what=what, path=str(path))
            # Mapped, not read: the memory goes with the last of these tensors.
            found: Tensors = load_file(path)
            return found
        finally:
            path.unlink(missing_ok=True)
