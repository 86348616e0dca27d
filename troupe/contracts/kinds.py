"""Kinds of errors that steer the code which receives them.

A kind is part of the contract: it travels in `Problem.kind`, in `WorkflowError.kind` and in reasons
of trajectories. This module lists the kinds that a module other than the raiser compares with. Each
docstring says which component raises the kind and how the receiver reacts. All other kinds are
literals where they are raised; the default kind of an error class is an attribute of the class.
"""

from __future__ import annotations

from typing import Final

# --- Experience store ------------------------------------------------------------------------

CLAIM_LOST: Final = "claim_lost"
"""Raised by the store when a claim's lease ran out or another binding took over. The trainer begins
the step again."""

MESSAGE_TOO_LARGE: Final = "message_too_large"
"""Raised by the sender's channel. The rollout service ends the trajectory as failed, without its
rows."""

ROW_TOO_LARGE: Final = "row_too_large"
"""Raised by the store when rows are appended. The rollout service ends the trajectory as failed,
without its rows."""

STEP_NOT_OPEN: Final = "step_not_open"
"""Raised by the store's tables for a step that was never opened or is forgotten. The store's sweep
and audit pass over the step."""

TABLES_NOT_FOUND: Final = "tables_not_found"
"""Raised by the store for a job that has no tables. Its sweep passes over the job, the orchestrator
says why there are no rows, and the trainer concludes that none are kept."""

UNKNOWN_POLICY: Final = "unknown_policy"
"""Raised by the store for a policy that has no table. The trainer concludes that no rows are
kept."""

# --- Trainer ---------------------------------------------------------------------------------

NOT_BOUND: Final = "not_bound"
"""Raised by a trainer that does not hold the policy at this version. The orchestrator binds it
again."""

STEP_IN_PROGRESS: Final = "step_in_progress"
"""Raised by a trainer that runs another step of the policy. The orchestrator binds it again."""

STEP_SUSPENDED: Final = "step_suspended"
"""Raised to watchers of a suspended step. The orchestrator waits until the scheduler assigns a
worker, and resumes the step there."""

GANG_INCOMPLETE: Final = "gang_incomplete"
"""Raised by the leader of a gang whose ranks did not come in time. The orchestrator forms a new
gang."""

GANG_LOST: Final = "gang_lost"
"""Raised by a worker whose ranks of a gang have ended. The orchestrator forms a new gang."""

UPDATE_GROUP_FAILED: Final = "update_group_failed"
"""Raised by a trainer whose process group with an inference server failed. The engine takes another
way, and does not try this one again."""

UPDATE_PEER_FAILED: Final = "update_peer_failed"
"""Raised by a trainer whose process group was lost with another inference server. The engine takes
another way this once."""

GANG_TOO_LARGE: Final = "gang_too_large"
"""Raised by a trainer that cannot lead so many ranks. The orchestrator tries another worker."""

GANG_UNEVEN: Final = "gang_uneven"
"""Raised by a trainer whose hosts cannot divide the ranks evenly. The orchestrator tries another
worker."""

POLICY_TOO_LARGE: Final = "policy_too_large"
"""Raised by a trainer with less memory than the error's value, in bytes. The orchestrator tries a
worker with more memory."""

VERSION_NOT_KEPT: Final = "version_not_kept"
"""Raised by a trainer that no longer has the weights of a version. The orchestrator binds the
policy again, which publishes them."""

# --- Rollout ---------------------------------------------------------------------------------

JOB_NOT_PREPARED: Final = "job_not_prepared"
"""Raised by a rollout worker that does not know the job. The orchestrator prepares it again."""

VERSION_NOT_SERVED: Final = "version_not_served"
"""Raised by a rollout worker whose engines are at another version. The orchestrator asks again."""

WEIGHTS_NOT_FOUND: Final = "weights_not_found"
"""Raised by a rollout worker that cannot fetch the weights of the policy that the error's field
names. The orchestrator has them published again."""

REDUNDANT: Final = "redundant"
"""The reason of trajectories whose group was complete without them. The store and the orchestrator
set it (`lua/decide.lua`, `lua/carry.lua`); both count these trajectories separately."""

# --- Turns and workflows ---------------------------------------------------------------------

BAD_TURN: Final = "bad_turn"
"""Raised for a request that no engine of the policy can serve. The endpoint answers 400."""

DEADLINE: Final = "deadline"
"""Raised for turns, calls and trajectories that run out of time. The endpoint answers 504; a job
that cannot reach the reward service during its preparation continues without it."""

JOB_RELEASED: Final = "job_released"
"""Raised for turns of a job that is being released. The endpoint answers 404."""

TRAJECTORY_ENDED: Final = "trajectory_ended"
"""Raised for turns of a trajectory that has ended. The endpoint answers 404."""

