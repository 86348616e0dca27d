"""Rewards and tools of a job: where their code is, and the resources that a call needs.

What a job leaves out is as the function declares it (`@troupe.reward`, `@troupe.tool`), else as
`troupe.functions.costs.DEFAULTS` says. The bounds are those of `troupe.functions.validation`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.functions.validation import (
    ARGUMENT,
    MAX_ARGUMENTS,
    MAX_CORES,
    MAX_COUNT,
    MAX_PROCESSES,
    MAX_RETRIES,
    NAME,
    VERSION,
    check_costs,
)
from troupe.job.section import Seconds, SecondsOrNone, Section, check_entrypoint, check_json

ArgumentPath = Annotated[str, Field(pattern=rf"^{ARGUMENT.pattern}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]

_DEPLOYED: Final = re.compile(rf"{NAME.pattern}@{VERSION.pattern}")


class FunctionSpec(Section):
    """A reward or tool that the reward service runs in a worker process. What is left out is as
    the function declares it (`@troupe.reward`, `@troupe.tool`), else the default named."""

    entrypoint: str | None = None
    """`package.module:attribute`, importable where the reward service runs. This or `function`."""
    function: str | None = None
    """`name@version` of a deployed function (`troupe functions deploy`), with the costs that it was
    deployed with; only `arguments` may be set, too."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of every call; not shown to models."""
    version: str | None = Field(default=None, min_length=1)
    """Version of the function's behaviour. Default: "1"."""
    timeout_seconds: Seconds | None = None
    """Time limit of one call; it is then killed and fails with a timeout. Default: 30."""
    memory_mib: Count | None = None
    """Memory limit of the worker process in MiB; 0: unlimited. Default: 512."""
    max_concurrency: Count | None = None
    """Concurrent calls; 0: as many as there are worker processes. Default: 0."""
    max_queued: Count | None = None
    """Calls that may wait; further ones are refused with a retry hint. 0: the service's limit.
    Default: 0."""
    retries: int | None = Field(default=None, ge=0, le=MAX_RETRIES)
    """Retries of a call whose worker died or that timed out; only for functions that may run twice.
    Default: 0."""
    cores: Count | None = None
    """CPU cores that a call needs; 0 for a call that mostly waits. Enforced where the reward
    service schedules cores (`TROUPE_REWARD_CORES`). Default: 1."""
    max_cores: int | None = Field(default=None, ge=0, le=MAX_CORES)
    """Cores that a call can use at most; 0: `cores`. The scheduler decides for every call; the
    function finds its cores in `os.sched_getaffinity(0)`. Default: 0."""
    parallel_fraction: float | None = Field(default=None, ge=0, le=1)
    """Fraction of a call's time that scales with cores (Amdahl). An initial estimate, refined from
    calls with different numbers of cores. Default: 0.9."""
    expected_seconds: SecondsOrNone | None = None
    """Time of a call with the fewest cores: an initial estimate, refined from calls. With
    `seconds_per` the constant part. Default: 0, unknown."""
    seconds_per: dict[ArgumentPath, SecondsOrNone] | None = Field(
        default=None, max_length=MAX_ARGUMENTS
    )
    """Seconds per unit of an argument: of a number, else per item or character. `{tests: 2.5}`;
    `{query.data.tests: 2.5}` for a reward. The scale is refined from calls, also per query, so that
    it need not be measured on this machine. Default: none."""
    gpus: Count | None = None
    """GPU units that a call needs. Default: 0."""
    model_service: str | None = None
    """Model that must be resident on those GPUs. Default: none."""
    quota: str | None = None
    """External quota that a call uses `quota_units` of. Default: none."""
    quota_units: PositiveCount | None = None
    """Units of `quota` per call. Default: 1."""
    sandbox: Literal["process", "bubblewrap", "container"] | None = None
    """Isolation of its worker processes. `process`: `memory_mib`, `reads` and `writes`, for trusted
    code. `bubblewrap`: for code that a model wrote: no network, read-only interpreter and packages,
    a private /tmp, no environment variables, an unprivileged user. `container`: a container of
    `image`. Default: process."""
    stateful: bool | None = None
    """All calls of one trajectory use one sandbox, one after another: files persist between calls,
    processes do not. Default: false."""
    sandbox_idle_seconds: SecondsOrNone | None = None
    """`stateful`: idle time after which a sandbox is ended; 0: the service's setting. Default:
    0."""
    image: str | None = None
    """`container`: image of the container."""
    processes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """In a sandbox: maximum of concurrent processes and threads. Default: 64."""
    disk_mib: PositiveCount | None = None
    """In a sandbox: size of its private /tmp in MiB. Default: 256."""
    reads: list[str] | None = Field(default=None, max_length=1024)
    """`process`, where the kernel has Landlock: files and folders that may be read besides the
    interpreter, the packages and a temporary folder. Default: all that the service may read."""
    writes: list[str] | None = Field(default=None, max_length=1024)
    """As `reads`, for reading and writing."""
    idle_seconds: SecondsOrNone | None = None
    """How long an idle worker is kept. Default: the service's setting."""
    min_workers: Count | None = None
    """Workers that are started in advance and kept. Default: 0."""

    _json = field_validator("arguments")(check_json)

    @field_validator("entrypoint")
    @classmethod
    def _entrypoint(cls, value: str | None) -> str | None:
        return value if value is None else check_entrypoint(value)

    @field_validator("function")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        if value is not None and not _DEPLOYED.fullmatch(value):
            raise ValueError("must look like 'name@version'; `troupe functions list` shows them")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.entrypoint is None) == (self.function is None):
            raise ValueError("give exactly one of `entrypoint` and `function`")
        if self.function is not None:
            for name in ("version", *self.costs):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` of a deployed function is what it was deployed with; remove it, "
                        "or deploy the function with another"
                    )
        return self

    @model_validator(mode="after")
    def _costs_that_work(self) -> Self:
        def refuse(field: str, value: object, message: str, remedy: str) -> None:
            raise ValueError(f"`{field}` = {value} {message}. {remedy}")

        check_costs(self.costs, refuse)
        return self

    @property
    def deployed(self) -> tuple[str, str]:
        """Name and version of a deployed function; empty for one with an entrypoint."""
        name, _, version = (self.function or "").partition("@")
        return name, version

    @property
    def costs(self) -> dict[str, Any]:
        """The costs that the job gives, and nothing else."""
        return self.model_dump(
            exclude_none=True, exclude={"entrypoint", "function", "arguments", "version"}
        )
