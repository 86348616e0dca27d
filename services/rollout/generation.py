"""Single generations for people: the Generate call."""

from __future__ import annotations

from services.rollout.engines.base import SamplingParams
from services.rollout.policy import ServedPolicy
from services.rollout.prepared import PreparedJob
from services.rollout.router import Home
from troupe.rpc.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, TroupeError
from troupe.rpc.ids import new_id
from troupe.v1 import common_pb2 as common
from troupe.v1 import rollout_pb2 as pb
from troupe.workflow import InvalidMessagesError, WorkflowError
from troupe.workflow.messages import parse_messages


async def generate(
    job: PreparedJob, policy: ServedPolicy, request: pb.GenerateRequest
) -> pb.GenerateResponse:
    """One response of `policy` to messages or ids, within `limits.turn_seconds`.

    What the request leaves open is as the first agent of the policy samples in training. Raises
    `InvalidArgument`, `DeadlineExceeded`, `FailedPrecondition`.
    """
    if bool(request.messages) == bool(request.input_ids):
        raise InvalidArgument(
            "give exactly one of messages and input_ids",
            field="messages",
            remedy="Send chat messages, or token ids of the policy's tokenizer.",
        )
    chat, roles = policy.language.chat, job.roles.values()
    # One that only tickets name samples as the first agent does.
    role = next((role for role in roles if role.policy == policy.name), next(iter(roles)))
    try:
        if request.messages:
            messages = parse_messages(
                [{"role": m.role, "content": m.content} for m in request.messages],
                role.system_prompt,
            )
            prompt_ids = chat.first_ids(messages)
        else:
            prompt_ids = tuple(request.input_ids)
        sampling = role.sampling.override(_given(request.sampling))
        generation = await policy.router.generate(
            request.request_id or new_id("generate"),
            list(prompt_ids),
            SamplingParams.of(sampling),
            home=Home(),
            deadline_seconds=job.spec.limits.turn_seconds,
        )
    except WorkflowError as error:
        raise _to_rpc(error) from error
    stopped = generation.finish_reason == "stop"
    return pb.GenerateResponse(
        text=chat.text(generation.token_ids, stopped=stopped),
        input_ids=prompt_ids,
        output_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=[span.to_proto() for span in generation.versions],
        finish_reason=generation.finish_reason,
    )


def _given(sampling: common.SamplingParams) -> dict[str, object]:
    """The fields that were set, repeated ones as tuples."""
    return {
        field.name: tuple(value) if field.is_repeated else value
        for field, value in sampling.ListFields()
    }


def _to_rpc(error: WorkflowError) -> TroupeError:
    cls: type[TroupeError] = InvalidArgument
    if error.kind == "deadline":
        cls = DeadlineExceeded
    elif error.kind == "job_released":
        cls = FailedPrecondition
    elif isinstance(error, InvalidMessagesError):
        cls = InvalidArgument
    return cls(
        error.message, kind=error.kind, field=error.field, value=error.value, remedy=error.remedy
    )
