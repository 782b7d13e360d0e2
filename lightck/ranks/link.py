"""A connection between two ranks on different hosts, over TCP. It carries the bytes of peer copies.

The rank that listens puts its addresses, its port and a random key into the store of the process group. The rank that
connects tries one address after the other. Both prove to each other that they know the key (HMAC-SHA256 of a nonce of
the other side). So neither talks to a process of another job, or to any other program. The bytes are not encrypted, as
those of gloo and NCCL are not.

Messages are maps of MessagePack with their length before them. No message is executed or names a path.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import msgpack

_KEY_NBYTES = _NONCE_NBYTES = 32
_CONNECT_SECONDS = 5.0
"""How long one attempt to connect may take, and how long a connector waits in a handshake."""
_HANDSHAKE_SECONDS = 1.0
"""How long a listener waits for what the other side of a new connection sends. (Scanners send nothing.)"""
_RETRY_SECONDS = 0.2
_LENGTH = struct.Struct("<I")
MESSAGE_NBYTES_MAX = 256 << 20
"""A message that says that it is longer is not read."""


class LinkError(Exception):
    """The connection ended, or could not be made. Internal: the caller raises a ``LightckError``."""


class Link:
    """One connection. If it ends, the methods that send or receive raise ``LinkError``; only ``send_file`` sends fewer
    bytes instead."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait_at_most(self, seconds: float | None) -> None:
        """Let every further call that waits for the other side end with an error after so many seconds (None: let it
        wait without limit)."""
        self._socket.settimeout(seconds)

    def send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as err:
            raise LinkError(_text(err)) from err

    def send_file(self, fd: int, at: int, nbytes: int) -> int:
        """Send bytes of a file, which the kernel takes from its cache. Returns how many were sent. It sends fewer at
        the end of the file, if the kernel cannot do this for the file, and after an error of the connection, which the
        next ``send`` raises."""
        sent = 0
        try:
            while sent < nbytes:
                try:
                    n = os.sendfile(self._socket.fileno(), fd, at + sent, nbytes - sent)
                except BlockingIOError:  # a socket with a time limit does not block
                    if not self._can_send():
                        break
                    continue
                if not n:
                    break
                sent += n
        except OSError:
            pass
        return sent

    def _can_send(self) -> bool:
        """Wait until the connection takes more bytes, or has ended. Returns False after the time limit."""
        poll, seconds = select.poll(), self._socket.gettimeout()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(None if seconds is None else 1e3 * seconds))

    def receive(self, view: memoryview) -> None:
        """Fill the memory with received bytes."""
        try:
            while view:
                n = self._socket.recv_into(view)
                if not n:
                    raise LinkError("the other side closed it")
                view = view[n:]
        except OSError as err:
            raise LinkError(_text(err)) from err

    def send_message(self, message: dict[str, Any]) -> None:
        data = msgpack.packb(message)
        self.send(_LENGTH.pack(len(data)) + data)

    def receive_message(self) -> dict[str, Any]:
        """Return the next message. Raises ``LinkError`` also for bytes that are no message."""
        length = _LENGTH.unpack(self._received(_LENGTH.size))[0]
        if length > MESSAGE_NBYTES_MAX:
            raise LinkError(f"a message of {length} bytes is too long")
        try:
            message = msgpack.unpackb(self._received(length))
        except ValueError as err:
            raise LinkError(f"a message cannot be read: {err}") from err
        if not isinstance(message, dict):
            raise LinkError("a message is no map")
        return message

    def _received(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.receive(memoryview(data))
        return bytes(data)

    def end(self) -> None:
        """End the connection. A thread that waits in another method gets ``LinkError``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free the descriptor. No other thread may use the connection any more: its next call
        could write to another file, which has got the descriptor."""
        self.end()
        self._socket.close()

    # -- the handshake -----------------------------------------------------------------------------------

    def _prove(self, key: bytes, role: bytes, other_role: bytes) -> None:
        """Prove that this side knows the key, and check that the other side does."""
        nonce = os.urandom(_NONCE_NBYTES)
        self.send(nonce)
        other = self._received(_NONCE_NBYTES)
        self.send(_proof(key, role, other))
        if not hmac.compare_digest(self._received(32), _proof(key, other_role, nonce)):
            raise LinkError("the other side is no rank of this job: it does not know the job's key")


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + nonce, "sha256")


def _text(err: OSError) -> str:
    return "it took too long" if isinstance(err, TimeoutError) else err.strerror or str(err)


class LinkListener:
    """Waits for connections on a free port."""

    def __init__(self) -> None:
        """Raises ``OSError``."""
        is_dual = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual
        )
        self.key = os.urandom(_KEY_NBYTES)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, seconds: float) -> Link:
        """Return the next connection. Raises ``LinkError`` after so many seconds without one, and if the other side
        does not know the key."""
        self._socket.settimeout(seconds)
        try:
            sock, _ = self._socket.accept()
        except OSError as err:
            raise LinkError(_text(err)) from err
        link = Link(sock)
        try:
            link.wait_at_most(_HANDSHAKE_SECONDS)
            link._prove(self.key, b"listener", b"connector")
            link.wait_at_most(None)
        except LinkError:
            link.close()
            raise
        return link

    def close(self) -> None:
        self._socket.close()


def own_addresses() -> list[str]:
    """Return the addresses under which other hosts may reach this one: that of the interface that leads to the host of
    rank 0 (MASTER_ADDR), the name of this host, and, for processes on one machine, the loopback address."""
    found: list[str] = []
    master = os.environ.get("MASTER_ADDR")
    if master:
        with suppress(OSError):
            family, kind, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(address)  # sends nothing
                found.append(sock.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname(), "127.0.0.1"]))


def connect(addresses: list[str], port: int, key: bytes, timeout: float) -> Link:
    """Connect to a listener, under the first of its addresses that leads to it. Tries all of them again and again until
    ``timeout`` seconds have passed (the listener may be busy with other connections); then raises ``LinkError``."""
    end = time.monotonic() + timeout
    while True:
        try:
            return _connect_once(addresses, port, key)
        except LinkError:
            if time.monotonic() > end:
                raise
        time.sleep(_RETRY_SECONDS)


def _connect_once(addresses: list[str], port: int, key: bytes) -> Link:
    reasons = []
    for address in addresses:
        try:
            link = Link(socket.create_connection((address, port), timeout=_CONNECT_SECONDS))
        except OSError as err:
            reasons.append(f"{address}: {_text(err)}")
            continue
        try:
            link._prove(key, b"connector", b"listener")
            link.wait_at_most(None)
            return link
        except LinkError as err:
            link.close()
            reasons.append(f"{address}: {err}")
    raise LinkError("; ".join(reasons))
