"""Settings that only the orchestrator has."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """`ServiceSettings`, and the orchestrator's time limits and intervals."""

    heartbeat_seconds: float = Field(default=1.0, gt=0)
    """How often workers report."""
    lost_after_beats: int = Field(default=10, ge=1)
    """A worker that misses this many heartbeats is LOST, and its work moves to others. Broken
    streams reveal a dead process at once; this is for hosts that hang. Loading a model may keep a
    healthy worker from reporting for seconds."""
    lost_after_stall_seconds: float = Field(default=60, gt=0)
    """A worker that reports, but whose event loop has not advanced for so long, is also LOST.
    Thousands of conversations delay a loop by seconds; imports of a job's code may block it for 30
    s, and other code for `TROUPE_BLOCKED_SECONDS`."""
    max_running_jobs: int = Field(default=0, ge=0, le=10_000)
    """Jobs that run at once; the others wait in a queue, by priority. 0: any number."""
    workers_timeout_seconds: float = Field(default=600, gt=0)
    """How long a job waits for a worker that it needs, before it fails."""
    bind_timeout_seconds: float = Field(default=1800, gt=0)
    """How long loading a policy on a trainer worker may take, including a download."""
    gang_wait_seconds: float = Field(default=60, ge=0)
    """How long a policy waits for trainers if its gang is larger than any that they form, before
    its job is refused. A gang that existed before is waited for as long as loading may take."""
    cleanup_seconds: float = Field(default=15, gt=0)
    """How long an ended job tries to have its workers release it."""
    activity_seconds: float = Field(default=0.5, gt=0)
    """Interval at which followers of a job learn of progress inside a step."""
    conversation_bytes: int = Field(default=2**30, ge=0)
    """Bytes of a job's kept conversations, in its directory; the oldest are deleted. 0: none are
    kept. One conversation takes at most 256 KiB: longer messages lose their middle."""
    recent_tokens: int = Field(default=32, ge=0)
    """Newest trajectories of a job whose tokens are kept, with advantages and ratios."""
    probe_seconds: float = Field(default=1.0, gt=0)
    """How long the health check of another service may take."""
    survival_seconds: float = Field(default=20, gt=0)
    """A job is suspected when the orchestrator dies within so many seconds after launching it;
    three such deaths fail the job. A supervisor gives up on a service that dies more often."""
