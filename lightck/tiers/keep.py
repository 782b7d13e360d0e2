"""Exports for a tier with ``format="safetensors"``, or for ``keep=``, which is deprecated. Once in every
``Keep.every`` updates a committed checkpoint is exported to a folder, in the background.

The checkpoint to export is held in its slot. A separate thread reads and verifies the checkpoint, and writes a
safetensors file that appears complete or not at all. The training thread starts the export, and waits for it only at a
relayout of the pool and at close. The export thread has normal priority, because it runs Python: a thread of idle
priority could hold the interpreter lock while a busy machine gives the thread no processor. Files that this module did
not write are never changed or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from pathlib import Path

from lightck.errors import ExportExistsError, KeepError, StateValueError
from lightck.export import export_chosen
from lightck.export.choice import check_what, choose
from lightck.export.tensors import check_dtype
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.listener import CommitListener
from lightck.pool.reader import PoolReader
from lightck.pool.writer import PoolWriter
from lightck.restore.contents import load_tensor
from lightck.restore.usable import parse
from lightck.stats import Meter
from lightck.tiers.pin import Hold, Holds

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_MARK = "lightck_kept_by"
"""Key in a file's metadata; its value identifies the pool."""
_NUMBER = "lightck_kept_number"
"""Key in a file's metadata; its value grows from one export of the pool to the next. A time would not, if a clock is
set back."""
_DIGITS_MAX = 18
_STALE_SECONDS = 600.0
"""A temporary file to which nothing was written for so long is that of a process that was killed."""
_STACKLEVEL = 7
"""Frames between the warning of ``warn_deprecated`` and the caller of ``attach``."""
_HEADER_NBYTES_MAX = 100_000_000
"""The largest header that the safetensors library reads."""
_CURE = (
    "Exports during a training are safetensors files. Attach without them, and export when you want to: "
    'lightck.export_checkpoint(lightck.recover(pool_path), file, format="torch").'
)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints ``attach(..., keep=...)`` exports, as ``step-00001000.safetensors`` and so on. Deprecated: use
    ``lightck.Tier(..., format="safetensors")``, which writes the same files."""

    _: KW_ONLY
    every: int
    """The number of updates between exports: for ``every=1000`` an export is due at step 1000, 2000 and so on. The
    export writes the first checkpoint that is committed from then on. If the previous export still runs at that commit,
    the new export writes the first checkpoint that is committed after the end of the previous one."""
    to: str | os.PathLike[str]
    """The folder of the files; it is created if its parent exists."""
    last: int | None = None
    """How many exports of this pool stay in the folder: the newest ``last`` exports stay, and older ones are removed.
    None: all stay."""
    what: str = "model"
    """What an export contains: ``"model"``, or ``"all"`` (model, optimizer, state and random states)."""

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"Keep(every={self.every!r}): `every` is a number of updates, an int of at least 1.")
        if self.last is not None and (type(self.last) is not int or self.last < 1):
            raise ValueError(f"Keep(last={self.last!r}): `last` is a number of files, an int of at least 1, or None.")
        check_what(self.what)


def warn_deprecated(keep: Keep) -> None:
    """Warn that ``keep=`` is deprecated, and name the tier that writes the same files."""
    what = "" if keep.what == "model" else f", what={keep.what!r}"
    last = "" if keep.last is None else f", keep_last={keep.last}"
    warnings.warn(
        "attach(keep=lightck.Keep(...)) will be removed in the next release. A tier writes the same files: "
        f'tiers=[lightck.Tier({os.fspath(keep.to)!r}, every={keep.every}{last}, format="safetensors"{what})].',
        FutureWarning,
        stacklevel=_STACKLEVEL,
    )


def refuse_unexportable(keep: Keep, entries: Iterable[Entry]) -> None:
    """Raise ``StateValueError`` if ``keep`` would export a tensor of ``entries`` whose dtype does not exist in
    safetensors. Called before the training, so that no export fails for this reason later."""
    for entry in entries:
        if keep.what == "all" or entry.name.startswith("model/"):
            check_dtype(entry.name, entry.dtype, _CURE)


class Exports(CommitListener):
    """The exports of one session. As a ``CommitListener`` this object starts an export when one is due."""

    def __init__(self, keep: Keep, pool_path: str, meter: Meter, holds: Holds) -> None:
        """Create the folder, and remove temporary files that killed processes left in it. Raises ``KeepError`` if the
        folder cannot be written. The caller holds the lock of the pool at ``pool_path``."""
        self._keep = keep
        self._folder = Path(os.path.abspath(keep.to))
        self._mark = blake2b(os.fsencode(os.path.realpath(pool_path)), digest_size=8).hexdigest()
        """Hash of the pool's path: the metadata of an exported file names its pool by this value."""
        self._meter, self._holds = meter, holds
        self._last_begun = self._newest = 0
        """``_last_begun``: the step of the export that was begun last (0: none was begun). ``_newest``: the newest
        committed step."""
        self._thread: threading.Thread | None = None
        self._hold: Hold | None = None
        """The hold on the checkpoint that is being exported."""
        self._failure: KeepError | None = None
        """Why the last export failed; None if it succeeded, or if none has ended yet."""
        self._is_reported = False
        """Whether ``raise_failure`` has raised ``_failure``."""
        self._n_written: int | None = None
        """The number of the newest export; None: it was not looked for yet."""
        self._pid = os.getpid()
        self._prepare()

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            self._remove_stale()
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as err:
            raise self._folder_error(err) from err

    def _remove_stale(self) -> None:
        """Remove the temporary files that killed processes have left. One to which something was written lately stays:
        a pool with the same path on another host may be exported to it."""
        for path in self._folder.glob(f".lightck-{self._mark}*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # it has got its name, or another process has removed it
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _new_temporary(self) -> Path:
        return self._folder / f".lightck-{self._mark}-{secrets.token_hex(8)}.tmp"

    def _folder_error(self, err: OSError) -> KeepError:
        fact = f"Checkpoints cannot be exported to {str(self._folder)!r}"
        return _error(fact, err.strerror or str(err), err)

    def adopted(self, writer: PoolWriter, step: int) -> None:
        """Find the newest export of this pool in the folder whose step is not larger than ``step``, so that the next
        export is due after it. Raises ``KeepError`` if the folder cannot be read."""
        try:
            self._last_begun = max((at for at, _, _ in self._own() if at <= step), default=0)
        except OSError as err:
            raise self._folder_error(err) from err
        self._newest = step

    @property
    def called_from_own_thread(self) -> bool:
        """Whether the caller runs on the export thread."""
        return self._thread is threading.current_thread()

    # -- on the training thread --------------------------------------------------------------------------

    def committed(self, writer: PoolWriter, step: int) -> None:
        self._newest = step
        if self._thread is not None and self._thread.is_alive():
            return
        self._release_ended()
        if self._is_due(step):
            self._start(writer, step)

    def stop_reading(self) -> None:
        """Wait until the running export has ended: an export is not cancelled."""
        if self._thread is not None:
            self._thread.join()
        self._release_ended()

    def closing(self, writer: PoolWriter | None) -> None:
        """Wait for a running export; then export the newest checkpoint if an export is due. In a forked child, which
        has no export thread, do nothing."""
        if os.getpid() != self._pid:
            return
        self.stop_reading()
        if writer is not None and writer.slots.protected is not None and self._is_due(self._newest):
            self._start(writer, self._newest, here=True)  # an interpreter that shuts down starts no threads
            self._release_ended()

    def raise_failure(self, *, at_close: bool) -> None:
        """If the last export failed, raise its ``KeepError``. Without ``at_close``, the error is raised once only; with
        ``at_close``, it is raised even if it was raised before."""
        failure = self._failure
        if failure is not None and (at_close or not self._is_reported):
            self._is_reported = True
            raise failure if at_close else _goes_on(failure)

    def _is_due(self, step: int) -> bool:
        return step // self._keep.every > self._last_begun // self._keep.every

    def _start(self, writer: PoolWriter, step: int, *, here: bool = False) -> None:
        """Export the newest checkpoint, of step ``step``, on a new thread; with ``here`` on the calling thread. A
        failure is kept for ``raise_failure``, and this export is not tried again."""
        self._last_begun = step
        try:
            self._hold = hold = self._holds.take(writer)
            if here:
                self._run(writer.reader, hold.record)
                return
            args = writer.reader, hold.record
            thread = threading.Thread(target=self._run_named, args=args, name="lightck-keep", daemon=True)
            thread.start()
            self._thread = thread
        except Exception as err:
            self._failed(step, err)

    def _failed(self, step: int, err: Exception) -> None:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        fact = f"The checkpoint of step {step} could not be exported to {str(self._folder)!r}"
        self._is_reported, self._failure = False, _error(fact, reason, err)

    def _release_ended(self) -> None:
        """Release the hold on the checkpoint of an export that has ended."""
        self._thread = None
        if self._hold is not None:
            self._holds.release(self._hold)
            self._hold = None

    # -- on the export thread ----------------------------------------------------------------------------

    def _run_named(self, reader: PoolReader, record: CommitRecord) -> None:
        with contextlib.suppress(OSError):  # for top and perf: Python before 3.14 gives threads no name in the kernel
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("lightck-keep")
        self._run(reader, record)

    def _run(self, reader: PoolReader, record: CommitRecord) -> None:
        cpu = time.thread_time()
        try:
            self._export(reader, record)
        except Exception as err:
            self._failed(record.step, err)
        else:
            self._failure = None
            self._meter.kept += 1
        finally:
            self._meter.keep_cpu_seconds += time.thread_time() - cpu

    def _export(self, reader: PoolReader, record: CommitRecord) -> None:
        path = self._folder / f"step-{record.step:08d}.safetensors"
        if os.path.lexists(path) and self._number_of(path) is None:
            raise ExportExistsError(
                f"{str(path)!r} exists, was not exported by a training of this pool, and is not overwritten. Move it "
                "away"
            )
        self._remove_stale()
        stored = reader.checkpoint(record)
        chosen = choose(parse(stored), self._keep.what, lambda name: load_tensor(stored, name), _CURE)
        if self._n_written is None:
            self._n_written = max((number for _, _, number in self._own()), default=0)
        self._n_written += 1
        chosen.metadata |= {_MARK: self._mark, _NUMBER: str(self._n_written)}
        export_chosen(chosen, str(path), overwrite=True, temporary=str(self._new_temporary()))
        if not stored.owns_slot():
            path.unlink()
            raise DamagedError("its slot was reused while it was read")
        self._prune(path)

    def _prune(self, written: Path) -> None:
        """Remove all but the newest ``Keep.last`` exports of this pool. ``written``: the file of this export, which
        counts as the newest."""
        if self._keep.last is None:
            return
        found = ((path == written, number, path.stat().st_mtime_ns, path) for _, path, number in self._own())
        for *_, path in sorted(found)[: -self._keep.last]:
            path.unlink(missing_ok=True)

    def _own(self) -> Iterator[tuple[int, Path, int]]:
        """Yield (step, path, number) of every exported file of this pool in the folder."""
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            number = self._number_of(path) if match else None
            if match and number is not None:
                yield int(match[1]), path, number

    def _number_of(self, path: Path) -> int | None:
        """Return the number of an export of this pool, 0 if an older release has written it; None for another file."""
        if path.is_symlink() or not path.is_file():
            return None
        try:
            metadata = _metadata(path)
        except (OSError, ValueError, RecursionError):  # the JSON of a foreign file may be nested too deeply
            return None
        number = str(metadata.get(_NUMBER))
        is_number = number.isascii() and number.isdigit() and len(number) <= _DIGITS_MAX
        return (int(number) if is_number else 0) if metadata.get(_MARK) == self._mark else None


def _metadata(path: Path) -> dict[str, object]:
    """Return the metadata of a safetensors file. ``safe_open`` is not used, because it maps the whole file: if memory
    is short, it raises various errors and leaves a file descriptor open. Raises ``OSError`` or ``ValueError``."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        if nbytes > min(_HEADER_NBYTES_MAX, os.fstat(file.fileno()).st_size - 8):
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(nbytes))
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def _error(fact: str, reason: str, err: BaseException) -> KeepError:
    names_its_cure = isinstance(err, (StateValueError, ExportExistsError))
    cure = "" if names_its_cure else "Check the folder (space, owner). "
    error = KeepError(
        f"{fact}: {reason.rstrip('.')}. The pool and its checkpoints are intact, and earlier exports are unchanged. "
        f"{cure}".rstrip()
    )
    error.errno = getattr(err, "errno", None)
    error.__cause__ = err
    return error


def _goes_on(failure: KeepError) -> KeepError:
    """Return the error for a loop, which may go on."""
    error = KeepError(
        f"{failure} The next export is made when it is due, if the loop catches this error and calls step() again."
    )
    error.errno, error.__cause__ = failure.errno, failure.__cause__
    return error
