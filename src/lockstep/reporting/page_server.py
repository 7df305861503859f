"""Serves a page about watched runs to browsers. The only paths are / and /data.

Other web sites must not be able to read the runs. Browsers prevent a page from reading responses of a different origin.
However, an attacker can make a domain name resolve to this machine (DNS rebinding). In this case, requests contain the
attacker's domain name in the `Host` header. Therefore, the server only responds if the header contains an IP address or
a name of this machine.
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

from lockstep.errors import UsageError, convert_os_error
from lockstep.reporting.page import render_live_page, render_live_sections
from lockstep.reporting.run_log import History
from lockstep.reporting.run_page import make_live_sections, make_title
from lockstep.reporting.run_view import RunView

_POLL_MS: Final = 2_000  # polling interval of a live page in milliseconds
# Time to keep serving after the runs end, so that pages get the final update.
_FINAL_UPDATE_TIMEOUT_S: Final = 2.5 * _POLL_MS / 1_000
_IDLE_TIMEOUT_S: Final = 10.0  # idle connections are closed after this time
_MAX_CONNECTION_S: Final = (
    60.0  # maximum duration of a connection; a connection serves a single request for at most a few MB
)
_MAX_CONNECTIONS: Final = 64  # maximum number of connections; beyond this, the oldest connections are closed
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the HTML of the page sets the rest of the policy
}


@dataclass(frozen=True)
class Response:
    """An HTTP response: status, content type, body, and ETag."""

    status: HTTPStatus
    content_type: str = "text/plain"
    body: bytes = b""
    etag: str = ""


@final
class PageServer:
    """A context manager that serves a live page on `host` and `port`. Call `publish` to update the page.

    With port 0, the server chooses a free port, which is part of `url`. On exit, the server waits a few seconds for
    open pages to fetch the final update, and then closes all connections and threads. Raises UsageError if the server
    can't listen on the address.
    """

    def __init__(self, host: str, port: int) -> None:
        page = render_live_page("Runs", _POLL_MS).encode()
        self._page = Response(HTTPStatus.OK, "text/html; charset=utf-8", page, _make_etag(page))
        self._runs: Sequence[RunView] = ()
        self._is_final = False
        self._data: Response | None = None
        self._building = threading.Lock()
        self._data_requested = threading.Event()  # set once a page has requested data
        self._final_update_sent = threading.Event()  # set once a page has received the final update
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
            self._final_update_sent.wait(_FINAL_UPDATE_TIMEOUT_S)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, runs: Sequence[RunView], is_final: bool) -> None:
        """Update the runs on the page. Set `is_final` for the final update."""
        if is_final != self._is_final or _make_comparable_state(runs) != _make_comparable_state(self._runs):
            with self._building:
                self._runs, self._is_final, self._data = runs, is_final, None

    def get_response(self, path: str, host: str, etag: str) -> Response:
        """Return the response to a GET request.

        `host` is the Host header of the request, and `etag` is the ETag of the response that the client has cached.
        """
        if not is_local_host(host, self._host):
            return Response(HTTPStatus.FORBIDDEN, body=b"Host: not a name or address of this machine")
        match path.partition("?")[0]:
            case "/":
                response = self._page
            case "/data":
                response = self._get_update()
            case _:
                return Response(HTTPStatus.NOT_FOUND, body=b"not found: this server has / and /data")
        return Response(HTTPStatus.NOT_MODIFIED, etag=response.etag) if etag == response.etag else response

    def _get_update(self) -> Response:
        """Return the response to a data request. After each update, the response is built on the first request."""
        with self._building:
            if self._data is None:
                body = encode_live_data(self._runs, self._is_final)
                self._data = Response(HTTPStatus.OK, "application/json", body, _make_etag(body))
            (self._final_update_sent if self._is_final else self._data_requested).set()
            return self._data


def is_local_host(header: str, host: str) -> bool:
    """Return whether a Host header contains an IP address or a name of this machine.

    `host` is the name or address that the server listens on.
    """
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    name = name.removeprefix("[").removesuffix("]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", host.lower(), socket.gethostname().lower())
    return True


def _make_etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def encode_live_data(runs: Sequence[RunView], is_final: bool) -> bytes:
    """Return the data of a live page as JSON. `is_final` is whether this is the final update."""
    data = {"title": make_title(runs), "over": is_final, "parts": render_live_sections(make_live_sections(runs))}
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")


def _make_comparable_state(runs: Collection[RunView]) -> list[object]:
    """Return a value to compare with `==`, which changes whenever the page of these runs changes."""
    return [replace(run, history=History(last=run.history.last, status=run.status), notices=()) for run in runs]


def _make_server(host: str, port: int, page_server: PageServer) -> ThreadingHTTPServer:
    class Responder(BaseHTTPRequestHandler):
        """Handles requests to the page server."""

        timeout = _IDLE_TIMEOUT_S
        server_version, sys_version = "lockstep", ""

        def do_GET(self) -> None:
            response = page_server.get_response(
                self.path, self.headers.get("Host", ""), self.headers.get("If-None-Match", "")
            )
            self.send_response(response.status)
            for name, value in _make_headers(response).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.body)

        def log_message(self, *_: object) -> None:
            """Print nothing, because the terminal shows the runs."""

    with convert_os_error(UsageError, f"--host {host}: not an address of this machine"):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]

    open_connections: dict[socket.socket, float] = {}  # start time of each open connection

    class Listener(ThreadingHTTPServer):
        """An HTTP server with a daemon thread per request, so that slow requests don't block the exit."""

        address_family = family
        daemon_threads = True
        request_queue_size = 2 * _MAX_CONNECTIONS  # if the queue is full, clients wait seconds before they retry

        def process_request(self, request: Any, client_address: Any) -> None:
            open_connections[request] = time.monotonic()
            for old in list(open_connections)[:-_MAX_CONNECTIONS]:
                _shut_down(old)
            super().process_request(request, client_address)

        def service_actions(self) -> None:
            for old, start_time in list(open_connections.items()):
                if time.monotonic() - start_time > _MAX_CONNECTION_S:
                    _shut_down(old)

        def shutdown_request(self, request: Any) -> None:
            open_connections.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, *_: object) -> None:
            """Ignore errors caused by browsers that disconnect."""

    try:
        return Listener((host, port), Responder)
    except OSError as error:
        option = f"--port {port}" if error.errno in (errno.EADDRINUSE, errno.EACCES) else f"--host {host}"
        hint = "; use a different port, or 0 for any free port" if option.startswith("--port") else ""
        raise UsageError(f"{option}: cannot listen: {error.strerror}{hint}") from error


def _shut_down(connection: socket.socket) -> None:
    """Shut down a connection, even while a thread is reading from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _make_headers(response: Response) -> Mapping[str, str]:
    etag = {"ETag": response.etag} if response.etag else {}
    content_length = {} if response.status == HTTPStatus.NOT_MODIFIED else {"Content-Length": str(len(response.body))}
    return {"Content-Type": response.content_type, "Cache-Control": "no-cache", **_HEADERS, **etag, **content_length}
