"""The ready workflow `troupe.workflow.asking:ask`: one question, one answer, for rows of data sets.

A job needs no code of its own with it: `tasks.dataset` gives the questions, and `rewards` with
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

# Fields that a question may be in, in the order in which they are looked for.
FIELDS: Final = ("messages", "prompt", "question")


async def ask(query: Query, agents: Agents, tools: Tools) -> None:
    """Asks the job's only agent the query's `messages`, `prompt` or `question`; no reward of its
    own.

    Messages are {"role", "content"}; those from the last one of the assistant on, which is what a
    data set for supervised training ends with, are left out. Raises `WorkflowError` for a query
    without a question, and for a job of several agents.
    """
    if len(agents) != 1:
        raise WorkflowError(
            f"`ask` has one agent answer, and the job has {len(agents)}",
            kind="several_agents",
            field="agents",
            value=", ".join(agents),
            remedy="Write a workflow of your own: an async function of (query, agents, tools).",
        )
    (agent,) = agents.values()
    await agent.chat(question_of(query))


def question_of(data: Mapping[str, Any]) -> str | list[Any]:
    """The question in a row: a text, or messages up to the reply that is asked for."""
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
