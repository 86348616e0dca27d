"""Replies as OpenAI's API answers them: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from troupe.rpc.ids import new_id
from troupe.workflow import ChatTokenizer, Reply


@dataclass(frozen=True)
class ChatAnswer:
    """What one chat completion has in common in all its forms."""

    model: str
    tokenizer: ChatTokenizer
    calls: bool
    """Whether calls of tools are told apart from the text."""
    logprobs: bool
    token_ids: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        answer = self._frame("chat.completion")
        answer["choices"] = [
            {**self._choice(index, reply), "message": {**self._message(reply), "refusal": None}}
            for index, reply in enumerate(replies)
        ]
        answer["usage"] = usage(replies)
        if self.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def chunks(self, replies: Sequence[Reply], *, with_usage: bool) -> Iterator[str]:
        """The events of a stream, its end included."""
        for index, reply in enumerate(replies):
            delta = self._message(reply)
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            choice = self._choice(index, reply)
            reason = choice.pop("finish_reason")
            yield self._chunk([{**choice, "delta": delta, "finish_reason": None}], with_usage)
            yield self._chunk([{"index": index, "delta": {}, "finish_reason": reason}], with_usage)
        if with_usage:
            yield event({**self._frame("chat.completion.chunk"), "choices": [], **_usage(replies)})
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> str:
        chunk = {**self._frame("chat.completion.chunk"), "choices": choices}
        return event({**chunk, "usage": None} if with_usage else chunk)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _message(self, reply: Reply) -> dict[str, Any]:
        if not self.calls:
            return {"role": "assistant", "content": reply.text}
        message = reply.message
        if reply.tool_calls:
            message["content"] = reply.content or None
        return message

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        reason = reply.finish_reason
        if self.calls and reply.tool_calls and reason == "stop":
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.logprobs:
            choice["logprobs"] = {"content": self._logprobs(reply), "refusal": None}
        if self.token_ids:
            choice["token_ids"] = list(reply.token_ids)
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
    """Tokens of the prompt, once, and of all responses."""
    prompt = len(replies[0].prompt_ids)
    response = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
    }


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    return {"usage": usage(replies)}
