"""Rows: the trainer's representation of claimed samples, their parsing, and their metrics.

A sample passes through these forms, in order: `ClaimedSample` (the store's message), `Row` (arrays
and scalars of one sample), `TrainingBatch` (rows with their advantages), `TokenColumns` (inputs of
the loss by token, on the device: token_loss.py), `PackedBatch` (input of one forward pass:
sequences/packing.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from troupe import tensors
from troupe.algorithms.losses import PreferenceWeights
from troupe.algorithms.values import chains
from troupe.contracts import metric_names
from troupe.contracts.payloads import Payloads, from_protos
from troupe.experience import samples_digest
from troupe.job import AlgorithmSpec
from troupe.job.sections.algorithm import (
    REFERENCE_COLUMN,
    ROUTES_COLUMN,
    TEACHER_COLUMN,
    TEAM_COLUMN,
)
from troupe.mixtures import RoutingShape
from troupe.prefixes import column_value
from troupe.rpc import FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.workflow.token_ids import TokenIds

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
# Loads the value of a column that is kept by reference, given its key.
Load = Callable[[str], np.ndarray[Any, Any]]
_BUG = "This is a fault of the service that appended the sample; report it with the sample id."


@dataclass(frozen=True)
class Row:
    """One sample of the policy being trained: a turn's prompt and response."""

    sample_id: str
    # int64 [prompt_len + response_len]
    ids: Ints
    prompt_length: int
    # float32 [response_len]: log-probs under the engine that generated the response.
    behaviour: Floats
    reward: float
    # Rewards of the sample's whole group, its own included.
    group_rewards: tuple[float, ...]
    # Policy version that generated the first response token.
    version: int
    # Temperature by which the logits were divided for `behaviour`.
    temperature: float = 1.0
    # Id of the sample's group, whose rewards are compared; unique within the step.
    group: str = ""
    query: str = ""
    trajectory: str = ""
    agent: str = ""
    # Number of earlier steps that have trained the sample.
    uses: int = 0
    # float32 [response_len]: log-probs under the first version, if the sample brings them.
    reference: Floats | None = None
    # float32 [response_len]: log-probs under the agent's teacher, if the sample brings them.
    teacher: Floats | None = None
    # Position among the turns of its trajectory.
    turn: int = 0
    # Turns of one trajectory and agent with equal `chain` follow one another.
    chain: str = ""
    # Whether `reward` is this turn's, not its agent's for the whole trajectory.
    own_reward: bool = False
    # For a critic: the rewards of the turn, and of its agent for the trajectory; None: unknown.
    earned: float | None = None
    final: float | None = None
    # int64 [n]: prompts and responses of the other agents, for a critic that observes the team.
    context: Ints | None = None
    # Whether the response was given, not generated: its loss is cross-entropy.
    demonstration: bool = False
    # A demonstration of a pair, which is its group; the preferred side has reward 1, the other 0.
    preference: bool = False
    # Number of policies with replies in the pair.
    joint_policies: int = 1
    # uint8 or int16 [prompt_len + response_len - 1, layers, k]: the experts that the engine sent
    # each token to (`ROUTES_COLUMN`), where they are to be replayed.
    routes: np.ndarray[Any, np.dtype[Any]] | None = None
    # What tokens of the prompt stand for.
    payloads: Payloads = ()
    # User-defined columns that the advantage reads: arrays, or JSON values.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # Added by the trainer. float64 [response_len]: advantages, where they differ by token.
    advantages: np.ndarray[Any, np.dtype[np.float64]] | None = None
    # Added by the trainer. float64 [response_len]: what is taken from each token's reward for the
    # divergence from the first version; None: nothing.
    penalty: np.ndarray[Any, np.dtype[np.float64]] | None = None
    # Added by the trainer. [response_len]: log-probs under the weights that the step began with.
    old: np.ndarray[Any, np.dtype[Any]] | None = None

    @property
    def size(self) -> int:
        """Number of tokens, prompt and response."""
        return len(self.ids)

    @property
    def response_length(self) -> int:
        """Number of response tokens, which carry the loss."""
        return len(self.ids) - self.prompt_length

    @property
    def net_reward(self) -> float:
        """The reward that groups compare, without the penalty for divergence."""
        return self.reward if self.penalty is None else self.reward - float(self.penalty.sum())

    @property
    def prompt_digest(self) -> int:
        """64-bit hash of the prompt: workflows name it so, too."""
        ids = self.ids[: self.prompt_length].astype(np.int32)
        return TokenIds(ids, self.payloads).digest


