"""What tests share: the rule about skips, and a daemon's face served on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from sentinel.edges.store import Store
    from tests.web.moment import Face

MAY_SKIP = ("data folder", "no GPU")  # words of the reasons that a machine is allowed to have


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help=f"a skipped test fails, unless its reason has one of {MAY_SKIP}",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = (yield).get_result()  # type: ignore[misc]
    if not (report.skipped and item.config.getoption("--no-skips")):
        return
    if hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(words in reason for words in MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which fails here: {reason}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A real store that holds the made-up moment."""
    from sentinel.core.domain import Control, Step
    from sentinel.edges.store import Store
    from tests.web.moment import CONTROL, DECISION, JUDGEMENT

    opened = Store.open(dir=tmp_path / "state")
    opened.commit(Control(), Step(CONTROL, JUDGEMENT, (DECISION,), (), ()))
    yield opened
    opened.close()


@pytest.fixture
def face(store: Store) -> Face:
    from tests.web.moment import Face

    return Face(store)


@pytest.fixture
def serve() -> Iterator[Callable[..., httpx.Client]]:
    """Serves a face on loopback for the length of a test, and gives a client of it."""
    from sentinel.web.app import create_app
    from sentinel.web.server import Server
    from tests.web.moment import NOW_S

    with contextlib.ExitStack() as opened:

        def start(face: Face, **options: Any) -> httpx.Client:
            server = Server(create_app(face, clock=lambda: NOW_S + 1, **options))
            server.start("127.0.0.1:0")
            opened.callback(server.stop)
            return opened.enter_context(httpx.Client(base_url=server.url, trust_env=False))

        yield start


@pytest.fixture
def client(face: Face, serve: Callable[..., httpx.Client]) -> httpx.Client:
    from tests.web.moment import SECRET, TOKEN

    return serve(face, token=TOKEN, hook_secret=SECRET)
