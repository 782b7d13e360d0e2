"""The receiving end of a peer copy: one thread that writes what the rank on another host sends.

The messages of the sender, and the answers. (Instead of any answer, ``{"error": text}`` may come.)

    open        The pool from which the next checkpoints come: its superblock and layout table. Answer:
                ``{"contents": ids}``, the checkpoints in the copies of the sender's pools.
    begin       One checkpoint. Answer: ``{"has": True}`` if the copy has it, and its bytes verify. Otherwise
                ``{"has": False}``; then the sender sends the bytes, run by run, the receiver verifies and commits them,
                and answers ``{}``.
    drop        Checkpoints that the copies no longer need. Answer: ``{}``.

*Failure cases.* If a write fails, what follows of the checkpoint is read and ignored, and the answer has the error. If
the connection ends, the thread ends; what is committed stays.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightck.errors import PoolError
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.ranks.copy_file import PEER_COPIES, CopyFile, Run, copies_in, uuid_of
from lightck.ranks.directory import pool_name
from lightck.ranks.link import Link, LinkError
from lightck.ranks.rule import CheckpointId

log = logging.getLogger("lightck")
CHUNK_NBYTES = 1 << 20
"""How many bytes are sent, and received, at once."""
_JOIN_SECONDS = 5.0


class CopyReceiver:
    """Keeps the peer copy of the pool of one rank."""

    def __init__(self, link: Link, directory: str, rank: int, world_size: int) -> None:
        """``directory``: of this host. ``rank``: the rank whose pool is copied."""
        self._link, self._rank, self._world_size = link, rank, world_size
        self._directory = directory
        self._files: list[CopyFile] = []
        """The peer copies of the pools of ``rank``, the current one last. (A relayout gives the pool a new file. The
        copy of the old file stays until it holds nothing that is needed.)"""
        self._buffer = memoryview(bytearray(CHUNK_NBYTES))
        self._thread = threading.Thread(target=self._run, name="lightck-copies-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._link.end()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._link.close()

    def _run(self) -> None:
        try:
            while True:
                self._link.send_message(self._answer(self._link.receive_message()))
        except LinkError as err:
            log.debug("lightck: the connection to rank %d, whose pool is copied here, ended: %s", self._rank, err)
        finally:
            for file in self._files:
                file.close()

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a message says, and return the answer. Raises ``LinkError``."""
        actions = {"open": self._open, "begin": self._begin, "drop": self._drop}
        try:
            return actions[message["do"]](message)
        except (OSError, PoolError, DamagedError) as err:
            return {"error": _reason(err)}
        except (KeyError, TypeError, ValueError, IndexError) as err:  # a malformed message
            raise LinkError(f"a message cannot be used: {err!r}") from err

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        folder = os.path.join(self._directory, PEER_COPIES)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        uuid = bytes(message["uuid"])
        for at, file in enumerate(self._files):
            if file.uuid == uuid:
                self._files.append(self._files.pop(at))
                break
        else:
            path = next((one for one in copies_in(self._directory) if uuid_of(one) == uuid), None)
            if path is None:
                path = os.path.join(folder, pool_name(self._rank, self._world_size, uuid[:4].hex()))
                with suppress(FileNotFoundError):
                    os.unlink(path)  # it is not a copy of this pool, or it cannot be read
                self._files.append(CopyFile.create(path, message["superblock"], message["table"]))
            else:
                self._files.append(CopyFile(path))
        return {"contents": [list(one) for file in self._files for one in file.contents()]}

    def _begin(self, message: Mapping[str, Any]) -> dict[str, Any]:
        checkpoint_id, record = CheckpointId(*message["id"]), CommitRecord(*message["record"])
        runs: list[Run] = [(int(low), int(high)) for low, high in message["runs"]]
        file = self._files[-1]
        if file.has(checkpoint_id, record):
            return {"has": True}
        file.begin(record.slot, runs)
        self._link.send_message({"has": False})
        failure = self._receive(file, runs)
        if failure is not None:
            raise failure
        file.commit(checkpoint_id, record)
        return {}

    def _receive(self, file: CopyFile, runs: list[Run]) -> OSError | None:
        """Receive and write the bytes of a checkpoint. Returns the first error of a write."""
        failure = None
        for low, high in runs:
            for at in range(low, high, CHUNK_NBYTES):
                view = self._buffer[: min(CHUNK_NBYTES, high - at)]
                self._link.receive(view)
                try:
                    if failure is None:
                        file.write(view, at)
                except OSError as err:
                    failure = err
        return failure

    def _drop(self, message: Mapping[str, Any]) -> dict[str, Any]:
        ids = {CheckpointId(*one) for one in message["ids"]}
        for file in self._files:
            file.drop(ids)
        for file in self._files[:-1]:
            if not file.contents():
                file.remove()
                self._files.remove(file)
        return {}


def _reason(err: BaseException) -> str:
    return str(err.args[0]) if isinstance(err, PoolError) else str(err)