@dataclass(frozen=True)
class TrainingBatch:
    """n rows with T response tokens whose advantages are known."""

    rows: Sequence[Row]
    # float64 [n]: advantage of each row; of rows with advantages by token, the mean |A_t|.
    advantages: torch.Tensor
    # From a critic, on its device: [T] V(s_t), and [T] the returns R_t that it is fitted to.
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


def chains_of(rows: Sequence[Row], *, team: bool = False) -> list[list[int]]:
    """Return the positions of the rows of each chain (one agent's turns of a trajectory that follow
    one another), in the order of turns; rows without a response are left out.

    `team`: the turns of all agents follow one another, but for chains that have a name.
    """
    names = [f"{row.agent}/{row.chain}" if row.chain else "" for row in rows]
    return chains(
        [row.trajectory for row in rows],
        [""] * len(rows) if team else [row.agent for row in rows],
        names if team else [row.chain for row in rows],
        [row.turn for row in rows],
        response_lengths(rows),
    )


def earned_in(rows: Sequence[Row], chain: Sequence[int]) -> list[float]:
    """Return the rewards that the turns of a chain earn.

    The last turn earns its agent's reward in addition; the mean of several agents' rewards.
    """
    finals: dict[str, float] = {}
    earned = []
    for i in chain:
        row = rows[i]
        # Without separate rewards only `reward` is known: the turn's own, or else its agent's.
        known = row.earned is not None
        own = row.earned if row.earned is not None else row.reward if row.own_reward else 0.0
        earned.append(own)
        if known:
            if row.final is not None:
                finals[row.agent] = row.final
        else:
            finals[row.agent] = 0.0 if row.own_reward else row.reward
    if finals:
        earned[-1] += sum(finals.values()) / len(finals)
    return earned


def content_key(row: Row) -> tuple[Any, ...]:
    """Return a sort key of a row's content; rows with equal keys are interchangeable."""
    prompt = row.ids[: row.prompt_length].astype(">i8").tobytes()
    response = row.ids[row.prompt_length :].astype(">i8").tobytes()
    seen = tuple((placed.position, placed.payload.digest) for placed in row.payloads)
    tail = (row.behaviour.tobytes(), row.reward, row.temperature, seen)
    return (row.trajectory, row.agent, prompt, response, *tail)


class GroupBuffer:
    """Buffer that holds rows back until all rows of their group have arrived."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Row]] = {}

    def add(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Add `rows`; returns the groups that are now complete, each in order of content."""
        complete = []
        for row in rows:
            members = self._waiting.setdefault(row.group, [])
            members.append(row)
            if len(members) >= len(row.group_rewards):
                complete.append(sorted(self._waiting.pop(row.group), key=content_key))
        return complete

    @property
    def waiting(self) -> list[Row]:
        """The rows of incomplete groups."""
        return [row for members in self._waiting.values() for row in members]

    def rest(self) -> list[list[Row]]:
        """Empty the buffer; returns its incomplete groups, each in order of content."""
        left = [sorted(members, key=content_key) for members in self._waiting.values()]
        self._waiting.clear()
        return left