# --- Calls of tools and reward functions -----------------------------------------------------
# `Tools.run` shows these to the model, unless said otherwise. Most are names of
# `InvocationError.Kind`.

BAD_ARGUMENTS: Final = "bad_arguments"
"""Raised for arguments that are not JSON, or that the function does not take."""

BAD_RESULT: Final = "bad_result"
"""Raised for a result that is not JSON."""

MCP_UNAVAILABLE: Final = "mcp_unavailable"
"""Raised for an MCP server that cannot be reached. Its connection is also reopened."""

NOT_IMPORTABLE: Final = "not_importable"
"""Raised for a function that cannot be imported. A fault of the job, see below."""

OUT_OF_MEMORY: Final = "out_of_memory"
"""Raised for a function that exceeded its memory limit."""

RAISED: Final = "raised"
"""Raised for a function that raised an exception."""

TIMEOUT: Final = "timeout"
"""Raised for a function that exceeded its own time limit."""

TOOL_FAILED: Final = "tool_failed"
"""Raised for a tool of an MCP server that answered with an error."""

UNKNOWN_TOOL: Final = "unknown_tool"
"""Raised for a tool that the job or the MCP server does not have. A fault of the job (see below) if
the workflow's code calls the tool, not the model."""

# --- Failures of trajectories ----------------------------------------------------------------

ENVIRONMENT_PREFIX: Final = "environment_"
"""The rollout service's prefix of the reason of an `EnvironmentFault` that the workflow did not
catch. The orchestrator counts these failures separately."""

TOOL_PREFIX: Final = "tool_"
"""The prefix of the kind of a `ToolError`, likewise."""

# --- Faults of a job -------------------------------------------------------------------------
# The rollout service does not retry the trajectory and sends the whole problem along; the
# orchestrator fails the job if all trajectories of a step end with it (`JOB_FAULTS`).

ENVIRONMENT_KEY_MISSING: Final = "environment_key_missing"
"""Raised for an environment that needs a key that the worker does not have."""

ENVIRONMENT_NOT_INSTALLED: Final = "environment_not_installed"
"""Raised for an environment that is not installed where the rollout service runs."""

ENVIRONMENT_REFUSED: Final = "environment_refused"
"""Raised for an environment that refuses its arguments."""

ENVIRONMENT_ROLE: Final = "environment_role"
"""Raised for roles of an environment that are not the job's agents."""

ENVIRONMENT_UNSUPPORTED: Final = "environment_unsupported"
"""Raised for an environment that Troupe cannot play."""

REWARD_BAD_TYPE: Final = "reward_bad_type"
"""Raised for rewards that are not a mapping from agents to numbers."""

REWARD_MISSING: Final = "reward_missing"
"""Raised for an agent that took turns and got no reward."""

REWARD_UNKNOWN_AGENT: Final = "reward_unknown_agent"
"""Raised for a reward of an agent that the job does not have."""

TEACHER: Final = "teacher"
"""Raised for a teacher that cannot score a student's reply."""

BREAKPOINT: Final = "breakpoint"
"""Raised for a workflow that reached a breakpoint, where no terminal can answer it."""

TURN_NOT_AWAITED: Final = "turn_not_awaited"
"""Raised for a workflow that returned without awaiting one of its turns."""

# --- Orchestrator ----------------------------------------------------------------------------

ILLEGAL_TRANSITION: Final = "illegal_transition"
"""Raised by the store of jobs. The job's runner checks whether to pause the job."""

WORKERS_KEEP_DYING: Final = "workers_keep_dying"
"""Raised for a job whose workers die again and again. Its runner blames the deaths on the job."""

# --- Transfer layer --------------------------------------------------------------------------

TRANSFER_LANE_UNREACHABLE: Final = "transfer_lane_unreachable"
"""Raised by an owner that shares no memory with the reader. The reader uses TCP."""

TRANSFER_NO_UCX: Final = "transfer_no_ucx"
"""Raised by an owner without UCX. The reader uses gRPC."""

TRANSFER_REPLACED: Final = "transfer_replaced"
"""Raised by an owner that now holds another state under the key. The reader reports the key as not
found."""

# --- Reward service --------------------------------------------------------------------------

FUNCTION_NOT_FOUND: Final = "function_not_found"
"""Raised by a reward service that has forgotten the function. The caller registers it again."""

HOSTS_EXPECTED: Final = "hosts_expected"
"""Raised by a reward service whose hosts may still attach. The orchestrator continues to restore
the other functions."""

SOURCE_NOT_FOUND: Final = "source_not_found"
"""Raised by a reward service that lacks a function's source. The caller uploads it."""

# --- Networks --------------------------------------------------------------------------------

NOT_FINITE: Final = "not_finite"
"""Raised for an environment's values that are not finite. The rollout service treats such rewards
as the trajectory's own failure, and other values as a fault of the environment."""
