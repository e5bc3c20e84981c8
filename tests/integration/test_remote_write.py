"""What the remote writer sends is what a real Prometheus gives back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests

from sentinel.errors import DependencyError
from sentinel.lab import servers
from sentinel.lab.remote_write import RemoteWriter

pytestmark = pytest.mark.integration

NOW = float(int(time.time()) // 60 * 60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.prometheus(tmp_path_factory.mktemp("prometheus")) as running:
        yield running


def raw(server: servers.Server, selector: str, at_s: float, window: str) -> list[dict[str, Any]]:
    parameters: dict[str, str | float] = {"query": f"{selector}[{window}]", "time": at_s}
    answer = requests.get(f"{server.url}/api/v1/query", params=parameters, timeout=60).json()
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def test_a_day_of_few_series_comes_back_to_the_bit(server: servers.Server) -> None:
    times = NOW - 86400 + np.arange(0, 86400 - 7200, 30) + 0.123
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1e6, (3, len(times)))
    values[1, ::2] = np.nan
    values[2, :] = np.nan
    values[0, :4] = [0.0, -0.0, np.inf, -np.inf]
    labels = [{"z": "ü", "__name__": "exact", "n": str(n), "empty": ""} for n in range(3)]
    with RemoteWriter(server.url) as writer:
        assert writer.write(labels, times, values) == len(times) + len(times) // 2
    got = {r["metric"]["n"]: r for r in raw(server, "exact", NOW - 7200, "1d")}
    assert set(got) == {"0", "1"}
    assert got["0"]["metric"] == {"__name__": "exact", "n": "0", "z": "ü"}
    assert [t for t, _ in got["0"]["values"]] == pytest.approx(times.tolist(), abs=1e-6)
    assert [float(v) for _, v in got["0"]["values"]] == values[0].tolist()
    assert [float(v) for _, v in got["1"]["values"]] == values[1, 1::2].tolist()


def test_refusals_name_the_reason(server: servers.Server) -> None:
    labels = [{"__name__": "late"}]
    with RemoteWriter(server.url) as writer:
        writer.write(labels, np.array([NOW - 60]), np.array([[1.0]]))
        with pytest.raises(DependencyError, match="before scraping begins"):
            writer.write(labels, np.array([NOW - 90000]), np.array([[1.0]]))
    with RemoteWriter(f"http://127.0.0.1:{servers.free_port()}") as nobody:
        with pytest.raises(DependencyError, match="failed"):
            nobody.write(labels, np.array([NOW]), np.array([[1.0]]))
        with pytest.raises(ValueError, match="increase"):
            nobody.write(labels, np.array([NOW, NOW]), np.zeros((1, 2)))
        with pytest.raises(ValueError, match="values are"):
            nobody.write(labels, np.array([NOW]), np.zeros((2, 1)))
        with pytest.raises(ValueError, match="__name__"):
            nobody.write([{"name": "x"}], np.array([NOW]), np.zeros((1, 1)))


@pytest.mark.slow
def test_a_day_of_two_thousand_series_takes_seconds(tmp_path_factory: Any) -> None:
    times = NOW - 86400 + np.arange(2880) * 30.0
    rng = np.random.default_rng(2)
    level = np.round(rng.normal(60, 5, (2000, 2880)), 1)
    labels = [
        {"__name__": f"m{n % 16}", "UUID": f"GPU-{n // 16:08x}", "job": "dcgm-exporter"}
        for n in range(2000)
    ]
    with servers.prometheus(tmp_path_factory.mktemp("big")) as server:
        with RemoteWriter(server.url) as writer:
            start = time.monotonic()
            for column in range(0, 2880, 120):
                part = slice(column, column + 120)
                writer.write(labels, times[part], level[:, part])
            elapsed = time.monotonic() - start
        assert writer.samples_sent == 5_760_000
        count = requests.get(
            f"{server.url}/api/v1/query",
            params={"query": "sum(count_over_time(m3[1d]))", "time": str(NOW)},
            timeout=60,
        ).json()["data"]["result"][0]["value"][1]
    assert int(count) == 2880 * 125
    assert elapsed < 40, f"{elapsed:.1f} s for 5.8 M samples"
    print(f"{elapsed:.1f} s for 5.8 M samples")
