"""Demonstrations: rows of conversations or texts, converted to prompts and responses for learning.

A row is a mapping. It has `messages`, a conversation as in OpenAI's chat, of which every assistant
message is learned, or only the last one; or it has `prompt` and `completion`, two texts or two
lists of messages. Messages with `weight: 0` are not learned. A completion may be the whole
conversation, which begins with the prompt. The chat template shows `tools` (JSON schemas). `agent`
names the agent that learns the row.

A preference is a row with two of these: `prompt`, `chosen` and `rejected`; or `chosen` and
`rejected`, conversations whose last messages are compared. A joint preference is a row with such
fields for each agent of a team, `agents: {name: {...}}`: what the team said is compared.

A response is the text that the agent's policy should generate after the prompt: the chat template's
rendering of the message up to the end of the turn, and the end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final, Literal

from troupe.job.sections.run import OfflineSpec, PreferencesSpec, SupervisedSpec
from troupe.outcomes import utf8_text
from troupe.replies.reading import THINK_TAGS, ThinkTags, read_json
from troupe.workflow.conversation import PLAIN, ChatTokenizer
from troupe.workflow.errors import ChatTemplateError, WorkflowError, shown
from troupe.workflow.messages import (
    AnyMessage,
    Rendering,
    ToolMessage,
    inline_thoughts,
    parse_messages,
    parse_template_options,
    parse_tools,
    thoughts_of,
    with_content,
    without_thoughts,
)
from troupe.workflow.turns import Role

_KIND: Final = "bad_demonstration"
_REMEDY: Final = (
    "A row has `messages`, or `prompt` and `completion`; a pair `prompt`, `chosen` and `rejected`, "
    "or the latter two: see docs/training.md, `Supervised fine-tuning` and `Preferences`."
)


@dataclass(frozen=True)
class Demonstration:
    """One reply to learn; `truncated`: its end was cut off. `chosen`: whether it belongs to the
    preferred side of a pair; None: not part of a pair."""

    agent: str
    turn: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    truncated: bool = False
    chosen: bool | None = None


Render = Callable[[Mapping[str, Any]], list[Demonstration]]
"""A function that makes the samples of a row."""
# In the messages of axolotl and ms-swift.
_OTHER_WEIGHTS: Final = ("loss", "train", "training")
TRIED_ROWS: Final = 20
"""Number of rows that are rendered before a job starts, since most faults occur in every row."""


def renderer_of(
    spec: OfflineSpec, roles: Mapping[str, Role], positions: Iterable[int] = ()
) -> Render:
    """Return the renderer of a job's rows. `roles`: the learning agents by name. `positions`: of
    their models, 0 if unknown."""
    bounds = [one for one in (spec.max_tokens, *positions) if one]
    if isinstance(spec, PreferencesSpec) and spec.joint:
        return partial(
            joint_preferences_of,
            roles=roles,
            template=spec.template,
            max_tokens=min(bounds, default=0),
        )
    render = preferences_of
    if isinstance(spec, SupervisedSpec):
        render = partial(demonstrations_of, turns=spec.turns)
    return partial(
        render,
        roles=roles,
        agent=spec.agent,
        template=spec.template,
        max_tokens=min(bounds, default=0),
    )


def demonstrations_of(
    row: Mapping[str, Any],
    roles: Mapping[str, Role],
    *,
    agent: str | None = None,
    turns: Literal["all", "last"] = "all",
    template: bool = True,
    max_tokens: int = 0,
) -> list[Demonstration]:
    """Return the replies that a row demonstrates; none if its prompts alone reach `max_tokens`.

    `roles`: the learning agents by name. `agent`: the agent that learns rows without `agent`.
    `template`: whether texts are messages. Raises `WorkflowError` of kind "bad_demonstration", or
    the error of the chat template.
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
            if isinstance(given, str):
                raise _bad("its `messages` are a text, not a list of messages")
        else:
            given, known = _joined(
                _listed(row, "prompt", "user"), _listed(row, "completion", "assistant")
            )
        found = _replies(role, given, known, row.get("tools"))
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


