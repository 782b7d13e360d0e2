"""A tier in a folder: on a disk, a network file system, or any other mount.

An object is written under a temporary name, synced and renamed, so that it is under its name whole or not at all. What
was written leaves the page cache, because the training needs that memory more than a copy that is read only after a
crash. A temporary file that a killed process left is not listed, and stays until ``lightck gc`` removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.storage.file import sync_folder
from lightck.tiers.decisions import Listing
from lightck.tiers.folder_write import write_file
from lightck.tiers.names import Claim, ManifestName, Writer, parse
from lightck.tiers.store import TEMPORARY_PREFIX, TemporaryFile, is_own

_NO_LINK = (errno.ENOENT, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS)
"""Why a file cannot get a second name: it is gone, or the file system cannot do that."""
_TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]{16}")
_KINDS = ("steps", "data")
"""The folders of a rank."""
_T = TypeVar("_T")
_DEPTH = 4
"""Number of parts of the longest name: claim, rank, kind, file."""


class FolderStore:
    """The objects below one folder. Errors of the system are raised as ``TierError``."""

    n_parallel = 2
    """While the disk is busy with one piece, the next one is read and hashed. More would only cost memory."""
    lists_at_once = True
    knows_sizes = True

    def __init__(self, root: str) -> None:
        """``root``: an absolute path."""
        self.root = root
        self._made: set[str] = set()
        """The folders that this object has made or found."""

    def __str__(self) -> str:
        return self.root

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def has_claim(self) -> bool:
        """Whether the file of a claim lies in the folder. Raises ``TierError``."""
        with self._errors("cannot be listed"), os.scandir(self.root) as found:
            folders = [each.path for each in found if each.is_dir(follow_symlinks=False) and is_own(each.name)]
            return any(os.path.isfile(os.path.join(folder, "claim.json")) for folder in folders)

    def foreign(self) -> str | None:
        """Return the name of something directly in the folder that lightck did not write; None if there is nothing."""
        names = os.listdir(self.root) if self.exists() else []
        return next((name for name in sorted(names) if not is_own(name)), None)

    def refuse_foreign_contents(self) -> None:
        """Raise ``TierError`` for a folder that is no tier, and in which something lies."""
        if os.path.lexists(self.root) and not self.exists():
            raise TierError(
                f"{self.root!r} is no folder, and a tier is one. Nothing was written. Name a folder, or a name in an "
                "existing folder."
            )
        foreign = None if self.listing().claims else self.foreign()
        if foreign is not None:
            raise TierError(
                f"The folder {self.root!r} is not empty, and is no tier: {foreign!r} lies in it. Nothing was written. "
                "Name an empty folder, or one that does not exist yet."
            )

    def listing(self) -> Listing:
        """List the tier. A folder that does not exist is a tier in which nothing lies. Raises ``TierError``."""
        with self._errors("cannot be listed"):
            names = list(self._names(self.root, "", _DEPTH))
            return Listing.of(names, time.time())

    def manifests_of(self, writer: Writer) -> list[ManifestName]:
        """Return the manifests of one writer, in the order of their steps, without a listing of everything. Raises
        ``TierError``."""
        with self._errors("cannot be listed"):
            prefix = f"{writer}/steps"
            found = [parse(f"{prefix}/{each.name}") for each in _entries(os.path.join(self.root, prefix))]
            return sorted(each for each in found if isinstance(each, ManifestName))

    def now(self) -> float:
        """Return the time at which a file would be written now, by the clock of the file system: that of a server may
        differ from ours. Raises ``TierError``."""
        with self._errors("cannot be written"):
            path = os.path.join(self.root, TEMPORARY_PREFIX + secrets.token_hex(8))
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"t")
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                os.unlink(path)

    def _names(self, folder: str, prefix: str, depth: int) -> Iterator[tuple[str, float]]:
        """Yield the names of the files below a folder, with their times. Links are neither followed nor listed."""
        try:
            found = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for each in found:
            name = f"{prefix}{each.name}"
            if each.is_dir(follow_symlinks=False):
                if depth > 1:
                    yield from self._names(each.path, f"{name}/", depth - 1)
            elif each.is_file(follow_symlinks=False) and parse(name) is not None:
                with contextlib.suppress(FileNotFoundError):  # it was removed since
                    yield name, each.stat(follow_symlinks=False).st_mtime

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Store an object durably. ``name`` is one that ``names.py`` makes. Raises ``TierError``."""
        with self._errors("cannot be written"):
            self._write_in_folder_of(name, lambda path: _put(path, data))

    def get(self, name: str, nbytes_max: int) -> bytes:
        """Return an object of at most ``nbytes_max`` bytes. Raises ``FileNotFoundError`` if there is none,
        ``DamagedError`` if it is larger or no file, and ``TierError``."""
        path = self._path_of(name)
        with self._errors(f"cannot give {name}"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as err:
                if err.errno in (errno.ELOOP, errno.ENXIO) or (err.errno == errno.ENOTDIR and self.exists()):
                    raise DamagedError(f"{name} is no file: {err.strerror}") from err
                raise
            try:
                return _read(fd, name, nbytes_max)
            finally:
                os.close(fd)

    def delete(self, name: str) -> None:
        """Remove an object. It is no error if there is none. Raises ``TierError``."""
        with self._errors(f"cannot remove {name}"), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path_of(name))

    def link(self, name: str, new_name: str) -> bool:
        """Give an object a second name, durably. Returns False if there is no such object, or if the file system has no
        hard links. Raises ``TierError``."""
        path = self._path_of(name)
        with self._errors("cannot be written"):
            return self._write_in_folder_of(new_name, lambda new_path: _link(path, new_path))

    def nbytes_of(self, name: str) -> int | None:
        """Return the number of bytes of a file; None if there is none. Raises ``TierError``."""
        with self._errors(f"cannot be asked for {name}"):
            try:
                found = os.stat(self._path_of(name), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def temporary_files(self) -> list[TemporaryFile]:
        """Return the files that were not given their names yet. Links are neither followed nor listed. Raises
        ``TierError``."""
        with self._errors("cannot be listed"):
            return sorted(self._temporary_files(self.root, ""))

    def _temporary_files(self, folder: str, prefix: str) -> Iterator[TemporaryFile]:
        for each in _entries(folder):
            name = f"{prefix}{each.name}"
            if each.is_dir(follow_symlinks=False):
                if _is_own_folder(name):
                    yield from self._temporary_files(each.path, f"{name}/")
            elif each.is_file(follow_symlinks=False) and _TEMPORARY_NAME.fullmatch(each.name):
                with contextlib.suppress(FileNotFoundError):  # it has got its name since
                    found = each.stat(follow_symlinks=False)
                    yield TemporaryFile(name, found.st_mtime, found.st_size)

    def delete_temporary(self, name: str) -> None:
        """Remove a temporary file. It is no error if there is none. Raises ``TierError``."""
        folder, _, last = name.rpartition("/")
        assert _TEMPORARY_NAME.fullmatch(last), "only names that lightck makes become paths"
        assert not folder or _is_own_folder(folder)
        with self._errors(f"cannot remove {name}"), contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, *name.split("/")))

    def empty_claims(self) -> list[tuple[Claim, float]]:
        """Return the claims of which only empty folders are left, each with the time of the last change in them. Raises
        ``TierError``."""
        found = []
        with self._errors("cannot be listed"):
            for each in _entries(self.root):
                claim = parse(f"{each.name}/claim.json")
                if isinstance(claim, Claim) and each.is_dir(follow_symlinks=False):
                    times = list(_times_of_empty_folders(each.path))
                    if times and None not in times:  # else somebody has removed it since
                        found.append((claim, max(time for time in times if time is not None)))
        return sorted(found)

    def delete_folders(self, claim: Claim) -> None:
        """Remove the folders of a claim, as far as they are empty. Raises ``TierError``."""
        with self._errors(f"cannot remove {claim}"):
            _remove_empty_folders(os.path.join(self.root, str(claim)), str(claim))
            self._forget_removed_folders()

    def _path_of(self, name: str) -> str:
        assert parse(name) is not None, "only names that lightck makes become paths"
        return os.path.join(self.root, *name.split("/"))

    def _write_in_folder_of(self, name: str, write: Callable[[str], _T]) -> _T:
        """Make the folder of an object, and call ``write`` with the path of the object. If somebody has removed the
        folder since it was made or found, make it again, but only if the file of its claim is there: it is not
        if nothing is mounted on the folder any more, and then nothing may be written there."""
        path = self._path_of(name)
        try:
            self._make_folder(os.path.dirname(path))
            return write(path)
        except FileNotFoundError:
            claim = os.path.join(self.root, name.split("/")[0], "claim.json")
            if claim == path or not os.path.isfile(claim):
                raise
        self._forget_removed_folders()
        self._make_folder(os.path.dirname(path))
        return write(path)

    def _forget_removed_folders(self) -> None:
        self._made = {each for each in list(self._made) if os.path.isdir(each)}  # other threads add to the set

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it, durably. The folder above the tier's own must exist."""
        if folder in self._made:
            return
        if folder != self.root:
            self._make_folder(os.path.dirname(folder))
        try:
            os.mkdir(folder, 0o700)
            sync_folder(os.path.dirname(folder))
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        self._made.add(folder)

    @contextlib.contextmanager
    def _errors(self, fact: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if fact.startswith("cannot give") and self.exists():
                raise
            lacks = "a folder in it" if self.exists() else "its folder, or the one above it,"
            raise TierError.of(f"The tier {self.root!r} {fact}", errno.ENOENT, f"{lacks} does not exist") from None
        except OSError as err:
            raise TierError.of(f"The tier {self.root!r} {fact}", err.errno, err.strerror) from err


def _put(path: str, data: bytes | memoryview) -> None:
    """Write a file that is under its name whole or not at all."""
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, TEMPORARY_PREFIX + secrets.token_hex(8))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_file(fd, data)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    sync_folder(folder)


