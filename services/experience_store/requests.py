"""Validation of requests. Errors name the field, its value and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from troupe import tensors
from troupe.contracts import kinds
from troupe.outcomes import JSON_BYTES, NotJsonError, parse_json
from troupe.rpc import InvalidArgument
from troupe.rpc.ids import check_name
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

# Part of Redis keys and hash tags: neither braces nor slashes.
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
# Records are lines of tab-separated fields.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
ID_LENGTH: Final = 256
_REASON_LENGTH: Final = 1000
# A claim's response holds at least one row, and must stay within the message limit.
ROW_BYTES: Final = 16 * 2**20
LONGEST_LEASE: Final = 86_400.0
LONGEST_WAIT: Final = 600.0
# More samples than any response can carry. A claim may ask for more than its step will ever have.
LARGEST_CLAIM: Final = 65_536
LARGEST_PAGE: Final = 1000
DEFAULT_PAGE: Final = 50

_DIGEST_BYTES: Final = 32
# Columns that Troupe itself reads.
_TYPED_COLUMNS: Final = {"reference_logprobs": common_pb.DTYPE_FLOAT32}


def check_id(field: str, value: str) -> str:
    """Check a caller's id, which may be any printable text."""
    if 0 < len(value) <= ID_LENGTH and value.isprintable():
        return value  # most ids; the search takes longer
    if not value or len(value) > ID_LENGTH or _CONTROL.search(value):
        raise InvalidArgument(
            f"must be 1 to {ID_LENGTH} characters without control characters",
            field=field,
            value=printable(value),
            remedy="Give every mutating call an id of your choice." if not value else None,
        )
    return value


def check_common(request: Any) -> None:
    """Check the request id and the job of a mutating call."""
    check_id("request_id", request.request_id)
    check_name("job_id", request.job_id)


def check_step_call(request: Any) -> None:
    """Check the fields of a mutating call on a step of a table."""
    check_common(request)
    check_name("policy", request.policy)
    check_step(request.step)


def check_step(step: int) -> int:
    """Check the number of a step."""
    if step < 0:
        raise InvalidArgument("must not be negative", field="step", value=step)
    return step


def check_positive(field: str, value: float, largest: float) -> None:
    """Check a number in (0, largest]."""
    if not 0 < value <= largest:
        raise InvalidArgument(
            f"must be more than 0 and at most {largest:g}", field=field, value=value
        )


def check_not_negative(field: str, value: float) -> None:
    """Check a number that must be at least 0 and not NaN."""
    if not value >= 0:
        raise InvalidArgument("must not be negative", field=field, value=value)


def page_size(size: int) -> int:
    """Return how many samples to list; 0 means the default."""
    check_not_negative("page_size", size)
    return min(size, LARGEST_PAGE) or DEFAULT_PAGE


def check_reward(field: str, reward: float) -> float:
    """Check that a reward is finite. Any other would spoil the statistics of the whole group."""
    if not math.isfinite(reward):
        raise InvalidArgument(
            "must be finite",
            kind="reward_not_finite",
            field=field,
            value=reward,
            remedy="End the trajectory FAILED, or fill the column with a drop_reason.",
        )
    return reward


def clean_reason(reason: str) -> str:
    """Return a reason as one line of bounded length."""
    return _CONTROL.sub(" ", reason)[:_REASON_LENGTH]


def check_columns(field: str, columns: Mapping[str, store_pb.Column]) -> None:
    """Check the names of user-defined columns, and that each value can be read."""
    for name, column in columns.items():
        where = f"{field}[{printable(name)}]"
        if not _COLUMN.fullmatch(name) or name == "reward":
            raise InvalidArgument(
                "a column name has up to 64 letters, digits, '.', '_' or '-'; 'reward' is taken",
                field=where,
                value=printable(name),
            )
        if column.WhichOneof("value") is None:
            raise InvalidArgument(
                "a column needs a value", field=where, remedy="Set tensor, json or ref."
            )
        check_size(where, column.ByteSize())
        _check_value(where, column)
        kind = _TYPED_COLUMNS.get(name)
        if kind is not None and not column.ref:
            # The reader of a reference checks the value behind it.
            check_vector(f"{where}.tensor", column.tensor, kind)


