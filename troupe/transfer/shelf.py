"""`Shelf`: the directories of this host in which states lie, by key."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.scratch import is_foreseeable, private_directory
from troupe.transfer import blob, room, sidecar
from troupe.transfer.arguments import (
    SEGMENT,
    check_key,
    check_prefix,
    deadline_in,
    known_in,
    why_no_key,
)
from troupe.transfer.errors import (
    Corrupt,
    KeyNotFound,
    TransferTimeout,
    VersionWentBackwards,
)
from troupe.transfer.manifest import Entry, Manifest, stem_of, version_in
from troupe.transfer.spares import Spares
from troupe.transfer.staging import each

log = logging.getLogger(__name__)

# A key appears at most once per step: looking this often costs nothing and delays nobody.
_POLL_SECONDS = 0.01
# Larger states are verified once per host, and the others of the host believe it.
_MARKED_BYTES = 1 << 20
# Nobody verifies for longer.
_ALONE_SECONDS = 600.0
_UNUSABLE = "transfer_root_unusable"
_ELSEWHERE = "Set TROUPE_TRANSFER_DIR to a directory that this user may write to."


class Shelf:
    """What lies under `roots`, of which the first is preferred. Other processes use them too."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """The first of `roots` is made when it is not there. Raises InvalidArgument when it cannot
        be, and where another user may have made one that is there."""
        self.roots = tuple(Path(root).absolute() for root in roots)
        for root in self.roots:
            try:
                if is_foreseeable(root):
                    private_directory(root)
                elif root == self.roots[0]:
                    root.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise InvalidArgument(
                    f"this directory cannot be used: {error.strerror}",
                    kind=_UNUSABLE,
                    field="root",
                    value=root,
                    remedy=_ELSEWHERE,
                ) from error
        self.spares = {root: Spares(root) for root in self.roots}

    def paths(self, key: str) -> list[Path]:
        """Where `key` may be. Raises InvalidKey."""
        check_key(key)
        return [root / key for root in self.roots]

    def path(self, key: str) -> Path:
        """Where `key` is. Raises InvalidKey, KeyNotFound."""
        for path in self.paths(key):
            if path.is_file():
                return path
        raise KeyNotFound(key, f"nothing is stored under it in {self.roots[0]}")

    def holds(self, key: str, checksum: str | None = None) -> bool:
        """Whether something (of this content) is under `key`."""
        if checksum is None:
            return any(path.is_file() for path in self.paths(key))
        try:
            return self.manifest(key).checksum == checksum and not self.damaged(key)
        except (KeyNotFound, Corrupt):
            return False

    def damaged(self, key: str) -> bool:
        """Whether what is under `key` was found damaged, and not replaced since."""
        return any(sidecar.note(path, "damaged") is not None for path in self.paths(key))

    def manifest(self, key: str) -> Manifest:
        """What is stored under `key`, without its tensors. Raises KeyNotFound, Corrupt."""
        try:
            return blob.read_manifest(self.path(key))
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error

    def opened(self, key: str) -> tuple[Manifest, int, BinaryIO]:
        """Manifest, start of the tensors, and the file of `key`, which nobody fills again while it
        is open. Raises KeyNotFound, Corrupt."""
        try:
            return blob.opened(self.path(key))
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error

    def bytes(self, key: str) -> tuple[Manifest, memoryview]:
        """Manifest and data section of `key`, mapped, not verified. Raises KeyNotFound, Corrupt."""
        try:
            return blob.read_bytes(self.path(key))
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error

    def delete(self, key: str) -> bool:
        """Forget `key`; False when there was nothing. Who has it mapped keeps it."""
        existed = False
        for root, path in zip(self.roots, self.paths(key), strict=True):
            if not path.is_file():
                continue
            sidecar.clear(path)
            try:
                path.unlink()
                existed = True
            except FileNotFoundError:
                continue
            for parent in path.parents:
                if parent == root:
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break
            self.spares[root].trim()
        return existed

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, sorted; of files with other names nothing is said.

        Raises InvalidKey for what is no text."""
        check_prefix(prefix)
        found: set[str] = set()
        # Only the directory that all of them are in, not every job's.
        *directory, _ = prefix.split("/")
        if not all(SEGMENT.fullmatch(segment) for segment in directory):
            return []  # no key does, and what it names may lie outside
        for root in self.roots:
            # (`rglob` fails when a directory goes meanwhile, with the last state in it.)
            for place, below, names in os.walk(root.joinpath(*directory)):
                below[:] = filter(SEGMENT.fullmatch, below)
                names = list(filter(SEGMENT.fullmatch, names))
                keys = (Path(place, name).relative_to(root).as_posix() for name in names)
                found.update(k for k in keys if k.startswith(prefix) and not why_no_key(k))
        return sorted(found)

    def newest(self, stem: str, at_least: int) -> Manifest:
        """See `Transfer.newest`."""
        prefix = f"{stem}@"
        versions = [k.removeprefix(prefix) for k in self.keys(prefix)]
        found = max((v for v in versions if v.isdecimal()), key=int, default=None)
        if found is None:
            raise KeyNotFound(stem, f"no version of it is stored in {self.roots[0]}")
        if int(found) < at_least:
            raise VersionWentBackwards(
                f"{prefix}{found}", f"is the newest version, but {at_least} was there before"
            )
        return self.manifest(f"{prefix}{found}")

    def watch(self, prefix: str, timeout: float, known: Collection[str]) -> Iterator[Manifest]:
        """See `Transfer.watch`."""
        seen = set(known_in(known))
        deadline = deadline_in(timeout) or time.monotonic()
        while True:
            for key in self.keys(prefix):
                if key not in seen:
                    try:
                        manifest = self.manifest(key)
                    except (KeyNotFound, Corrupt) as error:
                        # Who asks for it is told; others may still be good.
                        log.debug("%s is not reported: %s", key, error.message)
                        continue
                    seen.add(key)
                    yield manifest
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)

    def fetched(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Keys whose content came from another host, and the address that it came from."""
        for key in self.keys(prefix):
            for path in self.paths(key):
                if (address := sidecar.note(path, "fetched")) is not None:
                    yield key, address
                    break

    def older(self, key: str) -> list[str]:
        """The versions before `key` that came from other hosts."""
        stem, version = stem_of(key), version_in(key)
        fetched = (other for other, _ in self.fetched(f"{stem}@"))
        return [other for other in fetched if 0 <= version_in(other) < version]

    def sweep(self) -> None:
        """Remove what was left half way, and spares that nobody uses."""
        for root in self.roots:
            for place, below, _ in os.walk(root):
                below[:] = [name for name in below if not name.startswith(".")]
                room.sweep(Path(place))
            self.spares[root].sweep()

    def verify(
        self,
        path: Path,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        identity: tuple[int, int],
        deadline: float | None,
        threads: int,
    ) -> None:
        """See that `tensors`, mapped from the file of `identity` at `path`, hold what was set.

        Large states are verified once per host, until they are written to: who comes second
        waits for the first. Raises Corrupt, TransferTimeout.
        """
        if manifest.num_bytes < _MARKED_BYTES:
            _verify(manifest, tensors, deadline, threads)
            return

        def verified() -> bool:
            # (What was fetched was verified as it came.)
            kinds = ("verified", "fetched")
            return any(sidecar.note(path, kind, identity) is not None for kind in kinds)

        until = time.monotonic() + _ALONE_SECONDS if deadline is None else deadline
        try:
            with sidecar.alone(path, until, unless=verified) as first:
                if first:
                    _verify(manifest, tensors, deadline, threads)
                    sidecar.mark(path, "verified", identity=identity)
        except TimeoutError as error:
            raise TransferTimeout(manifest.key, f"not verified in time: {error}") from None


def unusable(root: Path, error: OSError) -> FailedPrecondition:
    """What to raise where `root` can be written to no more."""
    return FailedPrecondition(
        f"it cannot be written to: {error.strerror}",
        kind=_UNUSABLE,
        field="root",
        value=root,
        remedy=_ELSEWHERE,
    )


def _verify(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    deadline: float | None,
    threads: int,
) -> None:
    key = manifest.key

    def check(entry: Entry) -> None:
        if blob.damaged(entry, tensors[entry.name]):
            raise Corrupt(key, f"the bytes of '{entry.name}' do not match their checksum")
        if deadline is not None and time.monotonic() > deadline:
            raise TransferTimeout(key, "not verified in time")

    each(check, manifest.entries, threads)
