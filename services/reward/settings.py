"""Settings of the reward service and its hosts: the variables `TROUPE_REWARD_*`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.chassis.settings import ServiceSettings
from services.reward.gpu.manager import ModelSettings
from services.reward.quota import QuotaSettings


class RewardSettings(ServiceSettings):
    """Settings of the reward service in addition to every service's."""

    reward_workers: int = Field(default=2, ge=0)
    """Worker processes at most, that is, calls that run at once. 0: calls run on attached hosts
    only (`python -m services.reward.hosts`)."""
    reward_min_workers: int = Field(default=1, ge=0)
    """Worker processes that are kept without calls. 0: the first call waits for one to start."""
    reward_idle_seconds: float = Field(default=60, ge=0)
    """How long an idle worker process is kept."""
    reward_cores: int = Field(default=0, ge=0)
    """Cores that are assigned to calls while they run, for each call as many as pay off. 0: none
    are, and a call takes a worker process and nothing else."""
    reward_core_backend: Literal["auto", "cgroup2", "cgroup1", "affinity"] = "auto"
    """How calls are bound to cores; auto: the first of the others that works here."""
    reward_order: Literal["shortest", "fcfs"] = "shortest"
    """Order of calls of one job and priority. shortest: by how little its trajectory has left to
    do, estimated from others of the job; fcfs: by arrival."""
    reward_patience_seconds: float = Field(default=300, gt=0, allow_inf_nan=False)
    """With `shortest`: no call is overtaken by one that comes so many seconds after it."""
    reward_spares: bool = True
    """Whether the successor of a worker in a sandbox, which serves a single call, is started at
    once, so that the next call finds it ready; otherwise that call starts it."""
    reward_sandboxes: int = Field(default=64, gt=0)
    """Stateful sandboxes and containers that may be open at once; calls that need another wait."""
    reward_sandbox_memory_mib: int = Field(default=0, ge=0)
    """Declared memory of all these together; 0: three quarters of this machine's."""
    reward_sandbox_idle_seconds: float = Field(default=600, gt=0)
    """How long a stateful sandbox is kept without calls, unless its function says otherwise."""
    reward_environment: str = ""
    """Variables of the service's environment that functions of the level `process` see, in addition
    to the list in `services/reward/sandboxes/profile.py`: names separated by commas, `*` for any
    characters. For example the one with a judge's API key."""
    reward_memory_mib: int = Field(default=0, ge=0)
    """Memory that running calls may have declared together. 0: it is not counted."""
    reward_quotas: dict[str, QuotaSettings] = Field(default_factory=dict)
    """Quotas of interfaces outside, by name, as JSON:
    `{"judge-api": {"rate": 20, "burst": 40, "concurrency": 16}}`."""
    reward_gpus: int = Field(default=0, ge=0)
    """Devices of this host for models."""
    reward_models: dict[str, ModelSettings] = Field(default_factory=dict)
    """Model services of this host, by name, as JSON: `{"judge": {"entrypoint": "m:make"}}`."""
    reward_host_beat_seconds: float = Field(default=1, gt=0)
    """How often attached hosts send a beat; a host that misses five is given up."""
    reward_host_expected_seconds: float = Field(default=120, ge=0)
    """How long functions that only a host can run that left are not refused, as it may come back.
    A service without workers of its own expects hosts at its start, too, for 15 seconds at most."""
    reward_import_seconds: float = Field(default=120, gt=0)
    """How long a worker may take to import a function's module."""
    reward_max_queued: int = Field(default=10_000, gt=0)
    """Invocations that may be open at once; more are refused for now."""
    reward_result_seconds: float = Field(default=600, gt=0)
    """How long the outcome of an invocation is kept for a caller that repeats its id."""
    reward_result_mib: int = Field(default=64, gt=0)
    """Size of all outcomes that are kept; the oldest are dropped first."""
