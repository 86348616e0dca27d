"""The kinds of engines, by the names that jobs give them, and their hosts.

A further inference server is a package with a subclass of `InferenceServer` and a subclass of
`ServerEngine` that names it, and a line in `ENGINES`; what jobs may say about it is in
troupe/job/engines."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.server_process import EngineDevices
from troupe.job import PolicySpec
from troupe.job.engines import server_kinds
from troupe.rpc import FailedPrecondition

# Import paths, since engines import torch and transformers, which takes seconds, and the testbed is
# no part of the product.
ENGINES: Final[dict[str, str]] = {
    "embedded": "services.rollout.engines.embedded.engine:EmbeddedEngine",
    "sglang": "services.rollout.engines.sglang.engine:SglangEngine",
    "vllm": "services.rollout.engines.vllm.engine:VllmEngine",
    "simulated": "testbed.simulated_engine:SimulatedEngine",
}


def engine_class_of(policy_name: str, policy_spec: PolicySpec) -> type[ServingEngine]:
    """The class of a policy's engines. Raises FailedPrecondition of kind "package_missing"."""
    kind = "simulated" if policy_spec.simulated is not None else policy_spec.engine.kind
    try:
        found: type[ServingEngine] = pkgutil.resolve_name(ENGINES[kind])
    except ModuleNotFoundError as error:
        if kind != "simulated":
            raise
        raise FailedPrecondition(
            "the simulated engine is in Troupe's repository, not in what pip installs",
            kind="package_missing",
            field=f"policies.{policy_name}.simulated",
            value="...",
            remedy="Start the cluster in a checkout of the repository, at its root.",
        ) from error
    return found


def make_host(
    host_id: str,
    specs: Mapping[str, PolicySpec],
    *,
    threads: int = 1,
    replica: int = 0,
    trace_dir: Path | None = None,
    deterministic: bool = False,
    devices: EngineDevices | None = None,
    device: str = "cpu",
    routed_experts: bool = False,
) -> EngineHost:
    """Return the host of the engines of the policies `specs` (by name, in the job's order); its
    `engine` makes them. Several policies are a group (`troupe.job.engines.sharing`).

    A kind gets only the options that the constructor of its engines names. `threads`:
    torch threads of an embedded engine. `replica`: the host's number among its policies' hosts on
    this worker; an attached server has the URL of that number. `trace_dir`: where a simulated
    engine writes when it was busy. `deterministic`: a turn is a function of (weights, prompt,
    seed), or the engine does not start. `devices`: the worker's, which its engines share
    out. `device`: "auto", "cpu" or "cuda", where an embedded engine computes. `routed_experts`:
    turns of trained policies say which experts of a mixture their tokens were sent to. Raises
    FailedPrecondition of kind "package_missing", or "no_routed_experts" for a kind that cannot say
    it.
    """
    name, spec = next(iter(specs.items()))
    engine_class = engine_class_of(name, spec)
    options = {
        "threads": threads,
        "replica": replica,
        "trace_dir": trace_dir,
        "deterministic": deterministic,
        "devices": devices,
        "device": device,
        "routed_experts": routed_experts,
    }
    named = inspect.signature(engine_class).parameters
    if routed_experts and "routed_experts" not in named:
        raise FailedPrecondition(
            f"engines of kind '{engine_class.kind}' do not say which experts their tokens were "
            "sent to",
            kind="no_routed_experts",
            field="algorithm.router_replay",
            value=True,
            remedy=f"Turn it off, or serve the policy with `kind: embedded`, {server_kinds()}.",
        )
    known = {option: value for option, value in options.items() if option in named}
    return engine_class.host_class(host_id, specs, engine_class, **known)


def make_engine(
    engine_id: str, policy_name: str, policy_spec: PolicySpec, **options: Any
) -> ServingEngine:
    """Return an engine on a host of its own, not started; `options` and errors: see
    `make_host`."""
    host = make_host(engine_id, {policy_name: policy_spec}, **options)
    engine: ServingEngine = host.engine(engine_id, policy_name)
    return engine
