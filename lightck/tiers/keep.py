"""History beside the pool: every so often a committed version is exported to a folder, in the background.

A version that is due is held in its slot and read by a thread of its own, verified as it is read, into a safetensors
file that appears complete or not at all. The training thread starts it and never waits for it, but when the pool moves
to a new file and at the end. The thread has normal priority: it runs Python, and an idle one would hold the interpreter
lock while a busy machine lets it starve. Files that this module did not write are never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from pathlib import Path

from lightck.errors import ExportError, KeepError, StateValueError
from lightck.export import export_chosen
from lightck.export.choice import check_what, choose
from lightck.export.tensors import check_dtype
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.listener import CommitListener
from lightck.pool.reader import PoolReader
from lightck.pool.writer import PoolWriter
from lightck.restore.contents import load_tensor
from lightck.restore.recover import parse
from lightck.stats import Meter
from lightck.tiers.pin import Hold, Holds

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_MARK = "lightck_kept_by"
_HEADER_NBYTES_MAX = 100_000_000
"""As in the safetensors library."""
_BY_HAND = (
    "keep= writes safetensors files only. Attach without it, and export when you want to: "
    'lightck.export_checkpoint(lightck.recover(pool_path), file, format="torch").'
)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which versions ``attach(..., keep=...)`` exports, as ``step-00001000.safetensors`` and so on."""

    _: KW_ONLY
    every: int
    """An export is due each time that many updates were made: at 1000, 2000 and so on for ``every=1000``. It is taken
    from the first version committed then (or, where one is still running, after that)."""
    to: str | os.PathLike[str]
    """The folder; it is made where its parent exists."""
    last: int | None = None
    """How many exports of this pool stay in the folder, the newest written; None: all of them."""
    what: str = "model"
    """``"model"``, or ``"all"``: optimizer, state and random states too."""

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"Keep(every={self.every!r}): it is a number of updates, an int of at least 1.")
        if self.last is not None and (type(self.last) is not int or self.last < 1):
            raise ValueError(f"Keep(last={self.last!r}): it is a number of files, an int of at least 1, or None.")
        check_what(self.what)


def refuse_unkept(keep: Keep, entries: Iterable[Entry]) -> None:
    """Raises ``StateValueError`` for a tensor that could not be exported: told before the training, not at the first
    export."""
    for entry in entries:
        if keep.what == "all" or entry.name.startswith("model/"):
            check_dtype(entry.name, entry.dtype, _BY_HAND)


