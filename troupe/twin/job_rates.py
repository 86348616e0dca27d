"""Costs of a job's policies on a class of device: engines, trainers, memory.

They have three origins, each preferred to the one before it: the cost models of devices and models
(`troupe.twin.costs`), the measurements of a run of the job (`JobProfile`), and the job's own cost
model of simulated policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, harmonic_mean
from typing import Final

from troupe.job import JobSpec, SimulatedSpec
from troupe.job.engines.sharing import engine_groups
from troupe.job.sizing import adapter_parameters, setup_of
from troupe.scheduling.memory import ModelShape, TrainingSetup, rank_memory
from troupe.twin.costs import (
    DeviceCosts,
    EngineRates,
    TrainerRates,
    engine_rates,
    engine_turns,
    trainer_rates,
)
from troupe.twin.profile import JobProfile

# Turns of a simulated engine, and of an engine on a CPU, for which the job sets no number.
_SIMULATED_TURNS: Final = 64
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class JobRates:
    """The costs of a job's policies on one class of device.

    `shapes` has the models of all policies except simulated ones; `context` the mean tokens of
    their turns: the prompt and half of the response; `engine_context` the mean tokens of all turns
    on their engines, which other policies may share.
    """

    spec: JobSpec
    device: DeviceCosts
    shapes: Mapping[str, ModelShape]
    context: Mapping[str, float]
    engine_context: Mapping[str, float]
    profile: JobProfile | None = None

    @cached_property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        """By policy: the policies that share its engines, itself included."""
        alone = {name: (name,) for name in self.spec.policies}
        groups = engine_groups(self.spec)
        return alone | {name: group.policies for group in groups for name in group.policies}

    def simulated(self, name: str) -> SimulatedSpec | None:
        """Return the job's cost model of a simulated policy; None for a real one."""
        found = self.spec.policies[name].simulated
        return None if found is None else found.of_class(self.device.name)

    def engine(self, name: str, tensor_parallel: int, running: float = 64.0) -> EngineRates:
        """Return the times of a policy's engine over `tensor_parallel` devices."""
        each = [self._own_engine(one, tensor_parallel, running) for one in self.members[name]]
        if len(each) == 1:
            return each[0]
        # Measured by each of the policies that share it.
        return replace(
            each[0],
            prefill_tokens_per_second=harmonic_mean(e.prefill_tokens_per_second for e in each),
            decode_seconds=fmean(one.decode_seconds for one in each),
            decode_seconds_per_turn=fmean(one.decode_seconds_per_turn for one in each),
        )

    def _own_engine(self, name: str, tensor_parallel: int, running: float) -> EngineRates:
        if (pace := self.simulated(name)) is not None:
            return EngineRates(
                pace.prefill_tokens_per_second,
                pace.decode_seconds,
                pace.decode_seconds_per_turn,
                load_seconds=pace.load_seconds,
            )
        found = self._assumed_engine(name, tensor_parallel, running)
        profile = self._measured(name)
        speed = None if profile is None else profile.policies[name].engine.speed()
        if profile is None or speed is None:
            return found
        # The factor by which it was slower than assumed where it was measured.
        same = self._assumed_engine(name, profile.tensor_parallel[name], speed.concurrency)
        whole = speed.step_seconds(speed.concurrency)
        assumed = same.decode_seconds + same.decode_seconds_per_turn * speed.concurrency
        step = per_turn = whole / assumed if whole > 0 else 1.0
        if speed.decode_seconds > 0 and speed.decode_seconds_per_turn > 0:
            step = speed.decode_seconds / same.decode_seconds
            per_turn = speed.decode_seconds_per_turn / same.decode_seconds_per_turn
        read = 1.0
        if speed.read_seconds > 0:
            read = 1 / (speed.read_seconds * same.prefill_tokens_per_second)
        return replace(
            found,
            prefill_tokens_per_second=found.prefill_tokens_per_second * read,
            decode_seconds=found.decode_seconds * step,
            decode_seconds_per_turn=found.decode_seconds_per_turn * per_turn,
        )

    def turns(self, name: str, tensor_parallel: int) -> int:
        """Return the number of turns that fit into an engine at once; 0: its weights do not fit."""
        most = self.spec.policies[name].engine.max_running
        if self.simulated(name) is not None:
            return most or _SIMULATED_TURNS
        return engine_turns(
            self.shapes[name],
            self.device,
            tensor_parallel=tensor_parallel,
            context=1.5 * self.engine_context[name],
            adapters=sum(map(self._adapter, self.members[name])),
        )

    def loads_beside(self, name: str) -> bool:
        """Return whether the versions that a policy's engines load are adapters, which are loaded
        next to those in use."""
        return any(self.spec.policies[one].lora is not None for one in self.members[name])

    def _adapter(self, name: str) -> int:
        return adapter_parameters(self.spec.policies[name], self.shapes[name])

    def widths(self, name: str, most: int) -> list[int]:
        """Return the tensor-parallel sizes up to `most` with which an engine fits; at most
        three."""
        if self.simulated(name) is not None:
            return [1] if most >= 1 else []
        heads = self.shapes[name].kv_heads
        fitting = [
            count
            for count in (1, 2, 4, 8)
            if count <= most and heads % min(count, heads) == 0 and self.turns(name, count) >= 4
        ]
        return fitting[:3] if self.spec.policies[name].engine.is_server else fitting[:1]

    def trainer(self, name: str, ranks: int) -> TrainerRates:
        """Return the times of a policy's gang of `ranks` devices."""
        if (pace := self.simulated(name)) is not None:
            return TrainerRates(pace.backward_tokens_per_second, pace.step_seconds)
        found = self._assumed_trainer(name, ranks)
        profile = self._measured(name)
        times = None if profile is None else profile.policies[name]
        if profile is None or times is None or not times.trained_tokens_per_second:
            return found
        same = self._assumed_trainer(name, max(1, profile.gangs[name]))
        faster = times.trained_tokens_per_second / same.backward_tokens_per_second
        step = times.publish_seconds / max(times.steps, 1e-9) / max(same.step_seconds, 1e-9)
        return replace(
            found,
            backward_tokens_per_second=found.backward_tokens_per_second * faster,
            step_seconds=found.step_seconds * step,
            # The measured seconds of its tokens include it.
            micro_batch_seconds=0.0,
        )

    def trainer_bytes(self, name: str, ranks: int) -> int:
        """Return the bytes on each of the gang's devices."""
        if (pace := self.simulated(name)) is not None:
            return pace.state_bytes
        return rank_memory(self.shapes[name], self._setup(name, ranks)).total

    def weights_text(self, name: str) -> str:
        """Return the bytes of a policy's weights in an engine, for people."""
        return f"{2 * self.shapes[name].parameters / _GIB:.0f} GB"

    def origins(self) -> tuple[list[str], list[str]]:
        """Describe which parts of a plan are measured and which are assumed."""
        measured, assumed = [], []
        profile = self.profile
        if profile is not None:
            measured.append(
                f"turns, lengths and waits: {profile.trajectories} trajectories of "
                f"{profile.steps} steps; a turn waits {profile.waits.mean:.2g} s for tools and "
                "environment"
            )
        else:
            assumed.append("turns, lengths and waits")
        for name in self.spec.policies:
            if self.simulated(name) is not None:
                measured.append(f"{name}: engines and trainer with the job's simulated times")
                continue
            what = ["weights' transfer"]
            used = self._measured(name)
            times = None if used is None else used.policies[name]
            speed = None if times is None else times.engine.speed()
            if times is not None and speed is not None:
                each = speed.step_seconds(speed.concurrency)
                measured.append(
                    f"{name}: an engine's {speed.concurrency / max(each, 1e-9):,.0f} tokens/s with "
                    f"{speed.concurrency:.0f} turns at once"
                )
            else:
                what.append("engines' speed")
            if times is not None and times.trained_tokens_per_second:
                measured.append(
                    f"{name}: its trainer's {times.trained_tokens_per_second:,.0f} tokens/s, and "
                    f"{times.publish_seconds / max(times.steps, 1e-9):.2g} s to publish weights"
                )
            elif name in self.spec.trained_policies:
                what.append("trainers' speed")
            why = ""
            if profile is not None and used is None:
                seen = profile.device_classes.get(name) or "devices of unknown class"
                why = f" (it was measured on {seen})"
            assumed.append(f"{name}: {', '.join(what)}{why}")
        return measured, assumed

    def _measured(self, name: str) -> JobProfile | None:
        """Return the profile, if the policy was measured on devices of this class."""
        profile = self.profile
        if profile is None:
            return None
        seen = profile.device_classes.get(name, "")
        return profile if seen.upper() == self.device.name.upper() else None

    def _assumed_engine(self, name: str, tensor_parallel: int, running: float) -> EngineRates:
        return engine_rates(
            self.shapes[name],
            self.device,
            tensor_parallel=tensor_parallel,
            context=self.engine_context[name],
            running=running,
            adapter=self._adapter(name),
        )

    def _assumed_trainer(self, name: str, ranks: int) -> TrainerRates:
        setup, shape = self._setup(name, ranks), self.shapes[name]
        return trainer_rates(
            shape,
            self.device,
            ranks=ranks,
            context=self.context[name],
            recomputed=setup.checkpointing * (1.0 - setup.kept_layers / shape.layers),
            adapter=setup.adapter,
        )

    def _setup(self, name: str, ranks: int) -> TrainingSetup:
        return setup_of(
            self.spec,
            name,
            self.shapes[name],
            device="cuda",
            memory=self.device.memory,
            ranks=ranks,
        )