def _link(path: str, new_path: str) -> bool:
    """Give a file a second name. Returns False if there is no such file, or if the file system has no hard links."""
    folder = os.path.dirname(new_path)
    try:
        os.link(path, new_path, follow_symlinks=False)
    except OSError as err:
        if err.errno in _NO_LINK and os.path.isdir(folder):
            return False
        raise
    os.utime(new_path, follow_symlinks=False)  # else it looks old, and gc removes it before a manifest names it
    sync_folder(folder)
    return True


def _read(fd: int, name: str, nbytes_max: int) -> bytes:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > nbytes_max:
        raise DamagedError(f"{name} is no file of at most {nbytes_max} bytes")
    data = bytearray()
    while len(data) < found.st_size and (part := os.read(fd, found.st_size - len(data))):
        data += part
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return bytes(data)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what lies in a folder; nothing if there is no such folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_own_folder(name: str) -> bool:
    """Whether lightck gives such a name to a folder below the root of a tier."""
    parts = name.split("/")
    claim, rank, kind, *more = [*parts, *("", "rank-00000-of-00001", "steps")[len(parts) :]]
    return not more and kind in _KINDS and parse(f"{claim}/{rank}/steps/{0:012d}-{0:08x}.json") is not None


def _times_of_empty_folders(folder: str) -> Iterator[float | None]:
    """Yield the times of the last change in a folder and in those below it; None if something else lies in one."""
    with contextlib.suppress(FileNotFoundError):
        yield os.stat(folder, follow_symlinks=False).st_mtime
    for each in _entries(folder):
        if each.is_dir(follow_symlinks=False):
            yield from _times_of_empty_folders(each.path)
        else:
            yield None


def _remove_empty_folders(folder: str, name: str) -> None:
    for each in _entries(folder):
        if each.is_dir(follow_symlinks=False) and _is_own_folder(f"{name}/{each.name}"):
            _remove_empty_folders(each.path, f"{name}/{each.name}")
    try:
        os.rmdir(folder)
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            raise
