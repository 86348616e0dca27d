"""Stems: shared prefixes, with which the samples of one conversation store each token once.

The prompt of a turn usually begins with the prompt and the response of an earlier turn. Such a
sample has a `Stem`, which names the earlier sample and the number of its leading tokens to take;
its `prompt_ids` hold only the rest. The same applies to columns along the tokens, such as routes to
experts. Turns that branch off share their common prefix; an agent of another policy has its own
samples and shares nothing. A trainer rebuilds the same trees from ids when it packs sequences
(services/trainer/learning/sequences/packing.py).

`PrefixIndex` makes stems at the end of a trajectory, `share` makes them in a micro-batch that is
kept, and `restore` reassembles whole samples. Checksums of the whole values travel with the stems,
so a sample that was reassembled from wrong parts is detected like changed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash

from troupe.contracts.payloads import Payloads, common_tokens, places_of
from troupe.job.sections.algorithm import ROUTES_COLUMN, TEAM_COLUMN
from troupe.rpc.errors import DataLoss
from troupe.tensors import ChecksumError, from_proto, ids_to_proto, to_proto
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

Array: TypeAlias = np.ndarray[Any, Any]
# Policy, trajectory and turn of a sample.
Key: TypeAlias = tuple[str, str, int]

# Columns along the tokens of prompt and response, whose beginnings are shared, too.
SHARED_COLUMNS: Final = frozenset({ROUTES_COLUMN, TEAM_COLUMN})
# A shorter common prefix is not worth a stem, which takes some 40 bytes here and in records.
LEAST_TOKENS: Final = 32
_ID_BYTES: Final = 4


def key_of(sample: store_pb.Sample) -> Key:
    """Return the key of `sample` in its table."""
    return sample.policy, sample.trajectory_id, sample.turn


def stem_key_of(sample: store_pb.Sample) -> Key:
    """Return the key of the sample that the stem of `sample` refers to."""
    return sample.policy, sample.trajectory_id, sample.stem.turn


@dataclass
class _IndexedRow:
    turn: int
    ids: Array
    columns: Mapping[str, Array]
    payloads: Payloads = ()
    stem: _IndexedRow | None = None
    shared: int = 0


@dataclass(frozen=True)
class OwnPart:
    """The part of a row that earlier rows do not share."""

    stem: store_pb.Stem | None
    prompt: Array
    columns: dict[str, Any]
    payloads: Payloads = ()


@dataclass
class PrefixIndex:
    """The rows of one trajectory so far, among which the stem of the next one is looked up."""

    _rows: dict[str, list[_IndexedRow]] = field(default_factory=dict)

    def add(
        self,
        policy: str,
        turn: int,
        prompt: Array,
        response: Array,
        columns: Mapping[str, Any],
        payloads: Payloads = (),
    ) -> OwnPart:
        """Add a row; return the part that earlier rows do not share.

        `prompt`, `response`: int32 [n]. `payloads`: the prompt's. Only `columns` in
        `SHARED_COLUMNS` are shared. A prompt keeps at least its last token.
        """
        arrays = {
            name: np.ascontiguousarray(value)
            for name, value in columns.items()
            if name in SHARED_COLUMNS and isinstance(value, np.ndarray) and value.ndim
        }
        row = _IndexedRow(turn, np.concatenate([prompt, response]), arrays, payloads)
        earlier = self._rows.setdefault(policy, [])
        row.stem, row.shared = _longest(earlier, prompt, payloads)
        earlier.append(row)
        if row.stem is None:
            return OwnPart(None, prompt, dict(columns), payloads)
        stem = store_pb.Stem(turn=row.stem.turn, tokens=row.shared, checksum=_checksum(prompt))
        own = dict(columns)
        for name, value in arrays.items():
            entries = _entries(row.stem.columns.get(name), value)
            # A stem would take more bytes.
            if entries * (value.nbytes // max(1, len(value))) >= LEAST_TOKENS * _ID_BYTES:
                stem.columns[name].entries = entries
                stem.columns[name].checksum = _checksum(value)
                own[name] = value[entries:]
        later = tuple(placed for placed in payloads if placed.position >= row.shared)
        return OwnPart(stem, prompt[row.shared :], own, later)


def _longest(
    rows: Sequence[_IndexedRow], prompt: Array, payloads: Payloads
) -> tuple[_IndexedRow | None, int]:
    """Return the row with the longest prefix of `prompt` without its last token, and the prefix
    length."""
    best, found = 0, None
    for row in reversed(rows):
        most = min(len(row.ids), len(prompt) - 1)
        if most <= best or row.ids[best] != prompt[best]:
            continue
        length = _common(row.ids[:most], prompt[:most])
        if payloads or row.payloads:
            length = common_tokens(row.payloads, payloads, length)
        if length > best:
            best, found = length, row
        if best == len(prompt) - 1:
            break
    if found is None or best < LEAST_TOKENS:
        return None, 0
    # Prefer the row that has these tokens itself, so that fewer samples depend on one another.
    while found.stem is not None and found.shared >= best:
        found = found.stem
    return found, best


def _common(one: Array, other: Array) -> int:
    """Return the number of leading elements that two arrays of one length and axis have in
    common."""
    differs = one != other
    first = int(differs.argmax()) if len(differs) else 0
    return first if len(differs) and differs[first] else len(differs)


def _entries(one: Array | None, other: Array) -> int:
    """Return the number of leading entries that are the same bytes in two arrays."""
    if one is None or one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return 0
    most = min(len(one), len(other))
    width = other.nbytes // max(1, len(other))
    if not most or not width:
        return 0
    a, b = (array[:most].reshape(-1).view(np.uint8) for array in (one, other))
    return _common(a, b) // width


def _checksum(array: Array) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).tobytes())


def share(claimed: Sequence[store_pb.ClaimedSample]) -> list[store_pb.ClaimedSample]:
    """Return copies of whole samples, in order, with stems that refer to one another."""
    indices: dict[str, PrefixIndex] = {}
    made: dict[int, store_pb.ClaimedSample] = {}
    for place, item in sorted(enumerate(claimed), key=lambda one: one[1].sample.turn):
        sample = item.sample
        columns = {
            name: from_proto(column.tensor)
            for name, column in sample.columns.items()
            if name in SHARED_COLUMNS and column.HasField("tensor")
        }
        index = indices.setdefault(sample.trajectory_id, PrefixIndex())
        prompt, response = from_proto(sample.prompt_ids), from_proto(sample.response_ids)
        payloads = places_of(sample.payloads) if sample.payloads else ()
        own = index.add(sample.policy, sample.turn, prompt, response, columns, payloads)
        if own.stem is None:
            made[place] = item
            continue
        copy = made[place] = store_pb.ClaimedSample()
        copy.CopyFrom(item)
        copy.sample.stem.CopyFrom(own.stem)
        copy.sample.prompt_ids.CopyFrom(ids_to_proto(own.prompt))
        for name in own.stem.columns:
            copy.sample.columns[name].tensor.CopyFrom(to_proto(own.columns[name]))
        del copy.sample.payloads[: len(payloads) - len(own.payloads)]
    return [made[place] for place in range(len(claimed))]


def stems_of(
    samples: Iterable[store_pb.Sample], known: Mapping[Key, store_pb.Sample]
) -> list[store_pb.Sample]:
    """Return the samples of `known` that `samples` refer to, directly or not, but do not contain.

    Raises `DataLoss` of kind "stem_missing".
    """
    own = {key_of(sample): sample for sample in samples}
    found: dict[Key, store_pb.Sample] = {}
    for sample in own.values():
        while sample.HasField("stem") and (key := stem_key_of(sample)) not in found:
            if key in own:
                break
            if key not in known:
                raise _missing(sample)
            sample = found[key] = known[key]
    return list(found.values())


def restore(
    claimed: Iterable[store_pb.ClaimedSample], stems: Iterable[store_pb.Sample] = ()
) -> list[store_pb.ClaimedSample]:
    """Return a claim's samples without stems; samples with a stem are reassembled as copies.

    `stems` are further samples that they refer to. Raises `DataLoss` of kind "stem_missing".
    """
    given = list(claimed)
    joiner = _Joiner([*(item.sample for item in given), *stems])
    whole = []
    for item in given:
        if item.sample.HasField("stem"):
            copy = store_pb.ClaimedSample()
            copy.CopyFrom(item)
            joiner.join(copy.sample)
            item = copy
        whole.append(item)
    return whole


def restored(sample: store_pb.Sample, stems: Iterable[store_pb.Sample]) -> store_pb.Sample:
    """Restore one sample, as `restore` does."""
    if not sample.HasField("stem"):
        return sample
    (item,) = restore([store_pb.ClaimedSample(sample=sample)], stems)
    return item.sample


class _Joiner:
    """The reassembly of samples from their own parts and the samples that they refer to."""

    def __init__(self, samples: Iterable[store_pb.Sample]) -> None:
        self._samples = {key_of(sample): sample for sample in samples}
        self._tokens: dict[Key, bytes] = {}

    def join(self, sample: store_pb.Sample) -> None:
        """Make `sample` whole, in place."""
        stem = store_pb.Stem()
        stem.CopyFrom(sample.stem)
        path = self._path(sample)
        before = self._ids(path[-1])[: stem.tokens * _ID_BYTES]
        if len(before) != stem.tokens * _ID_BYTES:
            raise _missing(sample)
        data = before + _id_bytes(sample.prompt_ids)
        sample.prompt_ids.CopyFrom(
            common_pb.Tensor(
                dtype=common_pb.DTYPE_INT32,
                shape=[len(data) // _ID_BYTES],
                data=data,
                checksum=stem.checksum,
            )
        )
        for name, shared in stem.columns.items():
            parts = _parts_of(path, name, shared.entries)
            parts.append(store_pb.ColumnPart(column=sample.columns[name]))
            whole = sample.columns[name]
            if all(part.column.HasField("tensor") for part in parts):
                whole.tensor.CopyFrom(_joined(parts, shared.checksum))
            else:
                whole.parts.CopyFrom(store_pb.ColumnParts(parts=parts, checksum=shared.checksum))
        if any(one.payloads for one in path):
            payloads, until = list(sample.payloads), stem.tokens
            for one in reversed(path):
                payloads[:0] = [placed for placed in one.payloads if placed.position < until]
                until = min(until, one.stem.tokens)
            del sample.payloads[:]
            sample.payloads.extend(payloads)
        sample.ClearField("stem")

    def _path(self, sample: store_pb.Sample) -> list[store_pb.Sample]:
        """Return the samples that `sample` refers to, from one without a stem on."""
        path: list[store_pb.Sample] = []
        while sample.HasField("stem"):
            earlier = self._samples.get(stem_key_of(sample))
            if earlier is None or len(path) > len(self._samples):
                raise _missing(sample)
            sample = earlier
            path.append(sample)
        return path[::-1]

    def _ids(self, sample: store_pb.Sample) -> bytes:
        """Return the tokens of a sample's whole prompt and response."""
        if (found := self._tokens.get(key_of(sample))) is not None:
            return found
        ids = b""
        for one in [*self._path(sample), sample]:
            key = key_of(one)
            if key not in self._tokens:
                before = ids[: one.stem.tokens * _ID_BYTES]
                own = _id_bytes(one.prompt_ids) + _id_bytes(one.response_ids)
                self._tokens[key] = before + own
            ids = self._tokens[key]
        return ids


