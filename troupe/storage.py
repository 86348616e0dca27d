"""The destinations of files that users ask for: a path on this host, or a URL.

A command that writes a folder or a file writes a draft on this host and publishes it when it is
complete (`Place`). fsspec knows the URLs' file systems (`s3://`, `gs://`, `abfs://`, `sftp://`,
`file://`, ...); most of them need their own package, which fsspec names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from troupe.disks import is_full
from troupe.rpc.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, TroupeError

# A scheme of one letter would be a drive.
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
# User and password in a URL; they are never printed.
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@]+@")


class Place(ABC):
    """A path or URL at which nothing exists yet.

    Errors have the kinds "target_not_vacant", "target_not_writable" and "storage_full", and name
    the field in which the user gave the place.
    """

    def __init__(self, name: str, field: str) -> None:
        self.name = name
        """The place as users see it: the absolute path, or the URL without a password."""
        self.field = field

    @abstractmethod
    def new_folder(self, last: str = "") -> contextlib.AbstractContextManager[Path]:
        """Yield an empty folder of this host, whose files are at the place when the context ends.

        When the context ends with an error, nothing is left there. The file `last` tells readers
        that the folder is complete; if files appear one by one, it comes last. Raises
        `FailedPrecondition` if the place is occupied or not writable, and `ResourceExhausted`.
        """

    @abstractmethod
    def new_file(self) -> contextlib.AbstractContextManager[Path]:
        """Yield the path of a file of this host to write, which is at the place when the context
        ends. Otherwise as `new_folder`."""

    @contextlib.contextmanager
    def draft(self, parent: Path) -> Iterator[Path]:
        """Yield a new folder in `parent`, which is removed at the end. Disk errors become errors of
        this place."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".{os.path.basename(self.name)}-", dir=parent))
        except OSError as error:
            raise self.not_writable(error) from error
        try:
            yield folder
        except FileNotFoundError:  # the source is gone
            raise
        except OSError as error:
            if is_full(error):
                raise ResourceExhausted(
                    f"the disk of {parent} is full; no files were left there",
                    kind="storage_full",
                    field=self.field,
                    value=self.name,
                    remedy="Free space, or choose a place on another disk.",
                ) from error
            raise self.not_writable(error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def occupied(self, what: str) -> FailedPrecondition:
        """Return the error for an occupied place."""
        return FailedPrecondition(
            f"the target {what}.",
            kind="target_not_vacant",
            field=self.field,
            value=self.name,
            remedy="Choose a new place, or remove the existing files.",
        )

    def not_writable(self, error: BaseException) -> FailedPrecondition:
        """Return the error for a place that is not writable."""
        text = (isinstance(error, OSError) and error.strerror) or str(error) or repr(error)
        return FailedPrecondition(
            f"is not writable: {text}",
            kind="target_not_writable",
            field=self.field,
            value=self.name,
            remedy="Choose another place, or check its permissions.",
        )


def is_url(where: str) -> bool:
    """Return whether a text names a place by a URL."""
    return _URL.match(where) is not None


def fetch_folder(url: str, target: Path, field: str, names: Sequence[str] = ()) -> None:
    """Copy the files of a folder at a URL into the new directory `target`, which appears when it is
    complete; `names`: only these files, as far as they exist. Blocking.

    Raises `InvalidArgument` for an unknown file system or an empty folder, `FailedPrecondition`,
    `ResourceExhausted`.
    """
    place = UrlPlace(url, field)
    with LocalPlace(target, field).new_folder() as draft:
        place.download(draft, names)


def place_at(where: str | Path, field: str = "to") -> Place:
    """Return the place that a user names by a path or URL; errors call it `field`.

    Raises `InvalidArgument` for a URL of an unknown file system, and `FailedPrecondition` if the
    file system's package is not installed.
    """
    if isinstance(where, str) and _URL.match(where):
        return UrlPlace(where, field)
    return LocalPlace(Path(where), field)


class LocalPlace(Place):
    """A path of this host. Drafts are in the same directory, and are published by renaming."""

    def __init__(self, path: Path, field: str = "to") -> None:
        self.path = path.expanduser().absolute()
        super().__init__(str(self.path), field)

    @contextlib.contextmanager
    def new_folder(self, last: str = "") -> Iterator[Path]:
        """Yield the draft of a folder; missing folders above it are made."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise self.occupied("exists and is not empty")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.not_writable(error) from error
        with self.draft(self.path.parent) as draft:
            yield draft
            # mkdtemp makes a directory that only its user can read.
            draft.chmod(0o755)
            draft.replace(self.path)

    @contextlib.contextmanager
    def new_file(self) -> Iterator[Path]:
        """Yield the path of the draft; the folder of the file must exist."""
        if self.path.exists():
            raise self.occupied("exists")
        if not self.path.parent.is_dir():
            raise InvalidArgument(
                "its directory does not exist",
                field=self.field,
                value=self.name,
                remedy=f"Make {self.path.parent} first.",
            )
        with self.draft(self.path.parent) as draft:
            yield draft / self.path.name
            (draft / self.path.name).replace(self.path)


class UrlPlace(Place):
    """A URL. Drafts are in this host's directory for temporary files, and are uploaded.

    Most object stores cannot rename: the files of a folder appear one by one.
    """

    def __init__(self, url: str, field: str = "to") -> None:
        super().__init__(_CREDENTIALS.sub("", url), field)
        # Imported here: it takes long, and paths do not need it.
        import fsspec

        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise FailedPrecondition(
                f"the file system of this URL needs a package: {error}",
                kind="file_system_missing",
                field=field,
                value=self.name,
                remedy="Install the package where the command runs.",
            ) from error
        except ValueError as error:
            raise InvalidArgument(
                f"is not a URL of a known file system: {error}",
                field=field,
                value=self.name,
                remedy="Name a path, or a URL such as s3://BUCKET/FOLDER.",
            ) from error
        self._system, self._root = found

    @contextlib.contextmanager
    def new_folder(self, last: str = "") -> Iterator[Path]:
        """Yield the draft of a folder."""
        self._require_vacant()
        with self.draft(Path(tempfile.gettempdir())) as draft:
            yield draft
            files = sorted(path for path in draft.rglob("*") if path.is_file())
            files.sort(key=lambda path: path.name == last)
            self._upload([(p, f"{self._root}/{p.relative_to(draft).as_posix()}") for p in files])

    @contextlib.contextmanager
    def new_file(self) -> Iterator[Path]:
        """Yield the path of the draft."""
        self._require_vacant()
        with self.draft(Path(tempfile.gettempdir())) as draft:
            file = draft / os.path.basename(self._root)
            yield file
            self._upload([(file, self._root)])

    def download(self, folder: Path, names: Sequence[str] = ()) -> None:
        """Copy the files of the folder at this URL into `folder`; `names`: only these. Raises as
        `fetch_folder`."""
        try:
            self._system.invalidate_cache()
            files = {path: path[len(self._root) :].strip("/") for path in self._found()}
            wanted = {path: name for path, name in files.items() if not names or name in names}
            for path, name in wanted.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._system.get_file(path, str(folder / name))
        except OSError as error:
            if is_full(error):
                raise
            raise self._unreadable(error) from error
        except Exception as error:  # every file system raises its own exceptions
            raise self._unreadable(error) from error
        if not wanted:
            raise InvalidArgument(
                "there are no files of a checkpoint",
                kind="checkpoint_not_found",
                field=self.field,
                value=self.name,
                remedy="Name the folder of a checkpoint.",
            )

    def _found(self) -> list[str]:
        try:
            return sorted(self._system.find(self._root))
        except FileNotFoundError:
            return []

    def _unreadable(self, error: BaseException) -> FailedPrecondition:
        return FailedPrecondition(
            f"cannot be read: {type(error).__name__}: {error}",
            kind="source_unreadable",
            field=self.field,
            value=self.name,
            remedy="Check the address, and the credentials in the environment of this process.",
        )

    def _require_vacant(self) -> None:
        try:
            # A store may cache that it found nothing here.
            self._system.invalidate_cache()
            occupied = bool(self._system.find(self._root))
        except FileNotFoundError:
            occupied = False
        except Exception as error:  # every file system raises its own exceptions
            raise self.not_writable(error) from error
        if occupied:
            raise self.occupied("exists and is not empty")

    def _put(self, path: Path, target: str) -> None:
        try:
            self._system.put_file(str(path), target)
        except FileNotFoundError:
            # Make a missing folder, but not a missing bucket: its name may be a mistake.
            if not self._system.exists(target[: target.find("/", 1)]):
                raise
            self._system.makedirs(os.path.dirname(target), exist_ok=True)
            self._system.put_file(str(path), target)

    def _upload(self, files: list[tuple[Path, str]]) -> None:
        """Upload the files in this order; if one fails, delete the earlier ones."""
        sent = []
        try:
            for path, target in files:
                sent.append(target)
                self._put(path, target)
        except BaseException as error:
            for target in sent:
                with contextlib.suppress(Exception):
                    self._system.rm_file(target)
            if isinstance(error, TroupeError) or not isinstance(error, Exception):
                raise
            raise self.not_writable(error) from error
