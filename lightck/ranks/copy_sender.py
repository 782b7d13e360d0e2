"""The sending end of a peer copy: reads checkpoints from this rank's pool, and sends them to a rank on another host.

``copy`` sends one checkpoint. attach calls it for the checkpoint from which training goes on. From then on a thread
does so whenever a checkpoint is due (``Knowledge.next_to_copy``), in pieces with pauses between them, so that training
keeps cores, memory and network for most of the time.

The commit rule keeps a checkpoint in the pool until its copy is acknowledged, so its bytes do not change meanwhile.

*Failure cases.* The receiver answers with an error (no space, a block that does not verify): this rank raises it at its
next checkpoint. The connection ends: the receiver's session was closed, at the end of the training or because its
process was killed. This rank goes on, as it would without copies; if its pool fills with checkpoints that wait for
their copy, it raises an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

from lightck.errors import PoolError, RankError
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.ranks.copy_file import checkpoint_in, runs_of
from lightck.ranks.copy_receiver import CHUNK_NBYTES
from lightck.ranks.link import Link, LinkError
from lightck.ranks.rule import CheckpointId, Knowledge

log = logging.getLogger("lightck")
_PAUSE_FACTOR = 4.0
"""The thread sleeps four times as long as it worked. So a copy takes five times as long as it could."""
_JOIN_SECONDS = 5.0
_STRUCK_POLL_SECONDS = 0.001
"""Seconds between two looks at whether the struck checkpoints are dropped from the copy."""
_COMMITS_BEFORE_WARNING = 3
"""A connection that ended is reported after so many further checkpoints. At the end of a training the sessions of all
ranks are closed, one a little before the other, which is no reason for a warning."""


class CopySender:
    """Keeps the peer copy of this rank's pool up to date."""

    def __init__(self, link: Link, pool_path: str, receiver: str, timeout: float) -> None:
        """``pool_path``: of this rank's pool. ``receiver``: name of the rank that keeps the copy, for messages.
        ``timeout``: seconds that one answer of the receiver may take."""
        self._link, self._path, self._receiver = link, pool_path, receiver
        link.wait_at_most(timeout)
        self.uuid = b""
        """The uuid of the pool that the receiver has open."""
        self.in_copy: frozenset[CheckpointId] = frozenset()
        """The checkpoints that lie in the copy. Before the first ``copy``: unknown."""
        self.copying: CheckpointId | None = None
        """The checkpoint that the thread reads from the pool. Its slot must not be overwritten."""
        self.failure: RankError | None = None
        """Why there are no more copies."""
        self.is_refused = False
        """Whether the copies ended because the receiver answered with an error, or because this rank could not read its
        own pool; False if the connection ended."""
        self.n_bytes_sent = 0
        """The bytes of all checkpoints that were sent."""
        self.nbytes_of_all = 0
        """Bytes of all tensors in the layout table of this rank's pool, at the last call of ``copy``."""
        self._own: frozenset[CheckpointId] = frozenset()
        self._known: Callable[[], Knowledge] = Knowledge
        self._publish: Callable[[frozenset[CheckpointId]], object] = bool
        """The arguments of ``start``. Before it is called: functions that know nothing and do nothing."""
        self._struck: frozenset[CheckpointId] = frozenset()
        """Checkpoints in the copy that may hold old bytes. They are dropped before anything else is done."""
        self._lock = threading.Lock()
        """Held while ``_struck`` is changed."""
        self._n_commits_since_failure = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # -- attach ------------------------------------------------------------------------------------------

    def copy(self, checkpoint_id: CheckpointId, *, is_paced: bool = False) -> bool:
        """Copy a checkpoint, and return when it is durable in the copy. Returns False if the pool no longer has it.
        Raises ``RankError`` and ``PoolError``."""
        try:
            with closing(open_pool(self._path)) as reader:
                self._open(reader)
                self.nbytes_of_all = sum(entry.nbytes for entry in reader.entries)
                stored = checkpoint_in(reader, checkpoint_id)
                if stored is None:
                    return False
                self._send(stored, checkpoint_id, is_paced=is_paced)
        except LinkError as err:
            raise RankError(
                f"The connection to {self._receiver}, which keeps a copy of this rank's pool, ended: {err}. Look for "
                "an error of that rank, and start all ranks again."
            ) from err
        self.in_copy |= {checkpoint_id}
        return True

    def drop(self, ids: Collection[CheckpointId]) -> None:
        """Drop checkpoints from the copy. Raises ``LinkError`` and ``RankError``."""
        self._ask({"do": "drop", "ids": [list(one) for one in ids]})
        self.in_copy -= frozenset(ids)

    def _open(self, reader: PoolReader) -> None:
        """Tell the receiver from which pool the next checkpoints come, if it has another one open."""
        sb = reader.superblock
        if sb.uuid == self.uuid:
            return
        message = {"do": "open", "uuid": sb.uuid, "superblock": sb.pack(), "table": reader.table}
        answer = self._ask(message)
        self.in_copy |= {CheckpointId(*one) for one in answer["contents"]}
        self.uuid = sb.uuid

    def _send(self, stored: StoredCheckpoint, checkpoint_id: CheckpointId, *, is_paced: bool) -> None:
        reader, runs = stored.reader, runs_of(stored)
        answer = self._ask({"do": "begin", "id": list(checkpoint_id), "record": list(stored.record), "runs": runs})
        if answer["has"]:
            return
        self.n_bytes_sent += sum(high - low for low, high in runs)
        for low, high in runs:
            for at in range(low, high, CHUNK_NBYTES):
                began, n = time.perf_counter(), min(CHUNK_NBYTES, high - at)
                self._send_bytes(reader, at, n)
                pause = _PAUSE_FACTOR * (time.perf_counter() - began) if is_paced and not self._struck else 0.0
                if self._stop.wait(pause):
                    raise LinkError("this rank's session was closed")
        self._answer()

    def _send_bytes(self, reader: PoolReader, at: int, n: int) -> None:
        """Send bytes of the pool. As far as that works, the kernel sends them from the file, which saves one copy in
        memory. The rest is read and sent."""
        for file_at, file_n in reader.file_runs(at, n):
            sent = self._link.send_file(reader.container.fd, file_at, file_n)
            at, n = at + sent, n - sent
            if sent < file_n:
                break
        if n:
            # If the medium fails, zeros are sent, and the receiver finds that they do not verify.
            self._link.send(reader.read(at, n).ljust(n, b"\0"))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._link.send_message(message)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = self._link.receive_message()
        if "error" in answer:
            self.is_refused = True
            raise RankError(
                f"The copy of this rank's pool on {self._receiver} cannot be kept: {answer['error']}. The checkpoints "
                "that all ranks have are intact. Free space on the disk that holds that host's directory, or repair "
                "it, or leave replicas= out, and start all ranks again."
            )
        return answer

    # -- while training runs -----------------------------------------------------------------------------

    def start(
        self,
        own: frozenset[CheckpointId],
        known: Callable[[], Knowledge],
        publish: Callable[[frozenset[CheckpointId]], object],
    ) -> None:
        """Begin to copy what is due. ``own``: the checkpoints that are committed in this rank's pool. ``known``:
        returns what this rank knows of the group. ``publish``: is called with the checkpoints in the copy, when they
        change."""
        self._own, self._known, self._publish = own, known, publish
        publish(self.in_copy)
        self._thread = threading.Thread(target=self._run, name="lightck-copies-out", daemon=True)
        self._thread.start()
        self._wake.set()

    def committed(self, own: frozenset[CheckpointId]) -> None:
        """Tell the thread which checkpoints are committed in this rank's pool. Called on the training thread."""
        self._own = own
        self._wake.set()
        if self.failure is not None and not self.is_refused:
            self._n_commits_since_failure += 1
            if self._n_commits_since_failure == _COMMITS_BEFORE_WARNING:
                log.warning("lightck: no more checkpoints are copied to another host. %s", self.failure)

    def struck(self) -> None:
        """Drop all checkpoints from the copy, and return when this is done, or when no more copies can be made.
        Checkpoints in the pool were struck, because they hold old bytes of a tensor, and those in the copy may hold
        them too. Called on the training thread, which waits for a copy that is being made (without pauses from now
        on)."""
        copying = self.copying
        with self._lock:
            self._struck = self.in_copy if copying is None else self.in_copy | {copying}
        self._publish(frozenset())
        self._wake.set()
        while self._struck and self.failure is None and not self._stop.is_set():
            time.sleep(_STRUCK_POLL_SECONDS)
        if self._struck:
            log.warning(
                "lightck: the peer copy of this rank's pool on %s may hold old bytes of a tensor, and could not be "
                "emptied. If this rank's host is lost, the ranks may continue with these bytes. %s",
                self._receiver,
                self.failure or "This rank's session was closed.",
            )
            return
        log.warning(
            "lightck: the peer copy of this rank's pool was emptied, because its checkpoints may hold old bytes of a "
            "tensor. If this rank's host is lost before the next checkpoint is copied, no copy can replace the pool"
        )

    def close(self) -> None:
        """End the thread. A copy that is being made is given up."""
        self._stop.set()
        self._wake.set()
        self._link.end()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._link.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                while not self._stop.is_set() and self._do_next():
                    pass
            except (LinkError, RankError, PoolError, OSError) as err:
                self.failure = err if isinstance(err, RankError) else RankError(_not_copied(self._receiver, err))
                self.is_refused |= isinstance(err, (PoolError, OSError))
                return

    def _do_next(self) -> bool:
        """Drop what is no longer needed, and copy one checkpoint. Returns False if there was nothing to do."""
        known = self._known()
        struck = self._struck
        dropped = [one for one in self.in_copy if known.may_drop_copy(one) or one in struck]
        if dropped:
            self.drop(dropped)
            self._publish(self.in_copy)
        with self._lock:
            self._struck -= struck
        checkpoint_id = known.next_to_copy(self._own, self.in_copy)
        if checkpoint_id is None:
            return False
        self.copying = checkpoint_id
        try:
            # Before ``copying`` was set, the training thread may have chosen this slot to overwrite. If so, what the
            # rank knows now allows that, and the checkpoint is not copied.
            if not self._known().may_overwrite(checkpoint_id) and self.copy(checkpoint_id, is_paced=True):
                self._publish(self.in_copy - self._struck)
            else:
                self._own -= {checkpoint_id}  # it was struck, or can never become common
        finally:
            self.copying = None
        return True


def _not_copied(receiver: str, err: Exception) -> str:
    return (
        f"A checkpoint of this rank's pool could not be copied to {receiver} ({err}). The checkpoints that all ranks "
        "have are intact. Start all ranks again."
    )
