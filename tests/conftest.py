"""What tests share: the rule about skips, and a daemon's face served on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest

if TYPE_CHECKING:
    from sentinel.edges.store import Store
    from tests.web.moment import Face

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
# Minutes each; then the rest of the tests against servers, then all others.
LONG = ("test_kill.py", "test_demo.py", "test_outages.py", "test_backends.py", "test_every_kind.py")
MAY_SKIP = ("data folder", "no GPU")  # words of the reasons that a machine is allowed to have


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help=f"a skipped test fails, unless its reason has one of {MAY_SKIP}",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: side by side, no process waits for one of them at the end."""

    def rank(item: pytest.Item) -> int:
        if item.path.name in LONG and item.path.parent.name in ("integration", "simulation"):
            return LONG.index(item.path.name)
        return len(LONG) + ("/integration/" not in item.path.as_posix())

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _unskipped(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _unskipped(collector.config, (yield))


def _unskipped(config: pytest.Config, report: Report) -> Report:
    """The same report, as a failure where it was skipped without a good reason."""
    if report.skipped and config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        long = report.longrepr
        reason = str(long[2] if isinstance(long, tuple) else long)
        if not any(words in reason for words in MAY_SKIP):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped, which fails here: {reason}"
    return report


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