def preferences_of(
    row: Mapping[str, Any],
    roles: Mapping[str, Role],
    *,
    agent: str | None = None,
    template: bool = True,
    max_tokens: int = 0,
) -> list[Demonstration]:
    """Return the replies of a pair, preferred ones first; none if a side's prompt alone reaches
    `max_tokens`.

    Arguments and errors are as in `demonstrations_of`; the kind is "bad_preference".
    """
    shared = {name: row[name] for name in ("agent", "tools") if row.get(name) is not None}
    prompt, found = row.get("prompt"), list[Demonstration]()
    for side in ("chosen", "rejected"):
        if (given := row.get(side)) is None:
            raise _bad_pair(f"it has the fields {', '.join(map(str, row)) or '(none)'}")
        if prompt is None and isinstance(given, str):
            raise _bad_pair(f"without a `prompt`, `{side}` must be a list of messages")
        whole = {"messages": given} if prompt is None else {"prompt": prompt, "completion": given}
        try:
            replies = demonstrations_of(
                {**shared, **whole},
                roles,
                agent=agent,
                turns="last" if prompt is None else "all",
                template=template,
                max_tokens=max_tokens,
            )
        except WorkflowError as error:
            if error.kind != _KIND:
                raise
            raise _bad_pair(f"of `{side}`, {error.message}") from error
        if not replies:
            return []
        if prompt is None and side == "rejected" and _question(given) != _question(row["chosen"]):
            raise _bad_pair("its sides differ before the first message of the assistant")
        begin, chosen = len(found), side == "chosen"
        found += [replace(one, turn=begin + n, chosen=chosen) for n, one in enumerate(replies)]
    return found


def joint_preferences_of(
    row: Mapping[str, Any],
    roles: Mapping[str, Role],
    *,
    template: bool = True,
    max_tokens: int = 0,
) -> list[Demonstration]:
    """Return the replies of a joint pair, agent after agent, preferred ones first; none if a side's
    prompt of an agent alone reaches `max_tokens`.

    Arguments and errors are as in `preferences_of`.
    """
    given = row.get("agents")
    if not isinstance(given, Mapping) or not given:
        raise _bad_pair(f"it has no `agents`, only {', '.join(map(str, row)) or '(nothing)'}")
    # Tables give every row the agents of all rows, with null for missing pairs.
    there = {
        name: one
        for name, one in given.items()
        if (any(part is not None for part in one.values()) if isinstance(one, Mapping) else one)
    }
    if not there:
        raise _bad_pair("its `agents` have no pairs")
    found: list[Demonstration] = []
    for name, one in there.items():
        if not isinstance(one, Mapping):
            raise _bad_pair(f"`agents.{name}` is {shown(one)}, not a pair")
        replies = preferences_of(
            {**one, "agent": name}, roles, template=template, max_tokens=max_tokens
        )
        if not replies:
            return []
        begin = len(found)
        found += [replace(reply, turn=begin + reply.turn) for reply in replies]
    return found


def _question(given: Sequence[Any]) -> list[AnyMessage]:
    """Return the messages before the first reply."""
    return list(takewhile(lambda one: one[0] != "assistant", parse_messages(given, None)))


_Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _replies(role: Role, given: Any, known: int, tools: Any) -> list[_Pair]:
    """Return prompt and response of each assistant message to learn: all from message `known` on
    whose `weight` is not 0."""
    chat = role.tokenizer
    options = parse_template_options(None, role.template_options)
    rendering = Rendering(parse_tools(_tools(tools)).text, options)
    messages = parse_messages(given, role.system_prompt)
    weights = [_weight(*one) for one in enumerate(given)]
    for number, one in enumerate(given):
        if isinstance(one, Mapping) and one.get("function_call"):
            raise _bad(f"message {number} has a `function_call`; write `tool_calls` instead")
    added = len(messages) - len(weights)  # the system prompt in front
    found = [
        (
            tuple(chat.first_ids(messages[:at], rendering)),
            reply_ids(chat, messages[: at + 1], rendering, role.parser.think_tags),
        )
        for at, message in enumerate(messages)
        if message[0] == "assistant" and at >= max(known + added, 1) and weights[at - added]
    ]
    if not found:
        raise _bad(
            "no assistant message (with a `weight` other than 0) follows another message, so "
            "nothing is learned"
        )
    return found


