"""`SimulatedLearner`: a learner without a model that takes the time of a cost model.

It runs in a trainer worker's compute thread like any learner, so that policies on one worker share
its time. Its weights are small real tensors that differ in every version, so that the code that
publishes, persists, commits and verifies them really runs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.trainer.learning.interface import Applied
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_config, policy_seed
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import BatchSummary, Row
from services.trainer.state import suspension
from testbed.timeline import Timeline, TimelineSpan
from troupe.algorithms.advantages import group_advantages
from troupe.contracts import metric_names
from troupe.job import JobSpec, SimulatedSpec


class StandIn(torch.nn.Module):
    """Stand-in for a model: the smallest weights with a vocabulary; they encode their version."""

    version: torch.Tensor

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = torch.nn.Embedding(vocabulary, 1)
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the input embeddings, of weight [vocabulary, 1]."""
        return self.embedding

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Write the files of a checkpoint, which no library can load as a model."""
        (directory / "config.json").write_text(json.dumps({"model_type": "simulated"}))
        save_file(dict(state_dict), directory / "model.safetensors")


def stand_in(policy: str, spec: JobSpec) -> StandIn:
    """Make the stand-in for a policy's model. Blocking.

    Raises InvalidArgument if the model's configuration cannot be read.
    """
    config = load_config(policy, spec.policies[policy])
    return StandIn(config.get_text_config().vocab_size, policy_seed(spec.seed, policy))


class SimulatedLearner(Learner):
    """Trains the stand-in of one policy at the pace of `policies.X.simulated`."""

    def __init__(
        self, model: StandIn, spec: JobSpec, policy: str, lane: str, trace_dir: Path | None
    ) -> None:
        """`lane`: the worker's name in the timeline, which is written to `trace_dir`, if given."""
        super().__init__(model, spec, policy, share_prefixes=False)
        self._pace = spec.policies[policy].simulated or SimulatedSpec()
        self._summary = BatchSummary()
        self._spent, self._batches = 0.0, 0
        # Fill the buffer: moving pages that were never written would cost nothing.
        self._ballast = torch.ones(self._pace.state_bytes, dtype=torch.uint8)
        self._name, self._lane = policy, lane
        self._timeline = Timeline(trace_dir, f"trainer-{lane}-{policy}")

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Wait for the simulated time of these rows' forward and backward. Raises `Stopped`."""
        tokens = sum(len(row.ids) for row in rows)
        began = time.time()
        advantages = group_advantages(
            [row.reward for row in rows],
            [row.group_rewards for row in rows],
            scale_by_std=self._job.algorithm.scale_by_std,
        )
        self._summary.add(rows, advantages.numpy())
        self._batches += 1
        self._pass(tokens / self._pace.backward_tokens_per_second, stop)
        self._note("train", began, tokens)

    def apply(
        self,
        version: int,
        stop: threading.Event | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Applied:
        """Wait for the simulated time of an optimizer step, and make the next version's weights."""
        began = time.time()
        metrics = self._summary.metrics(version)
        reason = "" if self._summary.response_tokens else "no sample has a response token"
        if not reason:
            self._pass(self._pace.step_seconds, None)
            self.model.version.fill_(version + 1)
            metrics[metric_names.GRAD_NORM] = 0.0
            self._note("step", began, 0)
        metrics[metric_names.TRAIN_SECONDS] = self._spent
        metrics[metric_names.MICRO_BATCHES] = float(self._batches)
        digest = self._summary.digest
        self.discard()
        self._timeline.flush()
        return Applied(not reason, reason, metrics, digest)

    def discard(self) -> None:
        """Forget the accumulated rows."""
        super().discard()
        self._summary = BatchSummary()
        self._spent, self._batches = 0.0, 0

    def suspended(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See `Learner.suspended`."""
        tensors, values = super().suspended()
        simulated = {
            "summary": suspension.split_fields(self._summary)[1],
            "spent": self._spent,
            "batches": self._batches,
        }
        own = suspension.under("simulated", {"ballast": self._ballast})
        return tensors | own, values | {"simulated": simulated}

    def adopt(self, tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """See `Learner.adopt`."""
        super().adopt(tensors, values)
        self._ballast = suspension.below("simulated", tensors)["ballast"]
        simulated = values["simulated"]
        suspension.join_fields(self._summary, {}, simulated["summary"])
        self._spent, self._batches = simulated["spent"], simulated["batches"]

    def release(self) -> list[torch.Tensor]:
        """See `Learner.release`."""
        ballast, self._ballast = self._ballast, torch.empty(0, dtype=torch.uint8)
        return [*super().release(), ballast]

    def _pass(self, seconds: float, stop: threading.Event | None) -> None:
        if stop is None:
            time.sleep(seconds)
        elif stop.wait(seconds):
            raise Stopped
        self._spent += seconds

    def _note(self, what: str, began: float, tokens: int) -> None:
        self._timeline.add(TimelineSpan(self._lane, what, self._name, began, time.time(), tokens))