def columns_of(algorithm: AlgorithmSpec) -> frozenset[str]:
    """Return the names of the sample columns that this algorithm reads."""
    critic, distillation = algorithm.value_function, algorithm.distillation
    found = {REFERENCE_COLUMN} if algorithm.kl_coefficient > 0 else set()
    if algorithm.router_replay:
        found.add(ROUTES_COLUMN)
    if distillation is not None and distillation.divergence == "sampled":
        found.add(TEACHER_COLUMN)
    return frozenset(found | ({TEAM_COLUMN} if critic and critic.observes == "team" else set()))


def parse_rows(
    claimed: Iterable[store_pb.ClaimedSample],
    vocabulary: int,
    load: Load | None = None,
    columns: Collection[str] = (REFERENCE_COLUMN,),
    *,
    longest: int = 0,
    routing: RoutingShape | None = None,
    payload_kinds: Collection[str] = (),
    user_columns: Collection[str] = (),
) -> list[Row]:
    """Parse the samples of a claim into rows, sorted by sample id.

    `longest`: tokens that the model has positions for; 0: unknown. With `load`, rows carry
    payloads, and `columns` and `user_columns` if their samples have them. `routing`: the shape of
    their routes; None: the model has no experts. `payload_kinds`: kinds that the model and its
    teachers take. Raises ChecksumError, FailedPrecondition of kind "malformed_sample", and what
    `load` raises.
    """
    rows = [_parse(item, load, columns, user_columns) for item in claimed]
    for row in rows:
        for ids in (row.ids, row.context):
            if ids is not None and ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
                largest = int(ids.max())
                text = f"token id {largest} is outside the policy's vocabulary of {vocabulary}"
                remedy = "Check that engine and trainer use the same model and tokenizer."
                raise malformed(row.sample_id, text, remedy)
        for placed in row.payloads:
            if (kind := placed.payload.kind) not in payload_kinds:
                text = f"the policy's model, or a teacher of it, takes no payload of kind {kind}"
                remedy = "Use models that declare it (`payload_kinds`), as the engine does."
                raise malformed(row.sample_id, text, remedy)
        problem = routing and row.routes is not None and routing.problem(row.routes, len(row.ids))
        if problem:
            raise malformed(row.sample_id, problem, "Serve the model that is trained.")
        if longest and len(row.ids) > longest:
            raise malformed(
                row.sample_id,
                f"it has {len(row.ids)} tokens, the policy's model has positions for {longest}",
                "Lower `engine.max_context`, or use a model with a longer context.",
            )
    if routing is None:
        rows = [row if row.routes is None else replace(row, routes=None) for row in rows]
    return sorted(rows, key=lambda row: row.sample_id)


def _parse(
    item: store_pb.ClaimedSample,
    load: Load | None,
    columns: Collection[str],
    user_columns: Collection[str],
) -> Row:
    sample = item.sample
    prompt = tensors.from_proto(sample.prompt_ids)
    response = tensors.from_proto(sample.response_ids)
    behaviour = tensors.from_proto(sample.logprobs).astype(np.float32, copy=False)
    brought = {} if load is None else {n: column_of(sample, n, load) for n in columns}
    reference, teacher = (
        None if (found := brought.get(name)) is None else found.astype(np.float32, copy=False)
        for name in (REFERENCE_COLUMN, TEACHER_COLUMN)
    )
    context = brought.get(TEAM_COLUMN)
    scores = {"logprobs": behaviour, REFERENCE_COLUMN: reference, TEACHER_COLUMN: teacher}
    arrays = {"prompt_ids": prompt, "response_ids": response, TEAM_COLUMN: context, **scores}
    for name, array in arrays.items():
        if array is not None and array.ndim != 1:
            raise malformed(sample.sample_id, f"{name} has shape {list(array.shape)}", _BUG)
    for name, array in scores.items():
        if array is not None and len(array) != len(response):
            text = f"{len(response)} response tokens but {len(array)} {name}"
            raise malformed(sample.sample_id, text, _BUG)
    if len(prompt) == 0:
        raise malformed(sample.sample_id, "the prompt is empty", "Begin prompts with a token.")
    if not sample.HasField("reward"):
        raise malformed(sample.sample_id, "it has no reward", _BUG)
    return Row(
        sample_id=sample.sample_id,
        ids=np.concatenate([prompt, response]).astype(np.int64, copy=False),
        prompt_length=len(prompt),
        behaviour=behaviour,
        reward=sample.reward,
        # Sorted, so that their mean does not depend on the order of sample ids.
        group_rewards=tuple(sorted(item.group_rewards)) or (sample.reward,),
        version=sample.versions[0].version if sample.versions else 0,
        # Engines report log-probs of greedy responses under the distribution of temperature 1.
        temperature=sample.temperature if sample.temperature > 0 else 1.0,
        group=f"{sample.query_id}\t{sample.group_id}",
        query=sample.query_id,
        trajectory=sample.trajectory_id,
        agent=sample.agent,
        uses=sample.uses,
        reference=reference,
        teacher=teacher,
        turn=sample.turn,
        chain=sample.chain,
        own_reward=sample.own_reward,
        earned=sample.earned if sample.HasField("earned") else None,
        final=sample.final_reward if sample.HasField("final_reward") else None,
        context=None if context is None else context.astype(np.int64, copy=False),
        routes=brought.get(ROUTES_COLUMN),
        payloads=from_protos(sample.payloads, load) if sample.payloads and load else (),
        demonstration=sample.demonstration,
        preference=sample.preference,
        joint_policies=sample.joint_policies or 1,
        columns={} if load is None else _user_columns(sample, user_columns, load),
    )


