"""A face over a real store, and its HTTP server on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sentinel.core.domain import Control, Step
from sentinel.edges.store import Store
from sentinel.web.app import create_app
from sentinel.web.server import Server
from tests.web.moment import CONTROL, DECISION, JUDGEMENT, NOW_S, SECRET, TOKEN, Face


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(dir=tmp_path)
    opened.commit(Control(), Step(CONTROL, JUDGEMENT, (DECISION,), (), ()))
    yield opened
    opened.close()


@pytest.fixture
def face(store: Store) -> Face:
    return Face(store)


@pytest.fixture
def serve() -> Iterator[Callable[..., httpx.Client]]:
    """Serves a face on loopback for the length of a test, and gives a client of it."""
    with contextlib.ExitStack() as opened:

        def start(face: Face, **options: Any) -> httpx.Client:
            server = Server(create_app(face, clock=lambda: NOW_S + 1, **options))
            server.start("127.0.0.1:0")
            opened.callback(server.stop)
            return opened.enter_context(httpx.Client(base_url=server.url, trust_env=False))

        yield start


@pytest.fixture
def client(face: Face, serve: Callable[..., httpx.Client]) -> httpx.Client:
    return serve(face, token=TOKEN, hook_secret=SECRET)
