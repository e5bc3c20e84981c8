"""Whatever GPUs, library and driver do, in any order: scrapes end in time, and all comes back."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.exporter.rig import Rig, Scrape

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ALL = range(8)
LASTS_S = 6.0
PROMISED_S = 2.0
OF_A_GPU = (
    "*",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetFieldValues",
    "nvmlGpmSampleGet",
    "nvmlGpmMetricsGet",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
)
OF_THE_LIBRARY = (
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlDeviceGetCount_v2",
    "nvmlSystemGetDriverVersion",
    "nvmlEventSetCreate",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
)
CODES = (1, 2, 3, 4, 6, 9, 10, 15, 16, 18, 21, 27, 28, 999, 1234)


def trouble(rng: random.Random) -> str:
    gpu = rng.choice(ALL)
    found = rng.choices(
        (
            f"{gpu} {rng.choice(OF_A_GPU)} hang",
            f"{gpu} {rng.choice(OF_A_GPU)} return {rng.choice(CODES)}",
            f"* {rng.choice(OF_THE_LIBRARY)} {rng.choice(('hang', 'return 1', 'return 9'))}",
            f"epoch {rng.randint(1, 99)}",
            f"order {' '.join(map(str, rng.sample(ALL, rng.randint(0, 8))))}",
            f"mig {gpu}",
            f"lost {gpu}",
            f"{gpu} * sleep {rng.choice((1, 20, 100))}",
            f"* * {rng.choice(('hang', 'return 9', 'return 999'))}",
        ),
        weights=(5, 5, 3, 2, 2, 1, 1, 1, 1),
    )
    return found[0]


def wrong(scrape: Scrape) -> list[str]:
    series = [(name, *sorted(labels.items())) for name, labels, _ in scrape.series]
    uuids = [labels["UUID"] for labels, _ in scrape.all("gpu_up") if "UUID" in labels]
    found = []
    if scrape.took_s > PROMISED_S:
        found.append(f"took {scrape.took_s:.2f} s")
    if len(series) != len(set(series)) or len(uuids) != len(set(uuids)):
        found.append("something is there twice")
    down = {gpu for gpu, up in scrape.up().items() if not up} - {
        gpu for gpu, reason in scrape.reasons().items() if reason == "reset_required"
    }
    if scrape.with_values() & down:
        found.append(f"values of what is down: {scrape.with_values() & down}")
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_anything_may_happen(rig: Rig, seed: int) -> None:
    hurried = "import sentinel.exporter.collector as c; c._REOPEN_S = (0.3, 0.6)"
    rig.program = ("-c", f"{hurried}\nfrom sentinel.cli import main; main()")
    rig.start("--deadline", "0.5", "--per-process").settled()
    rng, ends = random.Random(seed), time.monotonic() + LASTS_S
    found: list[str] = []
    scrapes: list[int] = []

    def scrape_on() -> None:
        while time.monotonic() < ends:
            found.extend(wrong(rig.scrape()))
            scrapes.append(rig.status("Threads"))

    scrapers = [threading.Thread(target=scrape_on) for _ in range(2)]
    for scraper in scrapers:
        scraper.start()
    while time.monotonic() < ends:
        rig.control(*(trouble(rng) for _ in range(rng.randint(0, 4))))
        time.sleep(rng.uniform(0.05, 0.8))
    for scraper in scrapers:
        scraper.join()
    assert (seed, found) == (seed, [])
    assert len(scrapes) > 10
    assert max(scrapes) <= 3 + 2 * len(ALL) + 6, "two threads a GPU, and a few of the process"
    rig.control()
    rig.scrape_until(
        lambda s: s.with_values() == set(ALL) and s.one("up") == 1 and len(s.all("last_xid")) == 8
    )
    assert "Traceback" not in rig.log()
    assert rig.stop()[0] == 0
