"""The server of the page, asked over loopback: what it answers, to whom, and that it leaves nothing behind."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
from event_examples import stepped
from view_examples import GOING, viewed

from lockstep.errors import UsageError
from lockstep.reporting import page_server
from lockstep.reporting.page_server import PageServer, is_local_host


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer("127.0.0.1", 0) as server:
        yield server


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def test_a_page_and_its_data(server: PageServer) -> None:
    answer = ask(server, "/")
    assert answer.status == 200
    assert b'<div class="sections" id="sections"' in answer.read()
    server.publish([viewed(*GOING)], is_final=False)
    answer = ask(server, "/data")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert json.loads(answer.read())["title"] == "running 10 % runs/a"


def test_what_is_known_is_not_sent_again_and_what_is_new_is(server: PageServer) -> None:
    server.publish([viewed(*GOING)], is_final=False)
    tag = ask(server, "/data").headers["ETag"]
    server.publish([viewed(*GOING)], is_final=False)
    answer = ask(server, "/data", If_None_Match=tag)
    assert (answer.status, answer.read()) == (304, b"")
    server.publish([viewed(*GOING, (170.0, stepped(138)))], is_final=False)
    answer = ask(server, "/data", If_None_Match=tag)
    assert answer.status == 200
    assert json.loads(answer.read())["title"] == "running 20 % runs/a"


@pytest.mark.parametrize("path", ["/etc/passwd", "/../events.jsonl", "/data/", "/index.html", "/%2e%2e/"])
def test_there_is_nothing_else(server: PageServer, path: str) -> None:
    assert ask(server, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_it_is_only_asked(server: PageServer, method: str) -> None:
    assert ask(server, "/data", method).status == 501


@pytest.mark.parametrize("host", ["example.org", "example.org:80", "127.0.0.1.example.org", "", "[::1].example.org"])
def test_a_name_that_was_made_to_lead_here_gets_nothing(server: PageServer, host: str) -> None:
    for path in ("/", "/data"):
        answer = ask(server, path, Host=host)
        assert answer.status == 403
        assert b"runs" not in answer.read()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:9000", "[::1]:8080", "LOCALHOST", "192.0.2.7:80", "node-7:80"]
)
def test_addresses_and_names_of_this_machine_are_answered(host: str) -> None:
    assert is_local_host(host, "node-7")  # of any port: a tunnel has another


def test_a_port_that_is_taken_and_a_host_that_is_not_here() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"--port {port}: cannot listen: .*; use a different port, or 0 for any free port"
        ):
            PageServer("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1: cannot listen: "):
        PageServer("192.0.2.1", 0)
    with pytest.raises(UsageError, match="--host no host: not an address of this machine"):
        PageServer("no host", 0)


def test_it_leaves_no_thread_and_no_port_though_a_connection_says_nothing() -> None:
    before = threading.active_count()
    with PageServer("127.0.0.1", 0) as server:
        where = urlsplit(server.url)
        silent = socket.create_connection((str(where.hostname), where.port or 0))
        assert ask(server, "/data").status == 200  # beside the silent one
    silent.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((str(where.hostname), where.port or 0))
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_open_page_learns_of_the_end_and_without_one_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_FINAL_UPDATE_TIMEOUT_S", 10.0)
    learned: list[bool] = []
    began = time.monotonic()
    with PageServer("127.0.0.1", 0) as server:
        server.publish([viewed(*GOING)], is_final=True)
    assert time.monotonic() - began < 5
    with PageServer("127.0.0.1", 0) as server:
        ask(server, "/data")
        later = threading.Timer(0.3, lambda: learned.append(json.loads(ask(server, "/data").read())["over"]))
        later.start()
        server.publish([viewed(*GOING)], is_final=True)
    later.join()
    assert learned == [True]
    assert time.monotonic() - began < 9


def test_many_silent_connections_keep_nobody_waiting_and_the_oldest_are_given_up() -> None:
    with PageServer("127.0.0.1", 0) as server, ExitStack() as held:
        where = urlsplit(server.url)
        address = (str(where.hostname), where.port or 0)
        silent = [held.enter_context(closing(socket.create_connection(address, timeout=5))) for _ in range(120)]
        began = time.monotonic()
        assert ask(server, "/data").status == 200
        assert time.monotonic() - began < 2
        assert silent[0].recv(1) == b""  # it has ended, long before it would have been silent for too long


def test_a_client_that_sends_a_byte_now_and_then_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_MAX_CONNECTION_S", 0.3)
    with PageServer("127.0.0.1", 0) as server:
        where = urlsplit(server.url)
        with socket.create_connection((str(where.hostname), where.port or 0)) as slow:
            slow.settimeout(0.05)
            began = time.monotonic()
            while not _is_over(slow):
                assert time.monotonic() - began < 5


def _is_over(slow: socket.socket) -> bool:
    try:
        slow.sendall(b"G")
        return slow.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
