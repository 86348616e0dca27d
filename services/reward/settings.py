"""What the reward service is told by `TROUPE_REWARD_*`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.chassis.settings import ServiceSettings
from services.reward.gpu.manager import ModelSettings
from services.reward.quota.manager import QuotaSettings


class RewardSettings(ServiceSettings):
    """What the reward service needs to know besides."""

    reward_workers: int = Field(default=2, ge=0)
    """Worker processes, that is, calls that run at once: the most that there are. 0: calls run on
    other hosts only (`python -m services.reward.hosts`)."""
    reward_min_workers: int = Field(default=1, ge=0)
    """Worker processes that are there without any call; 0: none, the first call waits for one."""
    reward_idle_seconds: float = Field(default=60, ge=0)
    """How long a worker process that is not needed waits for another call."""
    reward_cores: int = Field(default=0, ge=0)
    """Cores that calls hold while they run: handed out anew for every call, as many as pay.
    0: none are handed out, and a call takes a worker process and nothing else."""
    reward_core_backend: Literal["auto", "cgroup2", "cgroup1", "affinity"] = "auto"
    """How the kernel is told; auto: the first of them that works here."""
    reward_order: Literal["shortest", "fcfs"] = "shortest"
    """What goes first of one job and priority. shortest: the trajectory that has least left to do,
    by what others of its job were seen to do; fcfs: what came first."""
    reward_patience_seconds: float = Field(default=300, gt=0, allow_inf_nan=False)
    """With `shortest`: no call is passed by one that comes so many seconds after it."""
    reward_spares: bool = True
    """Whether a worker in a sandbox, which serves one call, has its successor started at once: the
    next call finds it ready. Otherwise that call starts it."""
    reward_sandboxes: int = Field(default=64, gt=0)
    """Sandboxes that outlive a call (`stateful`), and containers, that may be open at once; calls
    that need another wait."""
    reward_sandbox_memory_mib: int = Field(default=0, ge=0)
    """Declared memory of all of them together; 0: three quarters of this machine's."""
    reward_sandbox_idle_seconds: float = Field(default=600, gt=0)
    """How long one without calls is kept for its trajectory, unless its function says otherwise."""
    reward_environment: str = ""
    """Variables of the service's environment that functions of the level `process` get besides
    those of `services/reward/sandbox.py`: names, separated by commas; `*` stands for any
    characters. Those that a judge's key is in, for example."""
    reward_memory_mib: int = Field(default=0, ge=0)
    """Memory for calls: those that run have declared no more together. 0: it is not counted."""
    reward_quotas: dict[str, QuotaSettings] = Field(default_factory=dict)
    """What interfaces outside allow, by name, as JSON:
    `{"judge-api": {"rate": 20, "burst": 40, "concurrency": 16}}`."""
    reward_gpus: int = Field(default=0, ge=0)
    """Devices of this host that models are put on."""
    reward_models: dict[str, ModelSettings] = Field(default_factory=dict)
    """Model services of this host, by name, as JSON: `{"judge": {"entrypoint": "m:make"}}`."""
    reward_host_beat_seconds: float = Field(default=1, gt=0)
    """How often other hosts say that they are there; five missed, and a host is given up."""
    reward_host_expected_seconds: float = Field(default=120, ge=0)
    """A host that left is expected back for so long: what only it can run is not refused. A service
    without workers of its own expects hosts when it starts, too, for 15 seconds at most."""
    reward_import_seconds: float = Field(default=120, gt=0)
    """How long a worker may take to import a function's module."""
    reward_max_queued: int = Field(default=10_000, gt=0)
    """Invocations that may wait; more are asked to come again."""
    reward_result_seconds: float = Field(default=600, gt=0)
    """How long the outcome of an invocation is remembered for a caller that comes back."""
    reward_result_mib: int = Field(default=64, gt=0)
    """Of all outcomes that are remembered; the oldest are forgotten first."""