def _user_columns(
    sample: store_pb.Sample, names: Collection[str], load: Load
) -> dict[str, np.ndarray[Any, Any] | Any]:
    """Return the columns of `sample` that are in `names`: arrays, or JSON values."""
    found: dict[str, Any] = {}
    for name in names:
        if name not in sample.columns:
            continue
        column = sample.columns[name]
        is_json = column.WhichOneof("value") == "json"
        found[name] = json.loads(column.json) if is_json else column_of(sample, name, load)
    return found


def column_of(sample: store_pb.Sample, name: str, load: Load) -> np.ndarray[Any, Any] | None:
    """Return the array in a column of `sample`; None without that column. Raises as
    `parse_rows`."""
    if name not in sample.columns:
        return None
    column = sample.columns[name]
    match column.WhichOneof("value"):
        case "tensor":
            value = tensors.from_proto(column.tensor)
        case "ref":
            value = load(column.ref)
        case "parts":
            value = column_value(column.parts, load)
        case _:
            text = f"{name} is no tensor"
            raise malformed(sample.sample_id, text, "Append an array of one axis.")
    return value


def response_lengths(rows: Sequence[Row]) -> list[int]:
    """Return the number of response tokens of each row."""
    return [row.response_length for row in rows]


def by_token(rows: Sequence[Row], advantages: torch.Tensor) -> TrainingBatch:
    """Return `rows` with advantages by response token: float64 [T], row after row."""
    parts = torch.split(advantages, response_lengths(rows))
    given = [replace(row, advantages=part.numpy()) for row, part in zip(rows, parts, strict=True)]
    means = [float(part.abs().mean()) if len(part) else 0.0 for part in parts]
    return TrainingBatch(given, torch.tensor(means, dtype=torch.float64))


def not_finite(rows: Sequence[Row], advantages: torch.Tensor) -> str:
    """Return a message about a sample whose advantage or log-probs are not finite; empty if
    none."""
    # The loss takes advantages in single precision.
    usable = torch.isfinite(advantages.to(torch.float32)).tolist()
    for row, fine in zip(rows, usable, strict=True):
        if not fine:
            worst = max(row.group_rewards, key=abs)
            return (
                f"the advantage of sample {row.sample_id} is not finite, so the loss is not: its "
                f"reward is {row.reward:g}, its group's largest {worst:g}"
            )
        if not np.isfinite(row.behaviour).all():
            return f"a log-prob of sample {row.sample_id} is not finite, so the loss is not"
    return ""