class Keeper(CommitListener):
    """The exports of one session: a listener that exports what is due."""

    def __init__(self, keep: Keep, pool_path: str, meter: Meter, holds: Holds) -> None:
        """Makes the folder and removes what a kill left there. Raises ``KeepError``. The pool's lock is held."""
        self._keep = keep
        self._folder = Path(os.path.abspath(keep.to))
        self._mark = blake2b(os.fsencode(os.path.realpath(pool_path)), digest_size=8).hexdigest()
        self._temporary = self._folder / f".lightck-{self._mark}.tmp"
        self._meter, self._holds = meter, holds
        self._last = self._newest = 0
        self._thread: threading.Thread | None = None
        self._hold: Hold | None = None
        self._failure: KeepError | None = None
        self._is_reported = False
        self._pid = os.getpid()
        self._prepare()

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            self._temporary.unlink(missing_ok=True)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as err:
            raise _error(f"Versions cannot be kept in {str(self._folder)!r}", err.strerror or str(err), err) from err

    def adopted(self, writer: PoolWriter, step: int) -> None:
        """Go on counting where the exports up to this step left off. Raises ``KeepError``."""
        try:
            self._last = max((at for at, _ in self._own() if at <= step), default=0)
        except OSError as err:
            raise _error(f"Versions cannot be kept in {str(self._folder)!r}", err.strerror or str(err), err) from err
        self._newest = step

    @property
    def called_from_own_thread(self) -> bool:
        """The caller is on the thread of an export."""
        return self._thread is threading.current_thread()

    # -- on the training thread --------------------------------------------------------------------------

    def committed(self, writer: PoolWriter, step: int) -> None:
        self._newest = step
        if self._thread is not None and self._thread.is_alive():
            return
        self._collect()
        if self._is_due(step):
            self._start(writer, step)

    def stop_reading(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._collect()

    def closing(self, writer: PoolWriter | None) -> None:
        """Finish what is running and what is due. In a forked child, where there is no thread, nothing happens."""
        if os.getpid() != self._pid:
            return
        self.stop_reading()
        if writer is not None and writer.slots.protected is not None and self._is_due(self._newest):
            self._start(writer, self._newest, here=True)  # an interpreter that ends starts no threads
            self._collect()

    def raise_failure(self, *, at_close: bool) -> None:
        """Once at a step for each export that failed; at close where no later one went well."""
        failure = self._failure
        if failure is not None and (at_close or not self._is_reported):
            self._is_reported = True
            raise failure

    def _is_due(self, step: int) -> bool:
        return step // self._keep.every > self._last // self._keep.every

    def _start(self, writer: PoolWriter, step: int, *, here: bool = False) -> None:
        """Export the newest version, on a thread of its own or ``here``. What fails is the failure of this step's
        export, and not of the training; it is not tried again."""
        self._last = step
        try:
            self._hold = hold = self._holds.take(writer)
            if here:
                self._run(writer.reader, hold.record)
                return
            what = writer.reader, hold.record
            thread = threading.Thread(target=self._run_named, args=what, name="lightck-keep", daemon=True)
            thread.start()
            self._thread = thread
        except Exception as err:
            self._failed(step, err)

    def _failed(self, step: int, err: Exception) -> None:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        self._is_reported, self._failure = False, _error(f"Step {step} could not be kept", reason, err)

    def _collect(self) -> None:
        self._thread = None
        if self._hold is not None:
            self._holds.release(self._hold)
            self._hold = None

    # -- on the thread -----------------------------------------------------------------------------------

    def _run_named(self, reader: PoolReader, record: CommitRecord) -> None:
        with contextlib.suppress(OSError):  # for top and perf: before 3.14 Python names its threads for itself only
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
        if os.path.lexists(path) and not self._is_own(path):
            raise ExportError(f"{str(path)!r} exists, and was not written by this training")
        stored = reader.checkpoint(record)
        chosen = choose(parse(stored), self._keep.what, lambda name: load_tensor(stored, name), _BY_HAND)
        chosen.metadata[_MARK] = self._mark
        export_chosen(chosen, str(path), overwrite=True, temporary=str(self._temporary))
        if not stored.is_intact():
            path.unlink()
            raise DamagedError("its slot was reused while it was read")
        self._prune(path)

    def _prune(self, written: Path) -> None:
        """Remove all but the newest files of this pool."""
        if self._keep.last is None:
            return
        own = sorted((path for _, path in self._own()), key=lambda p: (p == written, p.stat().st_mtime_ns))
        for path in own[: -self._keep.last]:
            path.unlink(missing_ok=True)

    def _own(self) -> Iterator[tuple[int, Path]]:
        """(step, path) of every file in the folder that was written for this pool."""
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and self._is_own(path):
                yield int(match[1]), path

    def _is_own(self, path: Path) -> bool:
        if path.is_symlink() or not path.is_file():
            return False
        try:
            return _metadata(path).get(_MARK) == self._mark
        except (OSError, ValueError, RecursionError):  # JSON may be as deep as somebody likes
            return False


def _metadata(path: Path) -> dict[str, object]:
    """What a safetensors file says of itself. Not by safe_open, which maps the file for that: where there is no memory
    for it, it raises what it likes and leaves a descriptor open."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        if nbytes > min(_HEADER_NBYTES_MAX, os.fstat(file.fileno()).st_size - 8):
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(nbytes))
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def _error(fact: str, reason: str, err: BaseException) -> KeepError:
    look = "" if isinstance(err, StateValueError) else "Look at the folder (space, owner). "  # which has said its cure
    error = KeepError(
        f"{fact}: {reason.rstrip('.')}. The pool and its versions are intact, and earlier exports are as they were. "
        f"{look}The next export is tried when it is due: a loop that catches this and calls step() again goes on."
    )
    error.errno = getattr(err, "errno", None)
    error.__cause__ = err
    return error
