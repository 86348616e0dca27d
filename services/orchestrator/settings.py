"""Settings that only the orchestrator has."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """`ServiceSettings`, and the orchestrator's time limits and intervals."""

    heartbeat_seconds: float = Field(default=1.0, gt=0)
    """How often workers report."""
    lost_after_beats: int = Field(default=10, ge=1)
    """A worker that misses this many beats is LOST: its work goes to others. A process that dies
    is noticed at once by its broken streams; this is for hosts that hang, and loading a model may
    keep a healthy worker from reporting for seconds."""
    lost_after_stall_seconds: float = Field(default=60, gt=0)
    """A worker that reports, but whose event loop has not advanced for so long, is LOST, too. A
    loop that thousands of conversations keep busy is late by seconds; imports of a job's code may
    hold it for 30 s, and other code for `TROUPE_BLOCKED_SECONDS`."""
    workers_timeout_seconds: float = Field(default=600, gt=0)
    """How long a job waits for a worker that it needs, before it fails."""
    bind_timeout_seconds: float = Field(default=1800, gt=0)
    """How long loading a policy on a trainer worker may take (a download included)."""
    gang_wait_seconds: float = Field(default=60, ge=0)
    """How long a policy whose gang is larger than all that the trainers form waits for more of them
    before its job is refused. A gang that was there once is waited for as long as for loading."""
    cleanup_seconds: float = Field(default=15, gt=0)
    """How long an ended job tries to have its workers release it."""
    activity_seconds: float = Field(default=0.5, gt=0)
    """How often followers of a job learn of progress inside a step."""
    recent_trajectories: int = Field(default=200, ge=0)
    """Newest training trajectories kept for inspection, per job; and as many of evaluations."""
    recent_tokens: int = Field(default=32, ge=0)
    """Newest trajectories of a job whose tokens are kept, with advantages and ratios."""
    probe_seconds: float = Field(default=1.0, gt=0)
    """How long the health check of another service may take."""
    survival_seconds: float = Field(default=20, gt=0)
    """A job is suspected when the orchestrator dies within so many seconds after launching it:
    three such deaths fail the job. A supervisor gives up a service that dies more often."""
