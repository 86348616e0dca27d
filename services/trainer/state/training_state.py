"""Training state on disk: everything that a step changes, one directory per version.

`{data_dir}/{job}/state/{policy}/v{version}-{checksum}/` contains weights.safetensors,
optimizer.safetensors, random.safetensors and state.json; a gang's has one shard of weights and
optimizer per rank instead (gang/sharded_state.py). A directory is renamed to its final name only
when it is complete. Two attempts at one version do not overwrite each other, since the checksum of
the published weights is part of the name; the experience store records which attempt is valid.

The learning rate is a function of the version, so the scheduler has no state to keep. What a
version was trained on is kept with it: `Frontier`, which must be what the commit says.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load_file

from services.trainer.learning.optimizer import Generators, Moments, is_moment
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.reading import StoredTensors
from troupe.checkpoints.retention import remove
from troupe.checkpoints.writing import safetensors_file
from troupe.disks import is_full, sync_directory, sync_file, system_error
from troupe.rpc import DataLoss, FailedPrecondition, ResourceExhausted, TroupeError
from troupe.transfer import checksum_of

_NAME = re.compile(r"v([0-9]+)-([0-9a-f]{12})")
_UNFINISHED = re.compile(r"\.v([0-9]+)-")
FORMAT = 3
# Writes the parts of a state into a directory, each rank of a gang its own; returns the checksums
# of the files.
WriteParts: TypeAlias = Callable[[Path], dict[str, str]]


@contextlib.contextmanager
def in_memory(path: Path, what: str) -> Iterator[None]:
    """Context that turns an out-of-space error of a write to host memory into ResourceExhausted.

    The error has the kind "storage_full".
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        found = system_error(error)
        if found is None or not is_full(found):
            raise
        raise ResourceExhausted(
            f"no room in {path.parent} for {what} that a gang hands over",
            kind="storage_full",
            field="directory",
            value=path.parent,
            remedy="Free space there, or give the container more of it (`--shm-size`): it takes a "
            "whole copy of weights and optimizer.",
        ) from error


@contextlib.contextmanager
def reported(directory: Path, what: str) -> Iterator[None]:
    """Context that turns a failed write into a typed error.

    ResourceExhausted of kind "storage_full", or FailedPrecondition of kind "storage_unwritable".
    """
    try:
        yield
    except TroupeError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        found = system_error(error)
        if found is None and not isinstance(error, SafetensorError):
            raise
        if found is not None and is_full(found):
            raise ResourceExhausted(
                f"no room for {what} in {directory}",
                kind="storage_full",
                field="data_dir",
                value=directory,
                remedy="Free space there, then resume; nothing that was finished is lost.",
            ) from error
        raise FailedPrecondition(
            f"{what} cannot be written to {directory}: {error}",
            kind="storage_unwritable",
            field="data_dir",
            value=directory,
            remedy="Make the directory writable for the trainer, or set TROUPE_DATA_DIR.",
        ) from error


@dataclass(frozen=True)
class Frontier:
    """Record of a version's training data; kept with its weights and optimizer state."""

    # Step whose samples made this version; -1: none, these are the first weights.
    step: int = -1
    # The commit's `samples_digest`.
    samples_digest: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """A learner's part of a training state: whole tensors, or functions that write their shards."""

    weights: Tensors = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    # In place of tensors: has the ranks of a gang write their shards.
    write_parts: WriteParts | None = None
    # Has the ranks copy their shards to host memory; returns a function that writes the copies
    # while later steps run, or None where a rank has no memory for one.
    copy_parts: Callable[[], WriteParts | None] | None = None


@dataclass(frozen=True)
class TrainingState:
    """The training state of one version of a policy, to be written."""

    version: int
    # Checksum of the published weights, as committed.
    checksum: str
    snapshot: Snapshot
    # States of random generators (`Randomness`).
    generators: Generators = field(default_factory=dict)
    frontier: Frontier = Frontier()