def check_payloads(field: str, sample: store_pb.Sample) -> None:
    """Check that each payload has a kind, a hash, a content and tokens of its own."""
    stem = sample.stem.tokens
    free, end = stem, stem + sum(sample.prompt_ids.shape)
    for index, payload in enumerate(sample.payloads):
        where = f"{field}[{index}]"
        check_id(f"{where}.kind", payload.kind)
        if len(payload.digest) != _DIGEST_BYTES:
            raise InvalidArgument(
                f"is not a SHA-256 of {_DIGEST_BYTES} bytes",
                field=f"{where}.digest",
                value=payload.digest.hex(),
            )
        if not (free <= payload.position and 0 < payload.tokens <= end - payload.position):
            raise InvalidArgument(
                f"needs tokens of its own between {free} and {end}, in the order of payloads",
                field=f"{where}.position",
                value=payload.position,
                remedy="Make payloads with troupe.contracts.payloads.",
            )
        free = payload.position + payload.tokens
        if payload.WhichOneof("content") is None:
            raise InvalidArgument(
                "has no content", field=where, remedy="Set data, or the key of a large content."
            )
        if payload.HasField("ref"):
            check_id(f"{where}.ref", payload.ref)


def check_create(request: store_pb.CreateTablesRequest) -> None:
    """Check the names of policies and required columns."""
    if not request.policies:
        raise InvalidArgument("names no policy", field="policies")
    for policy in request.policies:
        check_name("policies", policy)
    _check_distinct("policies", request.policies)
    check_not_negative("max_uses", request.max_uses)
    for column in request.required_columns:
        if not _COLUMN.fullmatch(column):
            raise InvalidArgument(
                "not the name of a column", field="required_columns", value=printable(column)
            )


def check_open(request: store_pb.OpenStepRequest, policies: Iterable[str]) -> None:
    """Check for versions for every table and distinct queries with at least one trajectory each.
    Only a step that is held open may begin without queries.
    """
    if not request.query_ids and not request.held_open:
        raise InvalidArgument("names no query", field="query_ids")
    for query in request.query_ids:
        check_id("query_ids", query)
    _check_distinct("query_ids", request.query_ids)
    check_not_negative("cursor", request.cursor)
    check_not_negative("redundant", request.redundant)
    if request.group_size < 1:
        raise InvalidArgument("must be at least 1", field="group_size", value=request.group_size)
    known = set(policies)
    for policy in sorted(set(request.versions) ^ known):
        raise InvalidArgument(
            "has no table" if policy in request.versions else "is missing",
            field=f"versions[{printable(policy)}]",
            remedy=f"Give the versions of the trained policies: {', '.join(sorted(known))}.",
        )
    for policy, version in request.versions.items():
        if version < 0:
            raise InvalidArgument(
                "must not be negative", field=f"versions[{policy}]", value=version
            )


def check_task_pools(request: store_pb.ReadTaskPoolsRequest) -> None:
    """Check for a band and a memory within [0, 1], and at least one source."""
    check_not_negative("before_step", request.before_step)
    for field, value in (("low", request.low), ("high", request.high), ("memory", request.memory)):
        if not 0 <= value <= 1:
            raise InvalidArgument("is not in [0, 1]", field=field, value=value)
    if not request.wanted:
        raise InvalidArgument("names no source of tasks", field="wanted")
    for number in request.wanted:
        check_not_negative("wanted", number)


