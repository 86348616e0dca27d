"""Replies as OpenAI's API answers them: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from troupe.endpoint.promises import Promises
from troupe.rpc.ids import new_id
from troupe.workflow import ChatTokenizer, Reply


@dataclass(frozen=True)
class ChatAnswer:
    """What one chat completion has in common in all its forms."""

    model: str
    tokenizer: ChatTokenizer
    promises: Promises
    logprobs: bool
    token_ids: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        answer = self._frame("chat.completion")
        answer["choices"] = [
            {**self._choice(index, reply), "message": {**_message(reply), "refusal": None}}
            for index, reply in enumerate(replies)
        ]
        answer["usage"] = usage(replies)
        if self.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def chunks(self, replies: Sequence[Reply], *, with_usage: bool) -> Iterator[str]:
        """The events of a stream, its end included."""
        for index, reply in enumerate(replies):
            choice = self._choice(index, reply)
            reason, unmet = choice.pop("finish_reason"), choice.pop("unmet", None)
            for number, delta in enumerate(_deltas(reply)):
                # What belongs to the whole reply goes with its beginning.
                own = choice if number == 0 else {"index": index, "logprobs": None}
                part = {**own, "delta": delta, "finish_reason": None}
                yield self._chunk([part], with_usage, replies if number == 0 else ())
            end: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": reason}
            yield self._chunk([end if unmet is None else {**end, "unmet": unmet}], with_usage)
        if with_usage:
            yield event({**self._frame("chat.completion.chunk"), "choices": [], **_usage(replies)})
        yield "data: [DONE]\n\n"

    def _chunk(
        self, choices: list[dict[str, Any]], with_usage: bool, replies: Sequence[Reply] = ()
    ) -> str:
        chunk = {**self._frame("chat.completion.chunk"), "choices": choices}
        if self.token_ids and replies:
            chunk["prompt_token_ids"] = list(replies[0].prompt_ids)
        return event({**chunk, "usage": None} if with_usage else chunk)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        reason = reply.finish_reason
        if reply.tool_calls and reason == "stop":
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.logprobs:
            choice["logprobs"] = {"content": self._logprobs(reply), "refusal": None}
        if self.token_ids:
            choice["token_ids"] = list(reply.token_ids)
        if self.promises:
            choice["unmet"] = unmet = self.promises.unmet(reply)
            reply.unmet = tuple(one["param"] for one in unmet)
        return choice

    def _logprobs(self, reply: Reply) -> list[dict[str, Any]]:
        """Every token that was sampled, the stop token and those of calls included."""
        entries = []
        for token_id, logprob in zip(reply.token_ids, reply.logprobs, strict=True):
            token = self.tokenizer.transcript((token_id,))
            entries.append(
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
            )
        return entries


@dataclass(frozen=True)
class TextAnswer:
    """The same for a plain completion."""

    model: str
    tokenizer: ChatTokenizer
    logprobs: bool
    token_ids: bool
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        answer = self._frame([self._choice(i, reply) for i, reply in enumerate(replies)])
        if self.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return {**answer, "usage": usage(replies)}

    def chunks(self, replies: Sequence[Reply], *, with_usage: bool) -> Iterator[str]:
        """The events of a stream, its end included."""
        for index, reply in enumerate(replies):
            yield event(self._frame([self._choice(index, reply)]))
        if with_usage:
            yield event({**self._frame([]), **_usage(replies)})
        yield "data: [DONE]\n\n"

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "logprobs": None,
        }
        if self.logprobs:
            choice["logprobs"] = {
                "tokens": [self.tokenizer.transcript((i,)) for i in reply.token_ids],
                "token_logprobs": list(reply.logprobs),
                "top_logprobs": None,
                "text_offset": None,
            }
        if self.token_ids:
            choice["token_ids"] = list(reply.token_ids)
        return choice


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Tokens of each prompt, once, and of all responses."""
    prompts = {id(reply.prompt_ids): len(reply.prompt_ids) for reply in replies}
    prompt = sum(prompts.values())
    response = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
    }


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    # In ASCII: some clients take U+2028 or U+0085 for the end of a line.
    return f"data: {json.dumps(data)}\n\n"


def _message(reply: Reply) -> dict[str, Any]:
    message = reply.message
    if reply.tool_calls:
        message["content"] = reply.content or None
    return message


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    """The reply in parts: what it thought, its text, and each call by itself, for some clients look
    at the first thing that they find in a part."""
    yield {"role": "assistant", "content": ""}
    if reply.reasoning_content:
        yield {"reasoning_content": reply.reasoning_content}
    if reply.content:
        yield {"content": reply.content}
    for number, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": number, **call.message}]}


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    return {"usage": usage(replies)}