def reply_ids(
    chat: ChatTokenizer,
    messages: Sequence[AnyMessage],
    rendering: Rendering = PLAIN,
    tags: ThinkTags = THINK_TAGS,
) -> tuple[int, ...]:
    """Return the ids of the last message, the assistant's, as a reply to the others: as the
    template renders it up to the end of the turn, or its content and end token.

    Its thoughts come first, between `tags`, even if the template leaves them out; if the prompt
    ends inside a thought, the reply closes that thought. Raises `ChatTemplateError`.
    """
    earlier, message = tuple(messages[:-1]), messages[-1]
    before = chat.render(earlier, rendering)
    prompt = before.rstrip()
    opened = next((pair for pair in tags if prompt.endswith(pair[0])), None)
    end = "" if chat.end_id is None else chat.transcript([chat.end_id])
    if any(prompt.endswith(closing) for _, closing in tags):
        # The prompt asks for a reply without thoughts.
        message = without_thoughts(message)
        if (inline := inline_thoughts(message[1], tags)) is not None:
            message = with_content(message, inline[1])
        tags = ()
    elif isinstance(message, ToolMessage) and message.thoughts:
        inline = inline_thoughts(message.content, tags)
        if inline is not None and inline[0] == message.thoughts.strip():
            message = with_content(message, inline[1])  # the row has them twice
    elif opened and opened[1] not in message[1] and not getattr(message, "calls", ()):
        begin, tag, rest = message[1].partition(opened[0])
        if tag and not begin.strip():
            # The thought is not closed, as in a truncated reply.
            return chat.encode(rest.removeprefix("\n" if before != prompt else "") + end)

    def rendered(reply: AnyMessage) -> str:
        return chat.render((*earlier, reply), rendering, prompt=False)

    whole = rendered(message)
    shown_reply = _shown_reply(before, whole, opened)
    if shown_reply is None:
        # Some templates (gpt-oss) show the thoughts of earlier messages only until this reply.
        earlier = tuple(map(without_thoughts, earlier))
        whole = rendered(message)
        shown_reply = _shown_reply(chat.render(earlier, rendering), whole, opened)
    if isinstance(message, ToolMessage) and message.calls:
        if shown_reply is None:
            raise ChatTemplateError(
                "the chat template renders a reply with tool calls differently from its generation "
                "prompt",
                field="tokenizer.chat_template",
                remedy="Use a template that begins replies with its generation prompt.",
            )
        if whole == rendered(message._replace(calls=())):
            raise ChatTemplateError(
                "the chat template does not show tool calls",
                field="tokenizer.chat_template",
                remedy="Use a template with `tool_calls`, or write the calls into the content.",
            )
    reply = _without_opening(message[1], opened) if shown_reply is None else shown_reply
    if end and end in reply:
        reply = reply[: reply.rindex(end)]
    thoughts = thoughts_of(message, opened, tags)
    plain = without_thoughts(message)
    # A thought may also be part of the answer: only a rendering without it tells.
    lost = thoughts not in reply or (plain != message and whole == rendered(plain))
    if lost or (opened and opened[1] not in reply):
        if not tags:
            raise ChatTemplateError(
                "the chat template does not show `reasoning_content`",
                field="tokenizer.chat_template",
                remedy="Leave it out, or name the model's `reasoning_parser`.",
            )
        opening, closing = opened or tags[0]
        empty, closed, answer = reply.partition(closing)
        if closed and empty.strip() in ("", opening):
            reply = answer  # a template that shows an empty thought
        begin = f"{opening}\n" if not opened else "\n" if before == prompt else ""
        reply = f"{begin}{thoughts}\n{closing}\n\n{reply.lstrip()}"
    return chat.encode(reply + end)


def _shown_reply(before: str, whole: str, opened: tuple[str, str] | None) -> str | None:
    """Return a template's rendering of a reply and the text after it: `whole` without the prompt
    `before`, which may have `opened` a thought that `whole` lacks. Omit the prompt's opening tag.
    None if `whole` begins otherwise."""
    if whole.startswith(before):
        return _without_opening(whole[len(before) :], opened)
    stem = before.rstrip().removesuffix(opened[0]) if opened else ""
    if stem and whole.startswith(stem):
        return _without_opening(whole[len(stem) :], opened)
    return None


