"""A proxy in front of an object store that makes faults: what a store does on a bad day."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Fault(NamedTuple):
    """What happens to one request. With ``status`` it does not reach the store."""

    status: int = 0
    """The answer, with a body that echoes what the request was signed with, as real stores do."""
    code: str = "InternalError"
    seconds: float = 0.0
    """How long the answer takes."""
    is_reset: bool = False
    """The connection is reset in the middle of the answer, after the store has done what it was asked for."""
    is_truncated: bool = False
    """The body ends in the middle of what its length says."""
    is_lost: bool = False
    """The store does what it was asked for, and the connection ends without an answer."""


class Request(NamedTuple):
    method: str
    path: str

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path


Rule = Callable[[Request], "Fault | None"]


@dataclass
class Seen:
    request: Request
    began: float
    ended: float
    headers: dict[str, str]
    body_nbytes: int


class FaultProxy:
    """Forwards to a store, until it is stopped. ``rule`` may be set at any time."""

    def __init__(self, port: int) -> None:
        """``port``: of the store, on this machine."""
        self.rule: Rule = lambda _: None
        self.hidden: Callable[[str], bool] = lambda _: False
        """Which names a listing does not show yet."""
        self.gate: Callable[[Request], None] = lambda _: None
        """Is called before a request goes on."""
        self.seen: list[Seen] = []
        self.in_flight = self.in_flight_max = 0
        """Numbers of data objects that are being put or got."""
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _handle(self) -> None:
                proxy._serve(self, port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # the other side has gone, as a fault made it

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def heal(self) -> None:
        self.rule = lambda _: None
        self.hidden = lambda _: False
        self.gate = lambda _: None

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        request = Request(handler.command, handler.path)
        seen = Seen(request, time.monotonic(), 0.0, dict(handler.headers), len(body))
        is_data = "/data/" in request.path and request.method in ("GET", "PUT")
        with self.lock:
            self.seen.append(seen)
            self.in_flight += is_data
            self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            self.gate(request)
            fault = self.rule(request) or Fault()
            time.sleep(fault.seconds)
            if fault.status:
                text = (
                    f"<Error><Code>{fault.code}</Code><Message>{handler.headers.get('Authorization')}</Message></Error>"
                )
                _answer(handler, fault.status, {}, text.encode(), Fault())
            else:
                status, headers, data = _forward(handler, port, body)
                if request.is_listing:
                    data = self._late(data)
                _answer(handler, status, headers, data, fault)
        finally:
            seen.ended = time.monotonic()
            with self.lock:
                self.in_flight -= is_data

    def _late(self, data: bytes) -> bytes:
        def shown(match: re.Match[bytes]) -> bytes:
            return b"" if self.hidden(match[1].decode()) else match[0]

        return re.sub(rb"<Contents>\s*<Key>(.*?)</Key>.*?</Contents>", shown, data, flags=re.S)


def _forward(handler: BaseHTTPRequestHandler, port: int, body: bytes) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(handler.command, handler.path, body, dict(handler.headers))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def _answer(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, fault: Fault) -> None:
    if fault.is_lost:
        _reset(handler)
        return
    handler.send_response(status)
    length = headers.get("Content-Length", "0") if handler.command == "HEAD" else str(len(data))
    for name, value in headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
            handler.send_header(name, value)
    handler.send_header("Content-Length", length)
    handler.end_headers()
    if fault.is_reset or fault.is_truncated:
        handler.wfile.write(data[: len(data) // 2])
        handler.wfile.flush()
        if fault.is_reset:
            _reset(handler)
        handler.close_connection = True
    elif handler.command != "HEAD":
        handler.wfile.write(data)


def _reset(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
