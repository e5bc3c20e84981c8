"""The HTTP server as the daemon starts and stops it."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import pytest

from sentinel.errors import DependencyError
from sentinel.web.app import create_app
from sentinel.web.server import Server
from tests.web.moment import Face


def test_it_answers_when_start_returns_and_is_gone_when_stop_returns(face: Face) -> None:
    server = Server(create_app(face, token=None, hook_secret=None))
    server.start("127.0.0.1:0")
    url = server.url
    assert httpx.get(f"{url}/-/healthy", trust_env=False).status_code == 200
    server.stop()
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/-/healthy", trust_env=False)
    assert "http" not in [t.name for t in threading.enumerate()]


def test_it_starts_again_on_its_old_port(face: Face) -> None:
    server = Server(create_app(face, token=None, hook_secret=None))
    server.start("127.0.0.1:0")
    listen = server.url.removeprefix("http://")
    with httpx.Client(trust_env=False) as client:
        client.get(f"{server.url}/-/healthy")
        server.stop()
    server.start(listen)
    assert httpx.get(f"http://{listen}/-/healthy", trust_env=False).status_code == 200
    server.stop()


def test_a_busy_port_is_told_to_whoever_starts_it(face: Face) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        server = Server(create_app(face, token=None, hook_secret=None))
        with pytest.raises(DependencyError, match=f"http.listen {listen}: cannot listen there"):
            server.start(listen)
        server.stop()


def test_an_address_of_another_machine_is_told(face: Face) -> None:
    server = Server(create_app(face, token=None, hook_secret=None))
    with pytest.raises(DependencyError, match="cannot listen there"):
        server.start("192.0.2.77:9477")


def test_an_unstarted_server_stops_without_a_word(face: Face) -> None:
    Server(create_app(face, token=None, hook_secret=None)).stop()


def test_a_client_that_never_finishes_its_request_holds_nobody_up(face: Face) -> None:
    server = Server(create_app(face, token=None, hook_secret=None))
    server.start("127.0.0.1:0")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"GET /-/healthy HTTP/1.1\r\nhost: x\r\n")
        assert httpx.get(f"{server.url}/-/ready", trust_env=False, timeout=5).status_code == 503
        began = time.monotonic()
        server.stop()
    assert time.monotonic() - began < 5
