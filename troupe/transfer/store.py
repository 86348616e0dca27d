"""`Transfer`: named tensors set and got by key, wherever they are."""

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
from troupe.transfer import blob, shelf
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
from troupe.transfer.places import Source, Wanted, default_root, from_first, in_memory, near
from troupe.transfer.shelf import Mappings, Shelf, unusable


@dataclass(frozen=True)
class FetchRequest:
    """The arguments, valid, and what follows from them. Raises InvalidArgument, InvalidKey."""

    key: str
    timeout: float
    expected: str | None = None
    base: str | None = None
    # Of the monotonic clock; None for who does not wait.
    deadline: float | None = field(init=False)

    def __post_init__(self) -> None:
        check_key(self.key)
        check_checksum(self.expected)
        if self.base:
            check_key(self.base)
        object.__setattr__(self, "deadline", deadline_in(self.timeout))

    @property
    def wanted(self) -> Wanted:
        """Of a peer; a deadline of 0 is its own."""
        return Wanted(self.key, self.deadline or 0.0, self.expected, self.base)


log = logging.getLogger(__name__)

_Tensors = dict[str, torch.Tensor]
# A key appears at most once per step: looking this often costs nothing and delays nobody.
_POLL_SECONDS = 0.01
# A peer that does not have it yet is asked again so often.
_ASK_PEERS_SECONDS = 0.25


