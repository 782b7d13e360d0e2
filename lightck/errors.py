"""The errors of lightck, in one tree. (Two more are not in it: ``DemoError`` of ``lightck demo``, and
``SupersededError``, a ``TierClaimedError`` of ``tiers/late_drain.py``. An argument of a wrong type or value raises a
plain TypeError or ValueError.)

Each class in the tree is a ``LightckError`` and also the builtin exception in brackets, which code that does not
import lightck can catch. Each message gives the fact, the reason and the cure, in this order.

::

    LightckError
    ├── PoolError                     something about the pool's file
    │   ├── PoolNotFoundError         (FileNotFoundError)   no file, or no folder for it
    │   ├── PoolPathError             (IsADirectoryError)   the path is a directory or another non-file
    │   ├── PoolPermissionError       (PermissionError)     not readable, not writable, or writable for others
    │   ├── PoolLockedError           (BlockingIOError)     open in another session, here or in another process
    │   ├── NoSpaceError              (OSError, ENOSPC)     the medium cannot hold the pool
    │   ├── PoolIOError               (OSError)             a system call on the pool's file failed: see errno
    │   ├── LibraryMissingError       (ImportError)         the library that writes PMDK pools is missing
    │   ├── MediumError               (OSError, ENOTSUP)    the medium does not survive what require= asks for
    │   ├── NotAPoolError             (ValueError)          a file that is no pool, or an empty file
    │   ├── PoolTruncatedError        (EOFError)            the file is shorter or longer than its header says
    │   ├── FormatError               (ValueError)          a newer format, or flags that this lightck lacks
    │   ├── NoCheckpointError         (LookupError)         no checkpoint in the pool, or none of this step
    │   └── CorruptPoolError          (ValueError)          checkpoints exist, and none is intact
    ├── CheckpointExistsError         (FileExistsError)     the pool holds a checkpoint: pass resume or overwrite
    ├── NoTensorError                 (KeyError)            a checkpoint holds no tensor of this name
    ├── DriftError                    (ValueError)          the checkpoint does not fit the model or optimizer
    ├── DataMismatchError             (ValueError)          strict_data=True: a resume goes on with other data
    ├── AmbiguousError                (ValueError)          several optimizers, schedulers or scalers would fit
    ├── StateValueError               (TypeError)           a value that cannot be stored
    ├── UnsupportedError              (NotImplementedError) something that lightck does not support: see the message
    ├── LateError                     (RuntimeError)        an optimizer or scheduler was created after attach
    ├── LayoutError                   (ValueError)          layout= does not fit the model or its ranks
    ├── RankError                     (RuntimeError)        ranks disagree, or one failed or did not arrive in time
    ├── SessionError                  (RuntimeError)        a call that is not allowed now
    ├── NothingSavedError             (RuntimeError)        close(): lightck saw no update, so nothing was saved
    ├── StateChangedError             (RuntimeError)        a tensor was written while a checkpoint still needed it
    ├── FlushTimeoutError             (TimeoutError)        flush(timeout=) ran out of time
    ├── ReplayError                   (RuntimeError)        an update cannot be made again, or not with the same bits
    ├── ExportError                   (OSError)             an exported file could not be written
    │   ├── ExportExistsError         (FileExistsError)     the file exists (pass overwrite), or is a pool
    │   ├── KeepError                 (OSError)             an export that a training makes failed
    │   └── TraceError                (OSError)             session.trace() could not write its file
    ├── TierError                     (OSError)             a tier cannot be read or written
    │   └── TierClaimedError          (OSError)             another process, or another run, has the tier
    ├── TraceFormatError              (ValueError)          a file that is no trace, or a damaged one
    ├── BenchError                    (RuntimeError)        a bench cannot run, or its checkpoint loads with other bits
    └── BackgroundError               (OSError)             a background copy or commit failed
"""

from __future__ import annotations

import errno
from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names, joined by commas, and the number of further names: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_lack_of_memory(err: BaseException) -> bool:
    """Whether Python or torch has no memory for something. torch raises ``RuntimeError``, or, for the memory of a
    device, its ``OutOfMemoryError``."""
    if isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError":
        return True
    return isinstance(err, RuntimeError) and "DefaultCPUAllocator" in str(err)


def capitalized(text: str) -> str:
    """Return the text with a capital first letter, for the beginning of a sentence; the rest stays as it is."""
    return text[:1].upper() + text[1:]


class LightckError(Exception):
    """Base of lightck's errors."""


class _SystemError(LightckError, OSError):
    """An error that the operating system caused; ``errno`` is the system's error number, or None."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.errno = code


class PoolError(LightckError):
    """Base of the errors about the pool's file."""


class PoolNotFoundError(PoolError, FileNotFoundError):
    """There is no pool at this path; or a pool cannot be created there, because the folder does not exist."""


class PoolPathError(PoolError, IsADirectoryError):
    """The path cannot name a pool: it is empty or too long, or it names a directory, a socket, a symbolic link, or a
    device on which no pool can be created."""


class PoolPermissionError(PoolError, PermissionError):
    """This user may not read or write the pool, or other users may write to it."""


class PoolLockedError(PoolError, BlockingIOError):
    """Another session, in this process or in another process, has the pool open for writing; or a training overwrites
    its checkpoints faster than they can be read."""


class NoSpaceError(PoolError, _SystemError):
    """The medium cannot hold the pool. ``errno`` is ``ENOSPC``."""

    discard_helps = False
    """Whether the medium can hold the new pool after the old pool at this path is discarded."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno.ENOSPC)


class PoolIOError(PoolError, _SystemError):
    """The operating system failed a call that the pool needs: the medium is bad, or memory, file descriptors or threads
    have run out. ``errno`` is the system's error number."""