def taught_logprobs(row: Row) -> Floats:
    """Return the log-probs under a row's teacher. Raises FailedPrecondition of kind
    "malformed_sample"."""
    if row.teacher is None:
        raise malformed(row.sample_id, f"it has no column {TEACHER_COLUMN}", _BUG)
    return row.teacher


def malformed(sample_id: str, message: str, remedy: str) -> FailedPrecondition:
    """Return an error of kind "malformed_sample" about one sample."""
    return FailedPrecondition(
        message, kind="malformed_sample", field="sample_id", value=sample_id, remedy=remedy
    )


@dataclass
class BatchSummary:
    """Accumulator of a step's sample metrics."""

    samples: int = 0
    # Samples that are no demonstrations: rewards, advantages and versions are theirs.
    played: int = 0
    tokens: int = 0
    response_tokens: int = 0
    # Response tokens of samples with advantage zero.
    idle_tokens: int = 0
    reward: float = 0.0
    reward_squares: float = 0.0
    advantage: float = 0.0
    versions: int = 0
    oldest: int | None = None
    # Samples that an earlier step has trained.
    reused: int = 0
    # Complete pairs of preferences, and sums over them: losses, how many are ranked as preferred,
    # implicit rewards of both sides.
    pairs: int = 0
    pair_loss: float = 0.0
    pairs_ranked: int = 0
    chosen_reward: float = 0.0
    rejected_reward: float = 0.0
    # `samples_digest` of the sample ids; the store compares it with the digest of the claimed
    # samples.
    digest: int = 0

    def add(self, rows: Sequence[Row], advantages: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Add n rows with their advantages [n]."""
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            self.samples += 1
            self.tokens += len(row.ids)
            self.response_tokens += row.response_length
            if row.demonstration:
                continue
            self.played += 1
            self.idle_tokens += row.response_length if advantage == 0.0 else 0
            self.reward += row.reward
            self.reward_squares += row.reward * row.reward
            self.advantage += abs(advantage)
            self.versions += row.version
            self.oldest = row.version if self.oldest is None else min(self.oldest, row.version)
            self.reused += int(row.uses > 0)
        self.digest = (self.digest + samples_digest(row.sample_id for row in rows)) % (1 << 64)

    def add_pairs(self, found: PreferenceWeights) -> None:
        """Add p pairs of preferences."""
        self.pairs += len(found.losses)
        self.pair_loss += float(found.losses.sum())
        self.pairs_ranked += int((found.chosen > found.rejected).sum())
        self.chosen_reward += float(found.chosen.sum())
        self.rejected_reward += float(found.rejected.sum())

    def metrics(self, version: int) -> dict[str, float]:
        """Return the step's sample metrics; `version`: the one that the step starts from."""
        if self.samples == 0:
            return {"samples": 0.0, "tokens": 0.0}
        found = {
            "samples": float(self.samples),
            "tokens": float(self.tokens),
            "response_tokens": float(self.response_tokens),
            "response_length/mean": self.response_tokens / self.samples,
        }
        if p := self.pairs:
            found |= {
                "preference/loss": self.pair_loss / p,
                "preference/accuracy": self.pairs_ranked / p,
                "preference/chosen_reward": self.chosen_reward / p,
                "preference/rejected_reward": self.rejected_reward / p,
                "preference/margin": (self.chosen_reward - self.rejected_reward) / p,
            }
        n = self.played
        if n == 0:
            return found
        mean = self.reward / n
        return found | {
            metric_names.REWARD_MEAN: mean,
            metric_names.REWARD_STD: math.sqrt(max(0.0, self.reward_squares / n - mean * mean)),
            "advantage/abs_mean": self.advantage / n,
            metric_names.ZERO_ADVANTAGES: self.idle_tokens / max(self.response_tokens, 1),
            metric_names.STALENESS_MEAN: version - self.versions / n,
            metric_names.STALENESS_MAX: float(version - (self.oldest or 0)),
            "reused_fraction": self.reused / n,
        }