@dataclass(frozen=True)
class KeptState:
    """A training state on disk, whose bytes match their checksums.

    `weights` and `moments` are read whole when they are first asked for; the ranks of a gang read
    their shards of them from `path`.
    """

    version: int
    # Checksum of the published weights, as committed.
    checksum: str
    generators: Generators
    frontier: Frontier
    path: Path
    # Reads weights and moments. Raises DataLoss of kind "state_corrupt".
    read: Callable[[], tuple[Tensors, Moments]]

    @functools.cached_property
    def _whole(self) -> tuple[Tensors, Moments]:
        return self.read()

    @property
    def weights(self) -> Tensors:
        """The trained weights, whole."""
        return self._whole[0]

    @property
    def moments(self) -> Moments:
        """The state of optimizer, critic and baselines, whole."""
        return self._whole[1]


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a kept version, read from disk one tensor at a time (any number of ranks may
    have written them)."""

    tensors: StoredTensors
    # Checksum of the published weights, as committed.
    checksum: str
    frontier: Frontier
    # Whether the bytes are those that were written; one pass over them.
    intact: Callable[[], bool]

    def verified(self, checksum: str) -> bool:
        """Return whether what was read is what was kept; `checksum`: of it as it would be
        published.

        Weights that were computed again after a crash may differ from those by rounding.
        """
        return checksum == self.checksum or self.intact()


class StateStore:
    """The kept versions of one policy's training state."""

    def __init__(self, root: Path, job_id: str, policy: str, *, sync: bool = True) -> None:
        self._root, self._directory = root, root / job_id / "state" / policy
        self._sync = sync
        self.job_id, self.policy = job_id, policy

    def sibling(self, job_id: str, policy: str) -> StateStore:
        """Return the store of another policy or job."""
        return StateStore(self._root, job_id, policy, sync=self._sync)

    def origin(self, job_id: str, policy: str, version: int) -> KeptState:
        """Return the state of another job's version with which this policy begins: the copy that
        was kept for it, else the other job's own. Raises as `load`."""
        held = self._held
        store = held if held.exists(version) else self.sibling(job_id, policy)
        return store.load(version)

    @property
    def _held(self) -> StateStore:
        """States that the orchestrator has kept for this policy (`jobs/origins.py` there)."""
        return StateStore(self._root / self.job_id, "init", self.policy, sync=self._sync)

    def forget_origin(self) -> None:
        """Delete the copy that was kept for this policy to begin with."""
        shutil.rmtree(self._held._directory, ignore_errors=True)

    def versions(self) -> list[int]:
        """Kept versions, ascending."""
        return sorted({version for version, _, _ in self._entries()})

    def save(self, state: TrainingState) -> Path:
        """Write `state` durably. Raises ResourceExhausted ("storage_full") and changes nothing."""
        target = self._directory / f"v{state.version}-{state.checksum[:12]}"
        parts, mine = {"random": state.generators}, state.snapshot
        if mine.write_parts is None:
            parts |= {"weights": mine.weights, "optimizer": mine.moments}
        digest = state.frontier.samples_digest
        meta: dict[str, Any] = {
            "format": FORMAT,
            "version": state.version,
            "checksum": state.checksum,
            "step": state.frontier.step,
            "samples_digest": None if digest is None else f"{digest:016x}",
            **{name: checksum_of(tensors) for name, tensors in parts.items()},
        }
        if self._is(target, meta):
            return target
        with self._filling(target) as folder:
            for name, tensors in parts.items():
                # Tensor by tensor: of a GPU's state no second copy is in the host's memory.
                with safetensors_file(folder / f"{name}.safetensors", tensors) as write:
                    for key, tensor in tensors.items():
                        write(key, tensor)
            if mine.write_parts is not None:
                meta["parts"] = mine.write_parts(folder)
            (folder / "state.json").write_text(json.dumps(meta))
        return target

    def load(self, version: int, checksum: str = "") -> KeptState:
        """Verify the state of `version` (with `checksum`: as committed).

        Raises FailedPrecondition of kind "state_not_found", or DataLoss of kind "state_corrupt".
        """
        return self._read(self._require(version, checksum), version, checksum)

    def stored(self, version: int, checksum: str = "") -> StoredWeights:
        """Return the weights of `version`, not read yet and not verified: whoever reads them
        compares what becomes of them with `StoredWeights.checksum`. Raises as `load`."""
        path = self._require(version, checksum)
        with _usable(path, version):
            meta = _meta(path)
            files = meta.get("parts", ["weights.safetensors"])
            tensors = StoredTensors(path / name for name in files)
            weights = tensors.only(name for name in tensors if not is_moment(name))

            def intact() -> bool:
                if "parts" in meta:
                    return _are(path, meta["parts"])
                return bool(meta["weights"] == checksum_of(weights))

            return StoredWeights(weights, meta["checksum"], _frontier(meta), intact)

    def _require(self, version: int, checksum: str) -> Path:
        if (path := self.find(version, checksum)) is not None:
            return path
        raise FailedPrecondition(
            f"no training state of policy {self.policy} at version {version} "
            f"with checksum {checksum or '(any)'} is kept in {self._directory}",
            kind="state_not_found",
            field="version",
            value=version,
            remedy="Give all trainer workers the same data_dir (TROUPE_DATA_DIR); kept here: "
            f"{', '.join(map(str, self.versions())) or 'none'}.",
        )

    def exists(self, version: int, checksum: str = "") -> bool:
        """Return whether a state of `version` is kept."""
        return self.find(version, checksum) is not None

    def find(self, version: int, checksum: str = "") -> Path | None:
        """Return the directory of the state that `load` would read, or None."""
        for found, short, path in self._entries():
            if found == version and (not checksum or short == checksum[:12]):
                return path
        return None

    def take_in(self, name: str, files: Mapping[str, memoryview]) -> None:
        """Write a state directory of another store, whole or not at all; `load` verifies it.

        Raises DataLoss of kind "state_corrupt" for names that no state has, ResourceExhausted.
        """
        paths = {part: Path(part) for part in files}
        outside = any(p.is_absolute() or ".." in p.parts for p in paths.values())
        if outside or not _NAME.fullmatch(name):
            raise DataLoss(f"'{name}' is no training state", kind="state_corrupt", value=name)
        with self._filling(self._directory / name) as folder:
            for part, path in paths.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(files[part])

    def prune(self, newest: int, keep: int, *, first: bool = False) -> None:
        """Delete versions but the `keep` newest up to `newest`; `first`: keep version 0 too."""
        old = sorted({version for version in self.versions() if version <= newest})[:-keep]
        for version, _, path in list(self._entries()):
            if version in old and not (first and version == 0):
                remove(path)
        # Leftovers of killed processes; a live process that writes one is superseded.
        for path in self._directory.glob(".v*"):
            match = _UNFINISHED.match(path.name)
            if match and int(match[1]) <= newest:
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _filling(self, target: Path) -> Iterator[Path]:
        """A temporary folder that replaces `target` atomically once it is filled."""
        temp = self._directory / f".{target.name}.{secrets.token_hex(4)}.tmp"
        with reported(self._directory, "training state"):
            try:
                temp.mkdir(parents=True)
                yield temp
                if self._sync:
                    for file in temp.rglob("*"):
                        if file.is_file():
                            sync_file(file)
                # A state of the same name may come from an uncommitted attempt, and differ below
                # the precision of the published dtype, or in its samples.
                old = temp.with_suffix(".old")
                with contextlib.suppress(FileNotFoundError):
                    target.rename(old)
                temp.rename(target)
                shutil.rmtree(old, ignore_errors=True)
                if self._sync:
                    sync_directory(self._directory)
            finally:
                shutil.rmtree(temp, ignore_errors=True)

    def _is(self, path: Path, meta: dict[str, Any]) -> bool:
        """Return whether `path` holds exactly what `meta` says."""
        try:
            return bool(json.loads((path / "state.json").read_text()) == meta)
        except (OSError, ValueError):
            return False

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            if match := _NAME.fullmatch(path.name):
                yield int(match[1]), match[2], path

    def _read(self, path: Path, version: int, checksum: str) -> KeptState:
        with _usable(path, version):
            meta = _meta(path)
            names = ["random"] if "parts" in meta else ["random", "weights", "optimizer"]
            # Memory-mapped, so that bytes that are not read take no memory.
            parts = {name: load_file(path / f"{name}.safetensors") for name in names}
            if any(meta[name] != checksum_of(tensors) for name, tensors in parts.items()):
                raise ValueError("its bytes do not match their checksums")
            if "parts" in meta and not _are(path, meta["parts"]):
                raise ValueError("its bytes do not match their checksums")
            frontier = _frontier(meta)
            if meta["version"] != version or (checksum and meta["checksum"] != checksum):
                raise ValueError("it holds another version than its name says")

        def read() -> tuple[Tensors, Moments]:
            if "parts" in meta:
                return _joined(path, version)
            return parts["weights"], parts["optimizer"]

        return KeptState(version, meta["checksum"], parts["random"], frontier, path, read)


