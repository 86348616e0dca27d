"""`Transfer`: stores and fetches named tensors by key, on any host."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer import blob, segments
from troupe.transfer.arguments import (
    check_checksum,
    check_key,
    deadline_in,
    metadata_of,
    peers_in,
    roots_in,
)
from troupe.transfer.blob import Manifest
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.deferred import DeferredTensors
from troupe.transfer.errors import Corrupt, KeyNotFound, StorageFull, TransferTimeout
from troupe.transfer.in_place import ModelDirectories, ModelDirectory
from troupe.transfer.segments import Mappings, SegmentStore, unusable
from troupe.transfer.sources import (
    FetchSource,
    StateRequest,
    default_root,
    described_room,
    from_first,
    in_memory,
    near,
)


@dataclass(frozen=True)
class FetchRequest:
    """The validated arguments of `get` and `fetch`. Raises InvalidArgument, InvalidKey."""

    key: str
    timeout: float
    expected: str | None = None
    base: str | None = None
    # On the monotonic clock; None for a caller that does not wait.
    deadline: float | None = field(init=False)

    def __post_init__(self) -> None:
        check_key(self.key)
        check_checksum(self.expected)
        if self.base:
            check_key(self.base)
        object.__setattr__(self, "deadline", deadline_in(self.timeout))

    @property
    def wanted(self) -> StateRequest:
        """The request to peers."""
        return StateRequest(self.key, self.deadline or 0.0, self.expected, self.base)


log = logging.getLogger(__name__)

_Tensors = dict[str, torch.Tensor]
# A key appears at most once per step: polling at this rate costs nothing and adds no delay.
_POLL_SECONDS = 0.01
# Seconds until peers that do not have a state yet are asked again.
_ASK_PEERS_SECONDS = 0.25


class Transfer:
    """A store of states, which are tensors by name; callers never name their location.

    A state is a file under `root`, normally in shared memory, where readers map it without a copy.
    If shared memory is full, or `root` is on a disk, plain files are used, with a warning. A key
    appears when all of its bytes are stored; earlier readers keep their content after a
    replacement.

    Methods block; from asyncio, call them in a thread. Thread-safe.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        fallback: Path | None = None,
        peers: Sequence[FetchSource] = (),
    ) -> None:
        """`root` defaults to `default_root()`, `fallback` to a directory for temporary files.

        Without an explicit `root` both defaults apply; with one, there is no fallback unless it is
        given, since all processes must see it.

        `peers` (`troupe.transfer.remote`) are asked, in order, for states that are not on this
        host. Fetched states are kept here, readable by all processes, until a newer version is
        fetched or they are deleted.

        Raises InvalidArgument for a root that is not a directory, or a peer that cannot fetch.
        """
        if root is None:
            root = default_root()
            fallback = fallback or Path(tempfile.gettempdir()) / f"troupe-transfer-{os.getuid()}"
        self._peers = peers_in(peers)
        self._segments = SegmentStore(roots_in(root, fallback))
        self.roots = self._segments.roots
        # States that this process wrote: key -> identity of the file.
        self._own: dict[str, tuple[int, int]] = {}
        # Transport of the last set or get (see `Choice`).
        self.last_transport = ""
        self.counters = TransferCounters()
        self._mappings = Mappings()
        self._directories = {root: ModelDirectories(root) for root in self.roots}
        if not in_memory(self.roots[0]):
            log.warning("%s is not in shared memory: states move through files", self.roots[0])

    def set(
        self,
        key: str,
        state: Any,
        *,
        metadata: Mapping[str, str] | None = None,
        base: str | None = None,
    ) -> Manifest:
        """Store a copy of `state` under `key`, replacing the former content atomically.

        `state`: tensors by name; `DeferredTensors` are in memory one group at a time. `base`: a key
        with mostly equal content; hosts that have it fetch only the differences.

        Raises InvalidKey, InvalidArgument, FailedPrecondition of kind "transfer_root_unusable", or
        StorageFull with the former content intact.
        """
        paths, about = self._segments.paths(key), metadata_of(metadata)  # before hashing anything
        if base is not None:
            self._segments.paths(base)
        tensors = state if isinstance(state, DeferredTensors) else blob.named_tensors(state)
        draft, views = blob.draft(key, tensors, about, base=base or "")
        failure: OSError | None = None
        for root, path in zip(self.roots, paths, strict=True):
            try:
                manifest = self._write(root, path, draft, views)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise unusable(root, error) from error
                failure = error.with_traceback(None)  # its frames keep the tensors
                log.warning("%s: no room for %d bytes in %s", key, draft.num_bytes, root)
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted again
                self._own[key] = blob.identity(path)
            segments.clear(path)
            self._note(root, "set", manifest)
            # The newest content must be the only one that readers can find.
            for other in set(paths) - {path}:
                other.unlink(missing_ok=True)
            return manifest
        raise StorageFull(
            key, f"no room for {draft.num_bytes} bytes in {self.roots[0]}"
        ) from failure

    def get(
        self,
        key: str,
        *,
        verify: bool = True,
        expected_checksum: str | None = None,
        timeout: float = 0.0,
        base: str | None = None,
        lasting: bool = False,
    ) -> tuple[_Tensors, Manifest]:
        """Return the tensors under `key` by name, waiting up to `timeout` seconds for it to appear.

        They are views of shared memory (copy-on-write, without a copy). `base`: a key of this host
        that the state may resemble; only differences are fetched from another host. `lasting`: use
        a mapping that stays open, for a caller that only copies the tensors and never writes to
        them.

        Raises KeyNotFound (TransferTimeout if a timeout was given), Corrupt, InvalidArgument; with
        peers also Unavailable and StorageFull.
        """
        request = FetchRequest(key, timeout, expected_checksum, base)
        try:
            return self._read(request, verify=verify, lasting=lasting)
        except Corrupt:
            # This host's copy was damaged, but another host may have a good one.
            if not self._segments.damaged(key) or not self._peers:
                raise
            return self._read(request, verify=verify, lasting=lasting)

    def fetch(
        self,
        key: str,
        *,
        expected_checksum: str | None = None,
        timeout: float = 0.0,
        base: str | None = None,
    ) -> tuple[Manifest, Choice]:
        """Ensure that `key` is on this host, fetching it if necessary, without mapping it.

        Raises the errors of `get`.
        """
        path, fetched = self._find(FetchRequest(key, timeout, expected_checksum, base))
        manifest = self._segments.manifest(key)
        if fetched is not None:
            self.counters.moved(fetched, manifest.num_bytes)
        return manifest, fetched or Choice("get", *near(path, self.roots))

    def manifest(self, key: str) -> Manifest:
        """Return the manifest of `key` on this host. Raises KeyNotFound, Corrupt."""
        return self._segments.manifest(key)

    def opened(self, key: str) -> tuple[Manifest, int, BinaryIO]:
        """Manifest, start of the tensors, and the file of `key`, which is not filled again while it
        is open. Not verified. Raises KeyNotFound, Corrupt."""
        return self._segments.opened(key)

    def model_directory(
        self, key: str, files: Mapping[str, bytes], *, expected_checksum: str
    ) -> ModelDirectory:
        """Return a directory in which other processes of this host read `key` in place as
        `model.safetensors`, together with `files`. The state is kept until the directory is closed,
        even if the key is deleted.

        The state is not verified: `get` does that. Raises KeyNotFound, Corrupt for different
        content, and OSError if the file system has no hard links or a tensor is stored with
        Troupe's own codec.
        """
        path = self._segments.path(key)
        manifest, _, file = self.opened(key)
        with file:
            if manifest.checksum != expected_checksum:
                raise Corrupt(key, f"holds {manifest.checksum}, expected {expected_checksum}")
            if any(entry.codec != blob.RAW for entry in manifest.entries):
                raise OSError(errno.ENOTSUP, "a tensor has Troupe's own codec")
            root = next(root for root in self.roots if path.is_relative_to(root))
            try:
                return self._directories[root].make(path, file, files)
            except FileNotFoundError:
                raise KeyNotFound(key, "deleted while being read") from None

    def exists(self, key: str) -> bool:
        """Return whether a state is stored under `key` on this host."""
        return self._segments.holds(key)

    def delete(self, key: str) -> bool:
        """Delete `key` on this host; return False if there was none. Tensors returned earlier stay
        valid."""
        self._own.pop(key, None)
        return self._segments.delete(key)

    def forget_fetched(self, prefix: str) -> int:
        """Delete states under `prefix` that any process fetched from other hosts, and return their
        number. States that were set on this host are kept."""
        return sum(self.delete(key) for key, _ in list(self._segments.fetched(prefix)))

    def clear(self, prefix: str) -> int:
        """Delete all states of this host under `prefix`, and return their number. Tensors returned
        earlier stay valid."""
        return sum(self.delete(key) for key in self.keys(prefix))

    def keys(self, prefix: str = "") -> list[str]:
        """Return all keys of this host that start with `prefix`, sorted."""
        return self._segments.keys(prefix)

    def sweep(self) -> None:
        """Free idle mappings and pooled files, and half-filled files of dead processes."""
        self._mappings.sweep()
        self._segments.sweep()
        for directories in self._directories.values():
            directories.sweep()

    def close(self) -> None:
        """Free the mappings and pooled files of this process. States are kept."""
        self._mappings.sweep(0.0)
        for pool in self._segments.pools.values():
            pool.close()
        for directories in self._directories.values():
            directories.close()

    def _write(self, root: Path, path: Path, draft: Manifest, views: list[blob.Bytes]) -> Manifest:
        segments.sweep(path.parent)
        pool = self._segments.pools[root] if in_memory(root) else None
        try:
            return segments.write(path, draft, views, pool)
        except OSError as error:
            if pool is None or error.errno != errno.ENOSPC:
                raise
        # The pooled files occupy the room that this state needs.
        pool.close()
        pool.sweep(0)
        return segments.write(path, draft, views)

    def _read(
        self, request: FetchRequest, *, verify: bool, lasting: bool
    ) -> tuple[_Tensors, Manifest]:
        """Map and verify a state."""
        key = request.key
        path, fetched = self._find(request)
        try:
            identity = blob.identity(path)
            read = self._mappings.read if lasting else blob.read
            state = read(path)
            manifest, identity = state.manifest, state.identity
            if manifest.key != key:
                raise ValueError(f"contains the state '{manifest.key}'")
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            segments.mark(path, "damaged", identity=identity)
            raise Corrupt(key, str(error)) from error
        if request.expected and manifest.checksum != request.expected:
            raise Corrupt(key, f"holds {manifest.checksum}, expected {request.expected}")
        own = self._own.get(key) == identity
        # A process hashed its own bytes while copying them, and fetched states were verified.
        if verify and not own and fetched is None:
            try:
                self._segments.verify(path, state, request.deadline)
            except Corrupt:
                segments.mark(path, "damaged", identity=identity)
                raise
        self._note(path, "get", manifest, own=own, fetched=fetched)
        return state.tensors(), manifest

    def _find(self, request: FetchRequest) -> tuple[Path, Choice | None]:
        """Return the state's path, and its transport if it was just fetched."""
        ask_peers_at, key, deadline = 0.0, request.key, request.deadline
        while True:
            missing: TroupeError
            try:
                return self._at_hand(request), None
            except (KeyNotFound, Corrupt) as error:
                if isinstance(error, Corrupt) and not self._peers:
                    raise
                # Another host may have the content that is wanted. (Without the traceback, whose
                # frames would keep the tensors and the lease of their file in a cycle.)
                missing = error.with_traceback(None)
            if self._peers and time.monotonic() >= ask_peers_at:
                try:
                    fetched = from_first(self._peers, request.wanted, self.roots, self.counters)
                    self._own.pop(key, None)
                    return fetched.path, fetched.choice
                except (KeyNotFound, Unavailable) as error:
                    missing = (
                        missing if isinstance(missing, Corrupt) else error.with_traceback(None)
                    )
                ask_peers_at = time.monotonic() + _ASK_PEERS_SECONDS
            if deadline is None or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        if deadline is not None and not isinstance(missing, Corrupt):
            raise TransferTimeout(
                key, f"did not appear within {request.timeout:g} s: {missing.message}"
            ) from missing
        try:
            raise missing
        finally:
            del missing  # else a reference cycle that keeps the callers' frames

    def _at_hand(self, request: FetchRequest) -> Path:
        """Return the state's path on this host. Raises KeyNotFound; where there are peers to ask,
        Corrupt for a damaged file or another content."""
        key, expected = request.key, request.expected
        path = self._segments.path(key)
        if self._peers and self._segments.damaged(key):
            raise Corrupt(key, "was found damaged here")
        if self._peers and expected and (found := self.manifest(key).checksum) != expected:
            raise Corrupt(key, f"holds {found}, expected {expected}")
        return path

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
        else:
            choice = Choice(action, *near(path, self.roots))
        self.last_transport = choice.transport
        self.counters.moved(choice, manifest.num_bytes)
        # For a root on a disk the warning came when it was opened.
        if choice.reason == "shared_memory_full":
            log.warning(
                "%s %s: its %d MiB lie in a file: %s",
                *(action, manifest.key, manifest.num_bytes >> 20, described_room(self.roots[0])),
            )
            return
        words = choice.reason.replace("_", " ")
        log.debug("%s %s: %s (%s)", action, manifest.key, choice.transport, words)