class Transfer:
    """Set and get of tensors by name; the caller never says where they are.

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

        `peers` (`troupe.transfer.remote`) are asked, in order, for what is not on this host. It is
        kept here, readable by all processes, until a newer version is fetched or it is deleted.

        Raises InvalidArgument for what is no directory, or nobody to ask.
        """
        if root is None:
            root = default_root()
            fallback = fallback or Path(tempfile.gettempdir()) / f"troupe-transfer-{os.getuid()}"
        self._peers = peers_in(peers)
        self._shelf = Shelf(roots_in(root, fallback))
        self.roots = self._shelf.roots
        # What this process wrote: key -> identity of the file.
        self._own: dict[str, tuple[int, int]] = {}
        # That the last set or get used: in_process, shared_memory or file.
        self.last_transport = ""
        self.counters = TransferCounters()
        self._mappings = Mappings()
        if not in_memory(self.roots[0]):
            log.warning("%s is not in shared memory: state moves through files", self.roots[0])

    def set(
        self,
        key: str,
        state: Any,
        *,
        metadata: Mapping[str, str] | None = None,
        base: str | None = None,
    ) -> Manifest:
        """Store a copy of `state` under `key`, replacing what was there, all at once.

        `state`: tensors by name; of `DeferredTensors` a group at a time is in memory. `base`: a
        key whose content most of this one equals; hosts that have it fetch only what differs.

        Raises InvalidKey, InvalidArgument, FailedPrecondition of kind "transfer_root_unusable", or
        StorageFull with the former content intact.
        """
        paths, about = self._shelf.paths(key), metadata_of(metadata)  # before hashing anything
        if base is not None:
            self._shelf.paths(base)
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
            shelf.clear(path)
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
        """The tensors under `key` by name, waiting up to `timeout` seconds for it to appear.

        They lie over shared memory (copy-on-write, no copy made). `base`: a key of this host that
        the state may resemble; from another host only what differs from that comes. `lasting`: for
        a caller that only copies the tensors and never writes to them, through a mapping that stays
        open.

        Raises KeyNotFound (TransferTimeout when a timeout was given), Corrupt, InvalidArgument;
        with peers also Unavailable and StorageFull.
        """
        request = FetchRequest(key, timeout, expected_checksum, base)
        try:
            return self._read(request, verify=verify, lasting=lasting)
        except Corrupt:
            # The copy of this host was damaged: another host may have a good one.
            if not self._shelf.damaged(key) or not self._peers:
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
        """See that `key` is on this host, without mapping it: a `get` that only brings it near.

        Raises what `get` does.
        """
        path, fetched = self._find(FetchRequest(key, timeout, expected_checksum, base))
        manifest = self._shelf.manifest(key)
        if fetched is not None:
            self.counters.moved(fetched, manifest.num_bytes)
        return manifest, fetched or Choice("get", *near(path, self.roots))

    def manifest(self, key: str) -> Manifest:
        """What is stored here under `key`, without its tensors. Raises KeyNotFound, Corrupt."""
        return self._shelf.manifest(key)

    def opened(self, key: str) -> tuple[Manifest, int, BinaryIO]:
        """Manifest, start of the tensors, and the file of `key`, which nobody fills again while it
        is open. Not verified. Raises KeyNotFound, Corrupt."""
        return self._shelf.opened(key)

    def exists(self, key: str) -> bool:
        """Whether something is stored under `key`, on this host."""
        return self._shelf.holds(key)

    def delete(self, key: str) -> bool:
        """Forget `key`; False when there was nothing. Tensors already got stay valid."""
        self._own.pop(key, None)
        return self._shelf.delete(key)

    def forget_fetched(self, prefix: str) -> int:
        """Delete what came from other hosts under `prefix`, whichever process brought it; how many
        states that were. What was set on this host stays."""
        return sum(self.delete(key) for key, _ in list(self._shelf.fetched(prefix)))

    def clear(self, prefix: str) -> int:
        """Delete all that this host has under `prefix`, whoever set it; how many states that
        were. Tensors already got stay valid."""
        return sum(self.delete(key) for key in self.keys(prefix))

    def keys(self, prefix: str = "") -> list[str]:
        """All keys of this host that start with `prefix`, sorted."""
        return self._shelf.keys(prefix)

    def sweep(self) -> None:
        """Give back memory that was kept for states to come and that nobody came to use, and what
        died half way left."""
        self._mappings.sweep()
        self._shelf.sweep()

    def close(self) -> None:
        """Give back the memory that was kept for states to come. States stay where they are."""
        self._mappings.sweep(0.0)
        for spares in self._shelf.spares.values():
            spares.close()

    def _write(self, root: Path, path: Path, draft: Manifest, views: list[blob.Bytes]) -> Manifest:
        shelf.sweep(path.parent)
        spares = self._shelf.spares[root] if in_memory(root) else None
        try:
            return shelf.write(path, draft, views, spares)
        except OSError as error:
            if spares is None or error.errno != errno.ENOSPC:
                raise
        # What is kept for later is of more use now.
        spares.close()
        spares.sweep(0)
        return shelf.write(path, draft, views)

    def _read(
        self, request: FetchRequest, *, verify: bool, lasting: bool
    ) -> tuple[_Tensors, Manifest]:
        """Mapped and verified."""
        key = request.key
        path, fetched = self._find(request)
        try:
            identity = blob.identity(path)
            read = self._mappings.read if lasting else blob.read
            manifest, tensors, identity = read(path)
            if manifest.key != key:
                raise ValueError(f"holds what was set as '{manifest.key}'")
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            shelf.mark(path, "damaged", identity=identity)
            raise Corrupt(key, str(error)) from error
        if request.expected and manifest.checksum != request.expected:
            raise Corrupt(key, f"holds {manifest.checksum}, expected {request.expected}")
        own = self._own.get(key) == identity
        # A process hashed its own bytes as it copied them; what was fetched was verified.
        if verify and not own and fetched is None:
            try:
                self._shelf.verify(path, manifest, tensors, identity, request.deadline)
            except Corrupt:
                shelf.mark(path, "damaged", identity=identity)
                raise
        self._note(path, "get", manifest, own=own, fetched=fetched)
        return tensors, manifest

    def _find(self, request: FetchRequest) -> tuple[Path, Choice | None]:
        """Where it is; with the choice when a peer has just put it there."""
        ask_peers_at, key, deadline = 0.0, request.key, request.deadline
        while True:
            missing: TroupeError
            try:
                return self._at_hand(request), None
            except (KeyNotFound, Corrupt) as error:
                if isinstance(error, Corrupt) and not self._peers:
                    raise
                # Another host may have the content that is wanted. (Without the traceback: its
                # frames would keep the tensors, and the lease of their file, in a circle.)
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
            del missing  # again a circle, with the frames of whoever called

    def _at_hand(self, request: FetchRequest) -> Path:
        """Its path here. Raises KeyNotFound; Corrupt for another content where there are peers."""
        key, expected = request.key, request.expected
        path = self._shelf.path(key)
        if self._peers and self._shelf.damaged(key):
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
        # A root on a disk was warned of once, when it was opened.
        level = logging.WARNING if choice.reason == "shared_memory_full" else logging.DEBUG
        words = choice.reason.replace("_", " ")
        log.log(level, "%s %s: %s (%s)", action, manifest.key, choice.transport, words)
