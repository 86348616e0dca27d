"""What users write: a workflow, an async function of one query, its agents and its tools.

async def workflow(query, agents, tools):
    draft = await agents["solver"].chat(query["question"])
    verdict = await agents["checker"].chat(f"{query['question']} -> {draft.text} Right?")
    return {"solver": score(query, draft.text), "checker": ...}
"""

from troupe.workflow.agents import Agent, Agents, Role, Turn
from troupe.workflow.backend import Backend, Generation, Sampling, ToolBackend
from troupe.workflow.columns import Columns, InvalidColumnError
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import (
    ChatTemplateError,
    ContextOverflowError,
    EntrypointError,
    InvalidMessagesError,
    InvalidRewardError,
    ToolError,
    TurnError,
    UnknownAgentError,
    WorkflowError,
)
from troupe.workflow.loading import Tasks, Workflow, load_attribute, load_tasks, load_workflow
from troupe.workflow.query import Query
from troupe.workflow.reply import Reply
from troupe.workflow.tools import Tools

__all__ = [
    "Agent",
    "Agents",
    "Backend",
    "ChatTemplateError",
    "ChatTokenizer",
    "Columns",
    "ContextOverflowError",
    "EntrypointError",
    "Generation",
    "InvalidColumnError",
    "InvalidMessagesError",
    "InvalidRewardError",
    "Query",
    "Reply",
    "Role",
    "Sampling",
    "Tasks",
    "ToolBackend",
    "ToolError",
    "Tools",
    "Turn",
    "TurnError",
    "UnknownAgentError",
    "Workflow",
    "WorkflowError",
    "load_attribute",
    "load_tasks",
    "load_workflow",
]
