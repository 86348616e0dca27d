"""Makes the engine that a policy's section asks for."""

from __future__ import annotations

import importlib
from pathlib import Path

from services.rollout.engines.base import ServingEngine
from troupe.job import PolicySpec


def make_engine(
    engine_id: str,
    policy_name: str,
    policy_spec: PolicySpec,
    *,
    threads: int = 1,
    replica: int = 0,
    work_dir: Path | None = None,
    trace_dir: Path | None = None,
    deterministic: bool = False,
) -> ServingEngine:
    """An engine that has not been started.

    `threads`: torch threads of an embedded engine. `replica`: which of the policy's replicas on
    this worker it is; an attached SGLang engine takes the URL of that number. `work_dir`: where
    a launched server's log and files go; default: a temporary directory.
    `trace_dir`: where a simulated engine writes when it was busy. `deterministic`: a turn is a
    function of (weights, prompt, seed), or the engine does not start.
    """
    if policy_spec.simulated is not None:
        # By name: the testbed is no part of the product.
        testbed = importlib.import_module("testbed.simulated_engine")
        engine: ServingEngine = testbed.SimulatedEngine(
            engine_id, policy_name, policy_spec, trace_dir=trace_dir
        )
        return engine
    if policy_spec.engine.kind == "embedded":
        from services.rollout.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(
            engine_id, policy_name, policy_spec, threads=threads, deterministic=deterministic
        )
    from services.rollout.engines.sglang.engine import SglangEngine

    return SglangEngine(
        engine_id,
        policy_name,
        policy_spec,
        replica=replica,
        work_dir=work_dir,
        deterministic=deterministic,
    )
