"""Training state on disk: everything that a step changes, one directory per version.

`{data_dir}/{job}/state/{policy}/v{version}-{checksum}/` with weights.safetensors,
optimizer.safetensors and state.json. A directory appears under its name only when it is
complete; two attempts at one version do not overwrite each other, since the content's
checksum is part of the name, and the ledger says which one counts.

Nothing in a step is random (dropout is off) and the learning rate is a function of the
version, so neither generator nor scheduler has any state to keep.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from services.trainer.disk import reported, sync_directory, sync_file
from troupe.rpc import DataLoss, FailedPrecondition
from troupe.transfer import checksum_of

_NAME = re.compile(r"^v(\d+)-([0-9a-f]{12})$")
FORMAT = 1


@dataclass(frozen=True)
class TrainingState:
    """One version of a policy, ready to go on from."""

    version: int
    # Of the weights as published to engines (the ledger's).
    checksum: str
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


class StateStore:
    """The kept versions of one policy's training state."""

    def __init__(self, root: Path, job_id: str, policy: str, *, sync: bool = True) -> None:
        self._directory = root / job_id / "state" / policy
        self._sync = sync
        self._job, self._policy = job_id, policy

    def versions(self) -> list[int]:
        """Versions that are here, ascending."""
        return sorted({version for version, _, _ in self._entries()})

    def save(self, state: TrainingState) -> Path:
        """Make `state` durable. Raises ResourceExhausted ("storage_full"); what was there stays."""
        target = self._directory / f"v{state.version}-{state.checksum[:12]}"
        if target.is_dir():
            return target
        temp = self._directory / f".{target.name}.{secrets.token_hex(4)}.tmp"
        with reported(self._directory, "training state"):
            try:
                temp.mkdir(parents=True)
                save_file(_plain(state.weights), temp / "weights.safetensors")
                save_file(_plain(state.moments), temp / "optimizer.safetensors")
                meta = {
                    "format": FORMAT,
                    "version": state.version,
                    "checksum": state.checksum,
                    "weights": checksum_of(state.weights),
                    "optimizer": checksum_of(state.moments),
                }
                (temp / "state.json").write_text(json.dumps(meta))
                if self._sync:
                    for file in temp.iterdir():
                        sync_file(file)
                with contextlib.suppress(FileExistsError):
                    temp.rename(target)
                if self._sync:
                    sync_directory(self._directory)
            finally:
                shutil.rmtree(temp, ignore_errors=True)
        return target

    def load(self, version: int, checksum: str = "") -> TrainingState:
        """The state of `version`; with `checksum`, the one that the ledger means.

        Raises FailedPrecondition of kind "state_not_found", or DataLoss of kind
        "state_corrupt".
        """
        for path in self._matching(version, checksum):
            return self._read(path, version, checksum)
        raise FailedPrecondition(
            f"no training state of policy {self._policy} at version {version} "
            f"with checksum {checksum or '(any)'} is kept in {self._directory}",
            kind="state_not_found",
            field="version",
            value=version,
            remedy="Give all trainer workers the same data_dir (TROUPE_DATA_DIR); kept here: "
            f"{', '.join(map(str, self.versions())) or 'none'}.",
        )

    def exists(self, version: int, checksum: str = "") -> bool:
        """Whether `load` would find something."""
        return any(True for _ in self._matching(version, checksum))

    def prune(self, newest: int, keep: int, *, first: bool = False) -> None:
        """Delete versions but the `keep` newest up to `newest`; `first`: keep version 0 too."""
        for version, _, path in list(self._entries()):
            if version > newest - keep or (first and version == 0):
                continue
            shutil.rmtree(path, ignore_errors=True)

    def _matching(self, version: int, checksum: str) -> Iterator[Path]:
        for found, short, path in self._entries():
            if found == version and (not checksum or short == checksum[:12]):
                yield path

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            if match := _NAME.match(path.name):
                yield int(match[1]), match[2], path

    def _read(self, path: Path, version: int, checksum: str) -> TrainingState:
        try:
            meta = json.loads((path / "state.json").read_text())
            weights = load_file(path / "weights.safetensors")
            moments = load_file(path / "optimizer.safetensors")
            sums = (meta["weights"], meta["optimizer"])
            if sums != (checksum_of(weights), checksum_of(moments)):
                raise ValueError("its bytes do not match their checksums")
            if meta["version"] != version or (checksum and meta["checksum"] != checksum):
                raise ValueError("it holds another version than its name says")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DataLoss(
                f"training state {path} cannot be used: {error}",
                kind="state_corrupt",
                field="version",
                value=version,
                remedy="Restore the directory, or resume the job from an older version.",
            ) from error
        return TrainingState(version, meta["checksum"], weights, moments)


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
