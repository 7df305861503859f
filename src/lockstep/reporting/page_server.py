"""Serves the page of runs that are watched to the browsers of this machine: two paths, and nothing else.

A page of somebody else's must not read it. It cannot read answers of another origin, and where its name is made to lead
here (DNS rebinding) it has that name as `Host`: no name is answered but those of this machine and addresses.
"""

import errno
import hashlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self, final

from lockstep.errors import UsageError, os_error_as
from lockstep.reporting.page import live_page, live_parts
from lockstep.reporting.run_log import History
from lockstep.reporting.run_page import live_sections, title
from lockstep.reporting.run_view import RunView

_EVERY_MS: Final = 2_000  # between two questions of a page
_LINGER_S: Final = 2.5 * _EVERY_MS / 1_000  # after the end, for pages that are open to learn of it
_SILENT_S: Final = 10.0  # of a connection that asks nothing
_LONGEST_S: Final = 60.0  # of a connection in all: a page is some MB, and has one question for each
_MOST: Final = 64  # connections; of more the oldest are given up
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest is in the page
}


@dataclass(frozen=True)
class Answer:
    """An answer: its status, its type of content, its body and what names it."""

    status: HTTPStatus
    kind: str = "text/plain"
    body: bytes = b""
    tag: str = ""


@final
class PageServer:
    """Listens at `host` and `port` while it is entered; `publish` changes what it shows.

    Raises UsageError where it cannot listen there. Port 0 is any free one, and `url` has it. On leaving, threads and
    connections end; an open page has had some seconds to get what was published last.
    """

    def __init__(self, host: str, port: int) -> None:
        page = live_page("Runs", _EVERY_MS).encode()
        self._page = Answer(HTTPStatus.OK, "text/html; charset=utf-8", page, _tag(page))
        self._runs: Sequence[RunView] = ()
        self._over = False
        self._data: Answer | None = None
        self._building = threading.Lock()
        self._asked = threading.Event()  # by a page since the last change
        self._informed = threading.Event()  # a page that nothing more comes
        self._host = host
        self._server = _listening(host, port, self)
        self._thread = threading.Thread(target=self._server.serve_forever, name="page server")

    @property
    def url(self) -> str:
        """The address for a browser."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._over and self._asked.is_set():
            self._informed.wait(_LINGER_S)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, runs: Sequence[RunView], over: bool) -> None:
        """Show these runs; with `over` nothing more is to come."""
        if over != self._over or _state(runs) != _state(self._runs):
            with self._building:
                self._runs, self._over, self._data = runs, over, None

    def answer(self, path: str, host: str, tag: str) -> Answer:
        """Return the answer to GET: `host` is the name in the request, `tag` the answer that is known there."""
        if not is_own(host, self._host):
            return Answer(HTTPStatus.FORBIDDEN, body=b"this name is not one of this machine")
        match path.partition("?")[0]:
            case "/":
                found = self._page
            case "/data":
                found = self._current()
            case _:
                return Answer(HTTPStatus.NOT_FOUND, body=b"there is / and /data")
        return Answer(HTTPStatus.NOT_MODIFIED, tag=found.tag) if tag == found.tag else found

    def _current(self) -> Answer:
        """Return what was published last; it is made where a page asks for it, not before."""
        with self._building:
            if self._data is None:
                body = live_data(self._runs, self._over)
                self._data = Answer(HTTPStatus.OK, "application/json", body, _tag(body))
            (self._informed if self._over else self._asked).set()
            return self._data


def is_own(header: str, host: str) -> bool:
    """Say whether `header`, the header Host, is an address or names this machine, of which `host` is a name."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    name = name.removeprefix("[").removesuffix("]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", host.lower(), socket.gethostname().lower())
    return True


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def live_data(runs: Sequence[RunView], over: bool) -> bytes:
    """Return the JSON for a live page; `over` says that nothing more is to come."""
    found = {"title": title(runs), "over": over, "parts": live_parts(live_sections(runs))}
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")


def _state(runs: Collection[RunView]) -> list[object]:
    """Return what changes with all that is shown of runs."""
    return [replace(run, history=History(last=run.history.last, status=run.status), notices=()) for run in runs]


def _listening(host: str, port: int, server: PageServer) -> ThreadingHTTPServer:
    class Request(BaseHTTPRequestHandler):
        """A request to this server."""

        timeout = _SILENT_S
        server_version, sys_version = "lockstep", ""

        def do_GET(self) -> None:
            found = server.answer(self.path, self.headers.get("Host", ""), self.headers.get("If-None-Match", ""))
            self.send_response(found.status)
            for name, value in _headers(found).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.body)

        def log_message(self, *_: object) -> None:
            """Say nothing: the terminal shows the runs."""

    with os_error_as(UsageError, f"--host {host}: no address of this machine"):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]

    opened: dict[socket.socket, float] = {}  # since when

    class Listener(ThreadingHTTPServer):
        """One thread for each request, of which none keeps the program from ending, nor others from being answered."""

        address_family = family
        daemon_threads = True
        request_queue_size = 2 * _MOST  # of a full queue the kernel drops calls, which are repeated after seconds

        def process_request(self, request: Any, client_address: Any) -> None:
            opened[request] = time.monotonic()
            for old in list(opened)[:-_MOST]:
                _hang_up(old)
            super().process_request(request, client_address)

        def service_actions(self) -> None:
            for old, since in list(opened.items()):
                if time.monotonic() - since > _LONGEST_S:
                    _hang_up(old)

        def shutdown_request(self, request: Any) -> None:
            opened.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, *_: object) -> None:
            """Say nothing of a browser that went away."""

    try:
        return Listener((host, port), Request)
    except OSError as error:
        where = f"--port {port}" if error.errno in (errno.EADDRINUSE, errno.EACCES) else f"--host {host}"
        hint = "; choose another, or 0 for any free one" if where.startswith("--port") else ""
        raise UsageError(f"{where}: cannot listen there: {error.strerror}{hint}") from error


def _hang_up(connection: socket.socket) -> None:
    """End a connection under the thread that reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _headers(found: Answer) -> Mapping[str, str]:
    known = {"ETag": found.tag} if found.tag else {}
    length = {} if found.status == HTTPStatus.NOT_MODIFIED else {"Content-Length": str(len(found.body))}
    return {"Content-Type": found.kind, "Cache-Control": "no-cache", **_HEADERS, **known, **length}