def _id_bytes(ids: common_pb.Tensor) -> bytes:
    """Return token ids as int32, the form whose checksum stems hold."""
    return ids.data if ids.dtype == common_pb.DTYPE_INT32 else from_proto(ids).tobytes()


def _parts_of(path: Sequence[store_pb.Sample], name: str, entries: int) -> list[Any]:
    """Return the first `entries` entries of the column of the last sample of `path`, as
    ColumnParts."""
    found: list[store_pb.ColumnPart] = []
    for at in range(len(path) - 1, -1, -1):
        shared = path[at].stem.columns[name].entries if name in path[at].stem.columns else 0
        if entries > shared:
            if name not in path[at].columns:
                raise _missing(path[at])
            part = store_pb.ColumnPart(column=path[at].columns[name], entries=entries - shared)
            found.append(part)
        entries = min(entries, shared)
        if not entries:
            break
    return found[::-1]


def _joined(parts: Sequence[store_pb.ColumnPart], checksum: int) -> common_pb.Tensor:
    """Return the tensor that consists of `parts`, which are tensors."""
    first = parts[0].column.tensor
    data, entries = [], 0
    for part in parts:
        tensor = part.column.tensor
        length = tensor.shape[0]
        number = part.entries or length
        if number > length or list(tensor.shape[1:]) != list(first.shape[1:]):
            raise DataLoss("a column's parts do not fit", kind="stem_missing", field="columns")
        data.append(tensor.data[: len(tensor.data) // max(1, length) * number])
        entries += number
    shape = [entries, *first.shape[1:]]
    return common_pb.Tensor(dtype=first.dtype, shape=shape, data=b"".join(data), checksum=checksum)


def column_value(parts: store_pb.ColumnParts, load: Callable[[str], Array]) -> Array:
    """Return the array of a column in parts; `load` gives the value behind a reference.

    Raises `ChecksumError`, and what `load` raises.
    """
    arrays = []
    for part in parts.parts:
        ref = part.column.HasField("ref")
        array = load(part.column.ref) if ref else from_proto(part.column.tensor)
        arrays.append(array[: part.entries] if part.entries else array)
    whole = np.concatenate(arrays)
    if _checksum(whole) != parts.checksum:
        raise ChecksumError("a column was reassembled from the wrong parts")
    return whole


def _missing(sample: store_pb.Sample) -> DataLoss:
    return DataLoss(
        f"sample {sample.sample_id} shares its beginning with turn {sample.stem.turn}, which is "
        "missing",
        kind="stem_missing",
        field="stem.turn",
        value=sample.stem.turn,
        remedy="This is a fault of the experience store; report it with the sample id.",
    )