class LibraryMissingError(PoolError, ImportError):
    """A library that is needed to write this kind of pool is not installed. Reading does not need it."""


class MediumError(PoolError, _SystemError):
    """The medium does not survive what ``require=`` asks for. ``errno`` is ``ENOTSUP``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno.ENOTSUP)


class NotAPoolError(PoolError, ValueError):
    """The file is not a lightck pool."""

    discard_helps = False
    """Whether a pool can be created here after the present content is discarded (``overwrite=True``). True only for
    some kinds of content of a device."""


class PoolTruncatedError(PoolError, EOFError):
    """The file does not have the size that the pool was created with."""


class FormatError(PoolError, ValueError):
    """The pool was written in a format that this release of lightck does not read."""


class CorruptPoolError(PoolError, ValueError):
    """Checkpoints were committed, and none of them matches its checksums. ``reasons`` has a line for each damaged
    checkpoint or commit record."""

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class CheckpointExistsError(LightckError, FileExistsError):
    """The pool holds a checkpoint that would be overwritten or ignored."""


class NoCheckpointError(PoolError, LookupError):
    """The pool holds no checkpoint, or no checkpoint of the requested step."""


class NoTensorError(LightckError, KeyError):
    """The checkpoint holds no tensor of this name; the message lists similar names."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes


class DriftError(LightckError, ValueError):
    """The checkpoint does not fit the model, optimizer, loader or object that it is restored into. ``drift`` has the
    differences: a :class:`lightck.Drift`; for loaders a dict of pairs (saved value, present value); or None."""

    def __init__(self, message: str, drift: object = None) -> None:
        super().__init__(message)
        self.drift = drift


class DataMismatchError(LightckError, ValueError):
    """What the first update after a resume consumes differs from what followed the restored step in the interrupted run
    (``strict_data=True``): the batch, the input of the forward or its random state; or the gradients, options or state
    of an optimizer. The message says which. It is raised when an optimizer's ``step`` is called, before it updates
    anything (or after an update that the loop makes by hand)."""


class AmbiguousError(LightckError, ValueError):
    """Two or more live objects could be the optimizer, a scheduler or the GradScaler; the message names them."""


class StateValueError(LightckError, TypeError):
    """A value in the state cannot be stored; the message says where in the state it is."""


class UnsupportedError(LightckError, NotImplementedError):
    """Something that lightck does not support: an optimizer, an option that cannot be used in a group of ranks, or a
    call that cannot be combined with layer-wise updates or with lightck's hooks. The message says what to do
    instead."""


class LateError(LightckError, RuntimeError):
    """An optimizer or a scheduler was created too late to be restored or saved."""


class LayoutError(LightckError, ValueError):
    """The rules in ``layout=`` do not fit the model: a rule matches nothing, two match one tensor, or the shape of a
    tensor is not what its rule says; or there is no group of ranks, which could hold the parts."""


class RankError(LightckError, RuntimeError):
    """The ranks of a process group disagree, or another rank failed or did not arrive in time. It is raised on every
    rank that still runs, and names the ranks and their hosts."""


class SessionError(LightckError, RuntimeError):
    """The session, or the model, is not in a state that allows this call."""


class NothingSavedError(LightckError, RuntimeError):
    """A session ends, and nothing of the training was saved, because lightck saw no update of the session's model. The
    message says whether another model, with parameters of the same shapes, was trained instead of it."""


class StateChangedError(LightckError, RuntimeError):
    """A tensor was written, without a change of its version counter, while a checkpoint still needed its bytes. Raised
    with ``LIGHTCK_CHECK=1`` only. Without it, the checkpoint is dropped with a warning."""


class ReplayError(LightckError, RuntimeError):
    """An update that the pool holds as gradients cannot be made again, or not with the same bits. ``parameter`` is the
    name of the parameter, and ``step`` the step whose update it is, or None."""

    def __init__(self, message: str, parameter: str | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.parameter, self.step = parameter, step


class ExportError(_SystemError):
    """A checkpoint could not be written as a file. ``errno`` is the system's error number, or None."""


class ExportExistsError(ExportError, FileExistsError):
    """The path of an export names an existing file, or something that an export never replaces: a pool, or anything
    else that is no regular file. ``errno`` is ``EEXIST``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, errno.EEXIST)


class KeepError(ExportError):
    """A checkpoint could not be exported during a training (``Tier(format="safetensors")``). The pool is intact, and
    the training may go on."""


class TraceError(ExportError):
    """A trace could not be recorded or written. The training and the pool are not affected."""


class TierError(_SystemError):
    """A tier (a folder or object store to which checkpoints are sent) cannot be read or written. The pool and its
    checkpoints are intact. ``errno`` is the system's error number, or None."""

    @classmethod
    def of(cls, fact: str, code: int | None, reason: str | None) -> TierError:
        """Return the error for a failed system call on a folder tier. ``code``: its errno; ``reason``: its
        strerror."""
        return cls(
            f"{fact}: {reason or 'the system gives no reason'}. Check the folder (that it is there, its owner, the "
            "space). The pools, and the checkpoints that lie in the tier, are unchanged.",
            code,
        )


class TierClaimedError(TierError):
    """Another process has claimed the tier, or the tier holds the checkpoints of another run."""


class TraceFormatError(LightckError, ValueError):
    """The file is not a trace that ``session.trace`` wrote, or it is damaged."""


class BackgroundError(_SystemError):
    """A background copy, sync or commit failed. The checkpoints that were committed before are intact."""


class FlushTimeoutError(LightckError, TimeoutError):
    """``flush(timeout=...)`` did not finish within the timeout; the copies continue in the background."""


class BenchError(LightckError, RuntimeError):
    """A benchmark cannot run here, or the checkpoint that it saved differs from the training."""
