"""A reward or tool of a job: where its code is, and what a call of it takes.

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
    """Keyword arguments of every call, besides those of the caller; models do not see them."""
    version: str | None = Field(default=None, min_length=1)
    """Changes whenever the function's behaviour does. Default: "1"."""
    timeout_seconds: Seconds | None = None
    """Longest run of one call; then it is killed and the call fails with a timeout. Default: 30."""
    memory_mib: Count | None = None
    """Memory that a call may take in its worker process; 0: unlimited. Default: 512."""
    max_concurrency: Count | None = None
    """Calls at once; 0: as many as there are worker processes. Default: 0."""
    max_queued: Count | None = None
    """Calls that may wait; more are asked to come again. 0: as many as the service takes.
    Default: 0."""
    retries: int | None = Field(default=None, ge=0, le=MAX_RETRIES)
    """Times that a call is begun again whose worker died or that took too long; only for functions
    that may run twice. Default: 0."""
    cores: Count | None = None
    """Cores that a call takes while it runs; 0 for one that waits for something else. They count
    where the reward service hands cores out (`TROUPE_REWARD_CORES`). Default: 1."""
    max_cores: int | None = Field(default=None, ge=0, le=MAX_CORES)
    """Cores that a call can make use of; 0: `cores`. How many it gets, up to that, the scheduler
    decides anew for every call. The function finds them in `os.sched_getaffinity(0)`. Default: 0.
    """
    parallel_fraction: float | None = Field(default=None, ge=0, le=1)
    """Part of a call's time that more cores make shorter. A first guess: it is learned from calls
    that ran with different numbers of cores. Default: 0.9."""
    expected_seconds: SecondsOrNone | None = None
    """How long a call takes with the fewest cores: a first guess, as `parallel_fraction`; with
    `seconds_per` what every call takes besides. Default: 0, not known."""
    seconds_per: dict[ArgumentPath, SecondsOrNone] | None = Field(
        default=None, max_length=MAX_ARGUMENTS
    )
    """How much longer a call takes for what it is given, by argument: seconds for each one of a
    number, else for each item or character. `{tests: 2.5}`; `{query.data.tests: 2.5}` for a reward.
    Its scale is learned from calls, so that it need not be measured on this machine; what calls of
    one query took corrects it. Default: none."""
    gpus: Count | None = None
    """Units of GPU that a call takes. Default: 0."""
    model_service: str | None = None
    """Model that a call needs resident on those GPUs. Default: none."""
    quota: str | None = None
    """Quota of an interface outside that a call takes `quota_units` of. Default: none."""
    quota_units: PositiveCount | None = None
    """Default: 1."""
    sandbox: Literal["process", "bubblewrap", "container"] | None = None
    """What its worker processes are confined to. `process`: `memory_mib`, `reads` and `writes`, for
    code of your own. `bubblewrap`: for calls that run what a model wrote; no network, no files but
    the interpreter's and the packages', read-only, a private /tmp, no environment, an unprivileged
    user. `container`: a container of `image`. Default: process."""
    stateful: bool | None = None
    """All calls of one trajectory have one sandbox, one after another: files stay from call to
    call, processes do not. Default: false."""
    sandbox_idle_seconds: SecondsOrNone | None = None
    """`stateful`: a sandbox without calls for so long is ended; 0: as the service is set.
    Default: 0."""
    image: str | None = None
    """`container`: its image."""
    processes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """In a sandbox: processes and threads at once. Default: 64."""
    disk_mib: PositiveCount | None = None
    """In a sandbox: size of its private /tmp. Default: 256."""
    reads: list[str] | None = Field(default=None, max_length=1024)
    """`process`, where the kernel has landlock: files and folders that it may read besides the
    interpreter, the packages and its own temporary folder. Default: whatever the service may."""
    writes: list[str] | None = Field(default=None, max_length=1024)
    """The same for reading and writing."""
    idle_seconds: SecondsOrNone | None = None
    """How long a worker is kept warm for its next call. Default: as the service is set."""
    min_workers: Count | None = None
    """Workers that are started ahead of any call and kept. Default: 0."""

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