@contextlib.contextmanager
def _usable(path: Path, version: int) -> Iterator[None]:
    """Context that turns errors of reading the state in `path` into DataLoss ("state_corrupt")."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataLoss(
            f"training state {path} cannot be used: {error}",
            kind="state_corrupt",
            field="version",
            value=version,
            remedy="Restore the directory from a copy and resume the job; or begin a new one "
            "with the newest checkpoint as its policy's `model.path`.",
        ) from error


def _meta(path: Path) -> dict[str, Any]:
    """Return what `state.json` says. Raises OSError, ValueError, KeyError."""
    meta: dict[str, Any] = json.loads((path / "state.json").read_text())
    if meta["format"] != FORMAT:
        raise ValueError(f"its format {meta['format']} is of another version of Troupe")
    return meta


def _frontier(meta: Mapping[str, Any]) -> Frontier:
    digest = meta["samples_digest"]
    return Frontier(meta["step"], None if digest is None else int(digest, 16))


def _are(path: Path, files: Mapping[str, str]) -> bool:
    """Return whether the files of a gang's ranks have these checksums."""
    # Imported lazily: slow, and needed for gangs only.
    from services.trainer.gang.sharded_state import file_checksum

    return all(file_checksum(path / name) == checksum for name, checksum in files.items())


def _joined(path: Path, version: int) -> tuple[Tensors, Moments]:
    """Read the weights and moments that a gang wrote in shards. Raises DataLoss."""
    # Imported lazily: slow, and needed for gangs only.
    from services.trainer.gang.sharded_state import read_whole, split

    with _usable(path, version):
        return split(read_whole(path))