def _without_opening(text: str, opened: tuple[str, str] | None) -> str:
    begins = text.lstrip()
    return begins.removeprefix(opened[0]) if opened and begins.startswith(opened[0]) else text


def _tools(given: Any) -> Sequence[Any] | None:
    """Return the `tools` of a row. Many data sets store them as JSON text, since tables cannot
    store schemas of different shapes."""
    found = read_json(given, given) if isinstance(given, str) and given.strip() else given or None
    if found is not None and not isinstance(found, list | tuple):
        raise _bad(f"its `tools` are {shown(given)}, not a list of tools")
    return found


def _weight(number: int, message: Any) -> int:
    """Return the `weight` of a message, as in OpenAI's format for fine-tuning; 1 by default. Other
    programs' fields that take a message out of the loss are refused, so that it is not learned."""
    for name in _OTHER_WEIGHTS:
        if isinstance(message, Mapping) and message.get(name) in (False, 0):
            raise _bad(
                f"message {number} has `{name}: {shown(message[name])}`; write `weight: 0` instead"
            )
    weight = message.get("weight") if isinstance(message, Mapping) else None
    if weight not in (None, 0, 1):
        raise _bad(
            f"message {number} has the `weight` {shown(weight)}; it must be 0 (not learned) or 1"
        )
    return 1 if weight is None else int(weight)


def _joined(prompt: list[Any], completion: list[Any]) -> tuple[list[Any], int]:
    """Return a conversation, and the number of its known messages: the prompt and the completion,
    or the completion alone if it repeats the prompt, as in many data sets of preferences."""
    if not prompt or not completion:
        return [*prompt, *completion], len(prompt)
    before, after = (
        [(role, content.strip(), *more) for role, content, *more in parse_messages(part, None)]
        for part in (prompt, completion)
    )
    # A system message may precede the repeated prompt.
    for skipped in (0, 1) if after[0][0] == "system" else (0,):
        known = skipped + len(before)
        if after[skipped:known] == before:
            return completion, known
    # Or only the prompt has it.
    if before[0][0] == "system" and len(before) > 1 and after[: len(before) - 1] == before[1:]:
        return [prompt[0], *completion], len(before)
    if before[-1][0] == "user" and after[0][0] in ("system", "user"):
        raise _bad(
            f"its completion begins with a message of role {after[0][0]}, but not with the "
            "messages of its prompt"
        )
    return [*prompt, *completion], len(prompt)


def _plain(chat: ChatTokenizer, prompt: str, completion: str) -> _Pair:
    """Return two texts unchanged; the first token of a row without a prompt is not learned."""
    end = () if chat.end_id is None else (chat.end_id,)
    response = chat.encode(utf8_text(completion)) + end
    ids = chat.encode_first(utf8_text(prompt))
    if not ids:
        ids, response = response[:1], response[1:]
    if not response:
        raise _bad("its completion has no tokens")
    return ids, response


def _listed(row: Mapping[str, Any], field: str, role: str) -> list[Any]:
    """Return the messages of a field, which may be the text of one message of `role`."""
    given = row[field]
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if not isinstance(given, list | tuple):
        raise _bad(f"its `{field}` is {shown(given)}, not a text or a list of messages")
    return list(given)


def _role(row: Mapping[str, Any], roles: Mapping[str, Role], agent: str | None) -> Role:
    named = row.get("agent", agent)
    if named is None and len(roles) == 1:
        return next(iter(roles.values()))
    if not isinstance(named, str) or named not in roles:
        what = (
            "it does not name an `agent`"
            if named is None
            else f"its agent {shown(named)} does not learn"
        )
        raise _bad(f"{what}; there are {', '.join(sorted(roles))}")
    return roles[named]


def _bad(message: str) -> WorkflowError:
    return WorkflowError(
        f"a demonstration cannot be learned: {message}",
        kind=_KIND,
        field="supervised.tasks",
        remedy=_REMEDY,
    )


def _bad_pair(message: str) -> WorkflowError:
    return WorkflowError(
        f"a preference cannot be learned: {message}",
        kind="bad_preference",
        field="preferences.tasks",
        remedy=_REMEDY,
    )