def check_amend(request: store_pb.AmendStepRequest) -> None:
    """Check for distinct queries over all three lists, a reason to drop, and a later step to carry
    to."""
    lists = (
        ("add_query_ids", request.add_query_ids),
        ("drop_query_ids", request.drop_query_ids),
        ("carry_query_ids", request.carry_query_ids),
    )
    seen: set[str] = set()
    for field, queries in lists:
        for query in queries:
            check_id(field, query)
            if query in seen:
                raise InvalidArgument("occurs twice in the amendment", field=field, value=query)
            seen.add(query)
    check_not_negative("cursor", request.cursor)
    if request.drop_query_ids and not request.drop_reason:
        raise InvalidArgument("say why the queries are dropped", field="drop_reason")
    if request.carry_query_ids and request.carry_to <= request.step:
        raise InvalidArgument(
            "queries are carried to a later step", field="carry_to", value=request.carry_to
        )


_NO_COLUMNS: Final[Mapping[str, store_pb.Column]] = {}


class Fill(NamedTuple):
    """Late columns of one sample, or the reason to drop it."""

    sample: str
    reward: float | None
    columns: Mapping[str, store_pb.Column]
    drop_reason: str


def check_fill(where: str, item: store_pb.FillColumnsRequest | store_pb.SampleColumns) -> Fill:
    """Check one sample's late columns; `where` precedes the names of fields in errors."""
    if item.HasField("reward") and not item.drop_reason and not item.columns:
        # The common case: a reward and nothing else.
        sample, reward = item.sample_id, item.reward
        if 0 < len(sample) <= ID_LENGTH and sample.isprintable() and math.isfinite(reward):
            return Fill(sample, reward, _NO_COLUMNS, "")
    check_id(f"{where}sample_id", item.sample_id)
    check_columns(f"{where}columns", item.columns)
    given = check_reward(f"{where}reward", item.reward) if item.HasField("reward") else None
    if bool(item.drop_reason) == (given is not None or bool(item.columns)):
        raise InvalidArgument(
            "fill the reward or columns, or give a reason to drop the sample; not both",
            field=f"{where}drop_reason",
            value=item.drop_reason,
        )
    return Fill(item.sample_id, given, item.columns, clean_reason(item.drop_reason))


def check_drop_gone(request: store_pb.DropGoneRequest) -> None:
    """Check for samples, at most as many as one claim can hold."""
    check_positive("sample_ids", len(request.sample_ids), LARGEST_CLAIM)
    for sample in request.sample_ids:
        check_id("sample_ids", sample)


def check_pair_sums(field: str, sums: store_pb.PairSums) -> None:
    """Check the names of joint pairs, each once, and their numbers of tokens and policies."""
    seen: set[str] = set()
    for index, one in enumerate(sums.pairs):
        where = f"{field}.pairs[{index}]"
        # Query and group, joined by a tab.
        if not 0 < len(one.pair) <= 2 * ID_LENGTH + 1 or one.pair in seen:
            raise InvalidArgument(
                "names no pair, or one that was there", field=f"{where}.pair", value=one.pair
            )
        seen.add(one.pair)
        for tokens in ("chosen_tokens", "rejected_tokens"):
            check_not_negative(f"{where}.{tokens}", getattr(one, tokens))
        check_positive(f"{where}.policies", one.policies, one.joint_policies)


def check_weights(
    request: store_pb.CommitStepRequest
    | store_pb.OpenVersionRequest
    | store_pb.RestartVersionRequest,
) -> None:
    """Check for the weights of a policy of the request's job."""
    weights = request.weights
    if not request.HasField("weights"):
        raise InvalidArgument("is missing", field="weights", remedy="Name the policy's weights.")
    check_name("weights.policy", weights.policy)
    check_not_negative("weights.version", weights.version)
    if weights.job_id and weights.job_id != request.job_id:
        raise InvalidArgument(
            f"must be {request.job_id}", field="weights.job_id", value=printable(weights.job_id)
        )


