"""Demonstrations (supervised fine-tuning): rows of conversations or texts as prompts and responses.

A row is a mapping: `messages`, a conversation as in OpenAI's chat, of which every message of the
assistant is learned, or the last one; or `prompt` and `completion`, two texts or two lists of
messages. `tools` (JSON schemas) are shown by the chat template. `agent` names who learns the row.

A response is what the agent's policy should generate after the prompt: the text that the chat
template shows for the message up to the end of the turn, and the end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from troupe.workflow.agent import Role
from troupe.workflow.conversation import PLAIN, ChatTokenizer
from troupe.workflow.errors import WorkflowError
from troupe.workflow.messages import Rendering, parse_messages, parse_tools

_REMEDY = (
    "A row has `messages`, or `prompt` and `completion`: see docs/training.md, `Supervised "
    "fine-tuning`."
)


@dataclass(frozen=True)
class Demonstration:
    """One reply that is learned; `truncated`: its end was cut off."""

    agent: str
    turn: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    truncated: bool = False


def demonstrations_of(
    row: Mapping[str, Any],
    roles: Mapping[str, Role],
    *,
    agent: str | None = None,
    turns: Literal["all", "last"] = "all",
    template: bool = True,
    max_tokens: int = 0,
) -> list[Demonstration]:
    """The replies that a row demonstrates; none if its prompts alone have `max_tokens` tokens.

    `roles`: of the agents that learn, by name. `agent`: who learns rows that name nobody.
    `template`: whether texts are messages. Raises `WorkflowError` of kind "bad_demonstration", or
    for what the chat template refuses.
    """
    role = _role(row, roles, agent)
    chat = role.tokenizer
    prompt, completion = row.get("prompt"), row.get("completion")
    if (row.get("messages") is None) == (prompt is None or completion is None):
        raise _bad(f"it has the fields {', '.join(map(str, row)) or '(none)'}")
    if isinstance(prompt, str) and isinstance(completion, str) and not template:
        found = [_plain(chat, prompt, completion)]
    else:
        if row.get("messages") is not None:
            given, known = row["messages"], 0
        else:
            before = _listed(prompt, "user")
            given, known = [*before, *_listed(completion, "assistant")], len(before)
        rendering = Rendering(parse_tools(row.get("tools")).text)
        found = _replies(chat, given, known, role.system_prompt, rendering)
        found = found[-1:] if turns == "last" else found
    return [
        Demonstration(
            role.name,
            turn,
            ids,
            reply[: max_tokens - len(ids) if max_tokens else None],
            bool(max_tokens) and len(ids) + len(reply) > max_tokens,
        )
        for turn, (ids, reply) in enumerate(found)
        if not max_tokens or len(ids) < max_tokens
    ]


_Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _replies(
    chat: ChatTokenizer,
    given: Any,
    known: int,
    system_prompt: str | None,
    rendering: Rendering = PLAIN,
) -> list[_Pair]:
    """Prompt and response of each message of the assistant from message `known` on."""
    messages = parse_messages(given, system_prompt)
    known += len(messages) - len(given)  # the system prompt in front
    found = [
        (chat.first_ids(messages[:at], rendering), chat.reply_ids(messages[: at + 1], rendering))
        for at, message in enumerate(messages)
        if message[0] == "assistant" and at >= max(known, 1)
    ]
    if not found:
        raise _bad("no message of the assistant follows another message, so nothing is learned")
    return found


def _plain(chat: ChatTokenizer, prompt: str, completion: str) -> _Pair:
    """Two texts as they are; the first token of a row without a prompt is not learned."""
    response = chat.encode(completion) + (() if chat.end_id is None else (chat.end_id,))
    ids = chat.encode(prompt)
    if not ids:
        ids, response = response[:1], response[1:]
    if not response:
        raise _bad("its completion has no tokens")
    return ids, response


def _listed(given: Any, role: str) -> list[Any]:
    return [{"role": role, "content": given}] if isinstance(given, str) else list(given)


def _role(row: Mapping[str, Any], roles: Mapping[str, Role], agent: str | None) -> Role:
    named = row.get("agent", agent)
    if named is None and len(roles) == 1:
        return next(iter(roles.values()))
    if named not in roles:
        what = "it names no `agent`" if named is None else f"its agent {named!r} learns nothing"
        raise _bad(f"{what}; there are {', '.join(sorted(roles))}")
    return roles[named]


def _bad(message: str) -> WorkflowError:
    return WorkflowError(
        f"a demonstration cannot be learned: {message}",
        kind="bad_demonstration",
        field="supervised.tasks",
        remedy=_REMEDY,
    )
