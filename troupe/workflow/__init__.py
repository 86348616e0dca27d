"""The SDK for workflow authors: a workflow is an async function of query, agents and tools.

async def workflow(query, agents, tools):
    draft = await agents["solver"].chat(query["question"])
    verdict = await agents["checker"].chat(f"{query['question']} -> {draft.text} Right?")
    return {"solver": score(query, draft.text), "checker": ...}
"""

from troupe.workflow.agent import Agent, Agents
from troupe.workflow.backend import Backend, Endpoint, GeneratedTurn, Sampling, ToolBackend
from troupe.workflow.candidates import branch, joint
from troupe.workflow.columns import Columns, InvalidColumnError
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import (
    ChatTemplateError,
    ContextOverflowError,
    EntrypointError,
    InvalidGroupError,
    InvalidMessagesError,
    InvalidRewardError,
    ToolError,
    TurnError,
    UnknownAgentError,
    WorkflowError,
)
from troupe.workflow.loading import (
    Query,
    Tasks,
    Workflow,
    load_attribute,
    load_tasks,
    load_workflow,
)
from troupe.workflow.messages import Reply, ToolCall
from troupe.workflow.tools import Tools
from troupe.workflow.trying import (
    EchoPolicy,
    Played,
    Policy,
    Prompt,
    RandomPolicy,
    ScriptedPolicy,
    Spoken,
    make_role,
    play,
)
from troupe.workflow.turns import Role, TurnRecord

__all__ = [
    "Agent",
    "Agents",
    "Backend",
    "ChatTemplateError",
    "ChatTokenizer",
    "Columns",
    "ContextOverflowError",
    "EchoPolicy",
    "Endpoint",
    "EntrypointError",
    "GeneratedTurn",
    "InvalidColumnError",
    "InvalidGroupError",
    "InvalidMessagesError",
    "InvalidRewardError",
    "Played",
    "Policy",
    "Prompt",
    "Query",
    "RandomPolicy",
    "Reply",
    "Role",
    "Sampling",
    "ScriptedPolicy",
    "Spoken",
    "Tasks",
    "ToolBackend",
    "ToolCall",
    "ToolError",
    "Tools",
    "TurnError",
    "TurnRecord",
    "UnknownAgentError",
    "Workflow",
    "WorkflowError",
    "branch",
    "joint",
    "load_attribute",
    "load_tasks",
    "load_workflow",
    "make_role",
    "play",
]
