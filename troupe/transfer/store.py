"""`Transfer`: set and get trees of tensors by key, wherever they are."""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer import blob
from troupe.transfer.checksum import dtype_name
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import (
    Corrupt,
    InvalidKey,
    KeyNotFound,
    LayoutMismatch,
    StorageFull,
    TransferTimeout,
    VersionWentBackwards,
)
from troupe.transfer.manifest import Manifest, version_in
from troupe.transfer.places import Source, default_root, in_memory

log = logging.getLogger(__name__)

_SEGMENT = re.compile(r"^[A-Za-z0-9_@=-][A-Za-z0-9._@=-]*$")
# A key appears at most once per step: looking this often costs nothing and delays nobody.
_POLL_SECONDS = 0.01
# A peer that does not have it yet is asked again so often.
_ASK_PEERS_SECONDS = 0.25


class Transfer:
    """Set and get of named tensors; the caller never says where they are.

    A state is a file under `root`: in shared memory normally, readers map it without a copy.
    When shared memory is full, or `root` is on a disk, plain files are used, with a warning.
    Nothing is visible under a key before all of it is there; replacing a key leaves earlier
    readers their content.

    Blocking; from asyncio call it in a thread. Safe to use from several threads.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        fallback: Path | None = None,
        peers: Sequence[Source] = (),
    ) -> None:
        """`root` defaults to `default_root()`, `fallback` to a directory for temporary files.

        Without an explicit `root` both defaults apply; with one, there is no fallback unless
        it is given, since all processes have to see it.

        `peers` (`troupe.transfer.remote.Peer`) are asked, in order, for what is not on this host.
        What they have is kept here, readable by all processes, until a newer version of it is
        fetched or it is deleted.
        """
        if root is None:
            root = default_root()
            fallback = fallback or Path(tempfile.gettempdir()) / f"troupe-transfer-{os.getuid()}"
        self.roots = tuple(Path(r).absolute() for r in (root, fallback) if r is not None)
        for directory in self.roots[:1]:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What this process wrote: key -> identity of the file.
        self._own: dict[str, tuple[int, int]] = {}
        self._peers = tuple(peers)
        # Keys that this process fetched from peers.
        self._fetched: set[str] = set()
        # Transport that the last set or get used: in_process, shared_memory or file.
        self.last_transport = ""
        self.counters = TransferCounters()
        if not in_memory(self.roots[0]):
            log.warning("%s is not in shared memory: state moves through files", self.roots[0])

    def set(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Store a copy of `tensors` under `key`, replacing what was there, all at once.

        Raises InvalidKey, or StorageFull with the former content intact.
        """
        self._paths(key)  # before hashing anything
        manifest, views = blob.layout(key, tensors, metadata or {})
        failure: OSError | None = None
        for root in self.roots:
            path = root / key
            try:
                if path.parent.is_dir():
                    blob.sweep(path.parent)
                blob.write(path, manifest, views)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                failure = error
                log.warning("%s: no room for %d bytes in %s", key, manifest.num_bytes, root)
                continue
            self._own[key] = blob.identity(path)
            self._note(root, "set", manifest)
            # The newest content must be the only one that readers can find.
            for other in self.roots:
                if other != root:
                    (other / key).unlink(missing_ok=True)
            return manifest
        raise StorageFull(
            key, f"no room for {manifest.num_bytes} bytes in {self.roots[0]}"
        ) from failure

    def get(
        self,
        key: str,
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        verify: bool = True,
        expected_checksum: str | None = None,
        timeout: float = 0.0,
    ) -> tuple[dict[str, torch.Tensor], Manifest]:
        """The tensors under `key`, waiting up to `timeout` seconds for it to appear.

        Without `into` the tensors lie over shared memory (copy-on-write, no copy made). With
        `into` they are copied into its tensors, whose names, shapes and dtypes must be the
        same, and only after everything has been verified: never half applied.

        Raises KeyNotFound (TransferTimeout when a timeout was given), Corrupt,
        LayoutMismatch; with peers also Unavailable and StorageFull.
        """
        deadline = time.monotonic() + timeout
        path, fetched = self._find(key, timeout, expected_checksum)
        try:
            manifest, tensors, identity = blob.read(path)
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error
        if manifest.key != key:
            raise Corrupt(key, f"holds what was set as '{manifest.key}'")
        if expected_checksum and manifest.checksum != expected_checksum:
            raise Corrupt(key, f"holds {manifest.checksum}, expected {expected_checksum}")
        if into is not None:
            _check_layout(key, manifest, into)
        own = self._own.get(key) == identity
        if verify and fetched is None:
            for bad in blob.damaged(manifest, tensors):
                if bad is not None:
                    raise Corrupt(key, f"the bytes of '{bad}' do not match their checksum")
                if timeout and time.monotonic() > deadline:
                    raise TransferTimeout(key, f"not verified within {timeout:g} s")
        self._note(path, "get", manifest, own=own, fetched=fetched)
        if into is None:
            return tensors, manifest
        with torch.no_grad():
            for name, target in into.items():
                target.copy_(tensors[name])
        return dict(into), manifest

    def manifest(self, key: str) -> Manifest:
        """What is stored here under `key`, without its tensors. Raises KeyNotFound, Corrupt."""
        try:
            return blob.read_manifest(self._here(key))
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error

    def stored_bytes(self, key: str) -> tuple[Manifest, memoryview]:
        """Manifest and data section of `key`, mapped, not verified. Raises KeyNotFound, Corrupt."""
        try:
            return blob.read_bytes(self._here(key))
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error

    def newest(self, stem: str, *, at_least: int = 0) -> Manifest:
        """The highest version under `stem` ("job/policy/weights"), for who has seen `at_least`.

        Raises KeyNotFound, Corrupt, or VersionWentBackwards when all there is is older.
        """
        prefix = f"{stem}@"
        versions = [k.removeprefix(prefix) for k in self.keys(prefix)]
        found = max((int(v) for v in versions if v.isdigit()), default=None)
        if found is None:
            raise KeyNotFound(stem, f"no version of it is stored in {self.roots[0]}")
        if found < at_least:
            raise VersionWentBackwards(
                f"{prefix}{found}", f"is the newest version, but {at_least} was there before"
            )
        return self.manifest(f"{prefix}{found}")

    def exists(self, key: str) -> bool:
        """Whether something is stored under `key`."""
        return any(path.is_file() for path in self._paths(key))

    def delete(self, key: str) -> bool:
        """Forget `key`; False when there was nothing. Tensors already got stay valid."""
        self._own.pop(key, None)
        self._fetched.discard(key)
        existed = False
        for root, path in zip(self.roots, self._paths(key), strict=True):
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
        return existed

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, sorted."""
        found = set()
        for root in self.roots:
            for path in root.rglob("*"):
                key = path.relative_to(root).as_posix()
                if key.startswith(prefix) and path.is_file() and not path.name.startswith("."):
                    found.add(key)
        return sorted(found)

    def watch(
        self, prefix: str, *, timeout: float, known: Collection[str] = ()
    ) -> Iterator[Manifest]:
        """Manifests of keys with `prefix`, each once, as they appear; ends after `timeout` s."""
        seen = set(known)
        deadline = time.monotonic() + timeout
        while True:
            for key in self.keys(prefix):
                if key not in seen:
                    seen.add(key)
                    try:
                        manifest = self.manifest(key)
                    except KeyNotFound:
                        continue
                    yield manifest
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _paths(self, key: str) -> list[Path]:
        segments = key.split("/")
        if not all(_SEGMENT.match(segment) for segment in segments):
            raise InvalidKey(key, "is not a key")
        return [root.joinpath(*segments) for root in self.roots]

    def _here(self, key: str) -> Path:
        for path in self._paths(key):
            if path.is_file():
                return path
        raise KeyNotFound(key, f"nothing is stored under it in {self.roots[0]}")

    def _find(self, key: str, timeout: float, expected: str | None) -> tuple[Path, Choice | None]:
        """Where `key` is; with the choice when a peer has just put it there."""
        deadline = time.monotonic() + timeout
        ask_peers_at = 0.0
        while True:
            missing: TroupeError
            try:
                path = self._here(key)
                # What was fetched before may have been replaced at its owner since.
                if key not in self._fetched or expected in (None, self.manifest(key).checksum):
                    return path, None
            except KeyNotFound as error:
                missing = error
            if self._peers and time.monotonic() >= ask_peers_at:
                try:
                    return self._fetch(key, deadline if timeout else None)
                except (KeyNotFound, Unavailable) as error:
                    missing = error
                ask_peers_at = time.monotonic() + _ASK_PEERS_SECONDS
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        if timeout:
            raise TransferTimeout(
                key, f"did not appear within {timeout:g} s: {missing.message}"
            ) from missing
        raise missing

    def _fetch(self, key: str, deadline: float | None) -> tuple[Path, Choice]:
        """From the first peer that has it. Raises KeyNotFound, or Unavailable when one is."""
        away: Unavailable | None = None
        for peer in self._peers:
            until = time.monotonic() + peer.deadline_seconds if deadline is None else deadline
            try:
                fetched = peer.fetch(key, self.roots, self.counters, until)
            except KeyNotFound:
                continue
            except Unavailable as error:
                log.warning("%s: %s", key, error.message)
                away = error
                continue
            self._own.pop(key, None)
            self._forget_older(key)
            self._fetched.add(key)
            return fetched.path, fetched.choice
        if away is not None:
            raise away
        addresses = ", ".join(peer.address for peer in self._peers)
        raise KeyNotFound(key, f"neither here nor at {addresses}")

    def _forget_older(self, key: str) -> None:
        """Free the fetched versions before `key`; who has them mapped keeps them."""
        stem, version = key.partition("@")[0], version_in(key)
        for other in list(self._fetched):
            if other.partition("@")[0] == stem and version_in(other) < version:
                self._fetched.discard(other)
                self.delete(other)

    def _note(
        self,
        path: Path,
        action: str,
        manifest: Manifest,
        *,
        own: bool = False,
        fetched: Choice | None = None,
    ) -> None:
        if fetched is not None:
            choice = fetched
        elif own:
            choice = Choice(action, "in_process", "written_here")
        elif in_memory(path):
            choice = Choice(action, "shared_memory", "same_host")
        elif in_memory(self.roots[0]):
            choice = Choice(action, "file", "shared_memory_full")
        else:
            choice = Choice(action, "file", "root_on_disk")
        self.last_transport = choice.transport
        self.counters.moved(choice, manifest.num_bytes)
        # A root on a disk was warned of once, when it was opened.
        level = logging.WARNING if choice.reason == "shared_memory_full" else logging.DEBUG
        words = choice.reason.replace("_", " ")
        log.log(level, "%s %s: %s (%s)", action, manifest.key, choice.transport, words)


def _check_layout(key: str, manifest: Manifest, into: Mapping[str, torch.Tensor]) -> None:
    stored = {entry.name: entry for entry in manifest.entries}
    if stored.keys() != into.keys():
        missing = sorted(into.keys() - stored.keys())[:3]
        extra = sorted(stored.keys() - into.keys())[:3]
        raise LayoutMismatch(key, f"names differ: missing {missing}, unexpected {extra}")
    for name, target in into.items():
        entry = stored[name]
        if entry.shape != tuple(target.shape) or entry.dtype != dtype_name(target.dtype):
            have = f"{entry.dtype}{list(entry.shape)}"
            want = f"{dtype_name(target.dtype)}{list(target.shape)}"
            raise LayoutMismatch(key, f"'{name}' is stored as {have}, wanted {want}")
