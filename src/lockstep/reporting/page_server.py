"""Serves the page of watched runs to browsers on this machine. The only paths are / and /data.

Web pages of other sites must not read the runs. Browsers prevent a page from reading responses of a different origin.
However, a site can point its own name to this machine (DNS rebinding). The requests then contain this name as `Host`.
Therefore, the server only responds if the host is an address or a name of this machine.
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

_POLL_MS: Final = 2_000  # milliseconds between two requests of a page
_LINGER_S: Final = 2.5 * _POLL_MS / 1_000  # seconds to serve after the end, so that pages get the last update
_IDLE_TIMEOUT_S: Final = 10.0  # timeout in seconds of a connection without a request
_MAX_CONNECTION_S: Final = (
    60.0  # maximum duration of a connection; a page has a few MB and uses a connection per request
)
_MAX_CONNECTIONS: Final = 64  # maximum number of connections; beyond this, the oldest connections are closed
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself sets the rest of the policy
}


@dataclass(frozen=True)
class Answer:
    """An HTTP response: status, content type, body, and ETag."""

    status: HTTPStatus
    kind: str = "text/plain"
    body: bytes = b""
    tag: str = ""


@final
class PageServer:
    """A context manager that serves a page on `host` and `port`. Call `publish` to change the runs on the page.

    With port 0, the server uses any free port, and `url` contains it. On exit, open pages have a few seconds to fetch
    the last update before all threads and connections end. Raises UsageError if the server can't listen on the address.
    """

    def __init__(self, host: str, port: int) -> None:
        page = live_page("Runs", _POLL_MS).encode()
        self._page = Answer(HTTPStatus.OK, "text/html; charset=utf-8", page, _tag(page))
        self._runs: Sequence[RunView] = ()
        self._is_final = False
        self._data: Answer | None = None
        self._building = threading.Lock()
        self._data_requested = threading.Event()  # set once a page has requested data
        self._final_update_sent = threading.Event()  # set once a page has received the last update
        self._host = host
        self._server = _make_server(host, port, self)
        self._thread = threading.Thread(target=self._server.serve_forever, name="page server")

    @property
    def url(self) -> str:
        """The URL of the page."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._is_final and self._data_requested.is_set():
            self._final_update_sent.wait(_LINGER_S)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, runs: Sequence[RunView], over: bool) -> None:
        """Show these runs. `over` is whether this is the last update."""
        if over != self._is_final or _state(runs) != _state(self._runs):
            with self._building:
                self._runs, self._is_final, self._data = runs, over, None

    def answer(self, path: str, host: str, tag: str) -> Answer:
        """Return the response to a GET request.

        `host` is the Host header of the request. `tag` is the ETag of the response that the client has cached.
        """
        if not is_own(host, self._host):
            return Answer(HTTPStatus.FORBIDDEN, body=b"Host: not a name or address of this machine")
        match path.partition("?")[0]:
            case "/":
                found = self._page
            case "/data":
                found = self._current()
            case _:
                return Answer(HTTPStatus.NOT_FOUND, body=b"not found: this server has / and /data")
        return Answer(HTTPStatus.NOT_MODIFIED, tag=found.tag) if tag == found.tag else found

    def _current(self) -> Answer:
        """Return the response with the latest update. It is only built when a page requests it."""
        with self._building:
            if self._data is None:
                body = live_data(self._runs, self._is_final)
                self._data = Answer(HTTPStatus.OK, "application/json", body, _tag(body))
            (self._final_update_sent if self._is_final else self._data_requested).set()
            return self._data


def is_own(header: str, host: str) -> bool:
    """Return whether a Host header names this machine. `host` is a name that the server listens on."""
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
    """Return the JSON data of a live page. `over` is whether this is the last update."""
    found = {"title": title(runs), "over": over, "parts": live_parts(live_sections(runs))}
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")


def _state(runs: Collection[RunView]) -> list[object]:
    """Return values that change whenever the page of these runs changes."""
    return [replace(run, history=History(last=run.history.last, status=run.status), notices=()) for run in runs]


def _make_server(host: str, port: int, server: PageServer) -> ThreadingHTTPServer:
    class Request(BaseHTTPRequestHandler):
        """Handles requests to this server."""

        timeout = _IDLE_TIMEOUT_S
        server_version, sys_version = "lockstep", ""

        def do_GET(self) -> None:
            found = server.answer(self.path, self.headers.get("Host", ""), self.headers.get("If-None-Match", ""))
            self.send_response(found.status)
            for name, value in _headers(found).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.body)

        def log_message(self, *_: object) -> None:
            """Print nothing, because the terminal shows the runs."""

    with os_error_as(UsageError, f"--host {host}: not an address of this machine"):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]

    opened: dict[socket.socket, float] = {}  # open connections and their start times

    class Listener(ThreadingHTTPServer):
        """An HTTP server with a daemon thread per request, so that no request blocks the exit or other requests."""

        address_family = family
        daemon_threads = True
        request_queue_size = 2 * _MAX_CONNECTIONS  # if the queue is full, clients only retry after seconds

        def process_request(self, request: Any, client_address: Any) -> None:
            opened[request] = time.monotonic()
            for old in list(opened)[:-_MAX_CONNECTIONS]:
                _shut_down(old)
            super().process_request(request, client_address)

        def service_actions(self) -> None:
            for old, since in list(opened.items()):
                if time.monotonic() - since > _MAX_CONNECTION_S:
                    _shut_down(old)

        def shutdown_request(self, request: Any) -> None:
            opened.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, *_: object) -> None:
            """Ignore browsers that disconnect."""

    try:
        return Listener((host, port), Request)
    except OSError as error:
        where = f"--port {port}" if error.errno in (errno.EADDRINUSE, errno.EACCES) else f"--host {host}"
        hint = "; use a different port, or 0 for any free port" if where.startswith("--port") else ""
        raise UsageError(f"{where}: cannot listen: {error.strerror}{hint}") from error


def _shut_down(connection: socket.socket) -> None:
    """Shut down a connection that a thread is reading from."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _headers(found: Answer) -> Mapping[str, str]:
    known = {"ETag": found.tag} if found.tag else {}
    length = {} if found.status == HTTPStatus.NOT_MODIFIED else {"Content-Length": str(len(found.body))}
    return {"Content-Type": found.kind, "Cache-Control": "no-cache", **_HEADERS, **known, **length}
