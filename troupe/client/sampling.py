"""Conversations and sampling parameters on their way to the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from troupe.rpc.errors import InvalidArgument
from troupe.v1 import common_pb2 as pb

Messages = str | Sequence[Mapping[str, str]]


def chat_messages(messages: Messages) -> list[pb.ChatMessage]:
    """A text becomes one user message. Raises `InvalidArgument` for anything malformed."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    made = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidArgument(
                "a message is a mapping of exactly `role` and `content`.",
                field=f"messages.{index}",
                value=message,
            )
        made.append(pb.ChatMessage(role=message["role"], content=message["content"]))
    if not made:
        raise InvalidArgument("a conversation needs a message.", field="messages", value=[])
    return made


def sampling_params(
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    max_new_tokens: int | None,
    stop_token_ids: Sequence[int],
    seed: int | None,
) -> pb.SamplingParams:
    """Only what is given is set: on the wire absent and zero differ."""
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    params = pb.SamplingParams(stop_token_ids=stop_token_ids)
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    return params
