"""The predefined workflow `troupe.workflow.asking:ask`: one question and one answer per row of a
data set.

A job with this workflow needs no code: `tasks.dataset` gives the questions, and `rewards` with
`ready` score the answers.

workflow: troupe.workflow.asking:ask
tasks: {dataset: openai/gsm8k, config: main, columns: {question: question, answer: answer}}
rewards:
  right: {ready: math, arguments: {answer_pattern: '#### *(.+)'}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from troupe.workflow.agent import Agents
from troupe.workflow.errors import WorkflowError
from troupe.workflow.loading import Query
from troupe.workflow.tools import Tools

# Fields that may contain the question, in search order.
FIELDS: Final = ("messages", "prompt", "question")


async def ask(query: Query, agents: Agents, tools: Tools) -> None:
    """Ask the job's only agent the query's `messages`, `prompt` or `question`, without returning a
    reward.

    Messages are {"role", "content"}; the last assistant message, with which data sets for
    supervised training end, is left out, together with all that follow it. Raises `WorkflowError`
    for a query without a question, and for a job of several agents.
    """
    if len(agents) != 1:
        raise WorkflowError(
            f"`ask` needs a job with one agent, but this job has {len(agents)}",
            kind="several_agents",
            field="agents",
            value=", ".join(agents),
            remedy="Write your own workflow: an async function of (query, agents, tools).",
        )
    (agent,) = agents.values()
    await agent.chat(question_of(query))


def question_of(data: Mapping[str, Any]) -> str | list[Any]:
    """Return the question in a row: a text, or messages up to the requested reply."""
    for name in FIELDS:
        given = data.get(name)
        if isinstance(given, str) and given.strip():
            return given
        if isinstance(given, list) and given:
            while given and isinstance(given[-1], Mapping) and given[-1].get("role") == "assistant":
                given = given[:-1]
            if given:
                return given
    raise WorkflowError(
        "the query has no question",
        kind="no_question",
        field="tasks.columns",
        value=", ".join(sorted(map(str, data))),
        remedy=f"Name the column of the question: `columns: {{question: ...}}`; `ask` looks for "
        f"{', '.join(FIELDS)}.",
    )