def check_commit(request: store_pb.CommitStepRequest) -> None:
    """Check for an outcome and the weights that belong to it."""
    if request.outcome not in store_pb.StepOutcome.values() or not request.outcome:
        raise InvalidArgument(
            "says nothing about the step",
            field="outcome",
            value=enum_name(store_pb.StepOutcome, request.outcome),
            remedy="Send APPLIED, SKIPPED or EMPTY.",
        )
    check_weights(request)
    if request.weights.policy != request.policy:
        raise InvalidArgument(
            f"must be {request.policy}",
            field="weights.policy",
            value=printable(request.weights.policy),
        )
    for claim in request.claim_ids:
        check_id("claim_ids", claim)
    check_pair_sums("pair_sums", request.pair_sums)
    if request.HasField("kept_micro_batches"):
        # The sums of joint pairs count as one more.
        most = len(request.claim_ids) + 1
        check_positive("kept_micro_batches", request.kept_micro_batches, most)
        if request.durable or request.outcome != store_pb.STEP_OUTCOME_APPLIED:
            raise InvalidArgument(
                "is for an applied step whose training state is not on disk",
                field="kept_micro_batches",
                value=request.kept_micro_batches,
            )


def _check_value(field: str, column: store_pb.Column) -> None:
    """Check a value: a tensor whose size matches its shape, valid JSON, or a reference with a key.

    Raises `DataLoss` for a tensor whose checksum does not match.
    """
    match column.WhichOneof("value"):
        case "tensor":
            try:
                tensors.from_proto(column.tensor)
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"is not a valid tensor: {error.message}",
                    kind="column_type",
                    field=f"{field}.tensor",
                    value=error.value,
                    remedy="Make it with troupe.tensors.to_proto.",
                ) from error
        case "json":
            if (size := len(column.json)) > JSON_BYTES:
                raise InvalidArgument(
                    f"is {size:,} characters of JSON; at most {JSON_BYTES:,} are stored",
                    kind="column_type",
                    field=f"{field}.json",
                    remedy="Store an array: large ones are stored by reference.",
                )
            try:
                parse_json(column.json)
            except NotJsonError as error:
                raise InvalidArgument(
                    f"is not valid JSON: {error}", kind="column_type", field=f"{field}.json"
                ) from error
        case "ref":
            check_id(f"{field}.ref", column.ref)
        case "parts":
            raise InvalidArgument(
                "is not stored in parts", kind="column_type", field=f"{field}.parts"
            )


def check_vector(field: str, tensor: common_pb.Tensor, *dtypes: common_pb.Dtype.ValueType) -> int:
    """Check for a tensor of one dimension, of one of these dtypes, whose size matches its shape.
    Returns the number of its elements."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype not in dtypes or len(shape) != 1:
        raise InvalidArgument(
            f"must be {' or '.join(map(common_pb.Dtype.Name, dtypes))} of one dimension",
            field=field,
            value=f"{enum_name(common_pb.Dtype, dtype)}{list(shape)}",
        )
    elements: int = shape[0]
    size = elements * tensors.ITEM_BYTES[dtype]
    # Each access to `data` copies it.
    found = len(tensor.data)
    if found != size:
        raise InvalidArgument(f"has {found} bytes, its shape says {size}", field=field)
    return elements


def check_size(field: str | None, size: int) -> None:
    """Check the size of a row."""
    if size > ROW_BYTES:
        raise InvalidArgument(
            f"is larger than a row may be ({ROW_BYTES:,} bytes)",
            kind=kinds.ROW_TOO_LARGE,
            field=field,
            value=size,
            remedy="Put large columns into the transfer layer and refer to them by key.",
        )


def _check_distinct(field: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise InvalidArgument(
                "occurs twice",
                field=field,
                value=value,
                remedy="A step needs distinct queries: at most as many as there are tasks."
                if field == "query_ids"
                else None,
            )
        seen.add(value)


def enum_name(enum: object, number: int) -> str:
    """Return the name of a value, which the enum may not have."""
    try:
        return str(enum.Name(number))  # type: ignore[attr-defined]
    except ValueError:
        return str(number)


def printable(text: str) -> str:
    """Return the part of an arbitrary text that an error may repeat."""
    return text.encode("unicode_escape").decode()[:ID_LENGTH]
