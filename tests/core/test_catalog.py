"""The catalogue: names and units of every exporter, and codes that may or may not act."""

import math

import pytest

from sentinel.core.catalog import ROLES, Catalog, Source
from sentinel.core.domain import Severity
from sentinel.data import load_catalog

CATALOG = load_catalog()


@pytest.mark.parametrize(
    ("name", "labels", "raw", "metric", "value"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", {}, 61, "temp_c", 61),
        ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", {}, 61, "temp_c", 61),
        ("dcgm_gpu_temp", {}, 61, "temp_c", 61),
        ("nvidia_gpu_temperature", {}, 61, "temp_c", 61),
        ("accelerator_nvidia_temperature_current_celsius", {}, 61, "temp_c", 61),
        ("DCGM_FI_DEV_BOARD_POWER_WATTS", {}, 400, "power_w", 400),
        ("accelerator_nvidia_power_current_usage_milli_watts", {}, 4e5, "power_w", 400),
        ("nvidia_gpu_power_usage_milliwatts", {}, 4e5, "power_w", 400),
        ("DCGM_FI_DEV_GPU_UTIL", {}, 50, "gpu_util_ratio", 0.5),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", {}, 50, "gpu_util_ratio", 0.5),
        ("nvidia_smi_utilization_gpu_ratio", {}, 0.5, "gpu_util_ratio", 0.5),
        ("nvidia_smi_utilization_gpu", {"index": "0"}, 50, "gpu_util_ratio", 0.5),
        ("nvidia_smi_utilization_gpu", {"uuid": "x"}, 0.5, "gpu_util_ratio", 0.5),
        ("DCGM_FI_DEV_FB_USED", {}, 1024, "fb_used_mib", 1024),
        ("nvidia_smi_memory_used_bytes", {}, 2**30, "fb_used_mib", 1024),
        ("nvidia_smi_memory_used", {}, 1024, "fb_used_mib", 1024),
        ("nvidia_smi_clocks_current_sm_clock_hz", {}, 1.98e9, "sm_clock_mhz", 1980),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", {}, 5000, "energy_j", 5),
        ("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", {}, 5, "pcie_tx_bytes_per_s", 5000),
        ("DCGM_FI_DEV_ROW_REMAP_FAILED", {}, 1, "remap_failure", 1),
        ("DCGM_FI_DEV_XID_ERROR", {}, 79, "xid", 79),
        ("dcgm_xid_errors", {}, 79, "xid", 79),
    ],
)
def test_a_source_name_resolves_to_its_column_and_unit(name, labels, raw, metric, value):
    column, scale, offset = CATALOG.resolve(name, labels)
    assert CATALOG.names[column] == metric
    assert raw * scale + offset == pytest.approx(value)


def test_what_is_no_gpu_metric_resolves_to_nothing():
    assert CATALOG.resolve("node_cpu_seconds_total", {}) is None
    assert CATALOG.resolve("up", {}) is None
    assert CATALOG.resolve("nvidia_smi_gpu_info", {}) is None
    assert CATALOG.resolve("DCGM_EXP_XID_ERRORS_COUNT", {"xid": "79"}) is None
    with pytest.raises(KeyError):
        CATALOG.column("nonsense")


def test_one_name_may_be_a_gauge_or_a_count():
    assert CATALOG.alias("dcgm_xid_errors", {}).source is Source.XID_GAUGE
    count = CATALOG.alias("dcgm_xid_errors", {"xid": "31"})
    assert (count.source, count.code_label, count.window_s) == (Source.XID_COUNT, "xid", math.inf)


def test_every_metric_is_complete():
    for metric in CATALOG.metrics:
        assert metric.role in ROLES
        assert metric.valid_min < metric.valid_max
        assert metric.source
        assert metric.label
    assert len(set(CATALOG.names)) == len(CATALOG.names)


def test_the_names_fit_one_query():
    query = "|".join(CATALOG.sources)
    assert "up" in CATALOG.sources
    assert len(query) < 16_384
    assert all(name.isascii() and name.replace("_", "").isalnum() for name in CATALOG.sources)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 8, 37, 66, 67, 68, 69, 92, 93, 94, 121, 137, 141])
def test_a_code_that_applications_cause_never_acts(code):
    row = CATALOG.xid(code)
    assert (row.fence, row.move) == (False, False)
    assert row.severity is not Severity.CRITICAL


@pytest.mark.parametrize("code", [46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151])
def test_a_code_that_only_hardware_causes_fences_and_moves(code):
    row = CATALOG.xid(code)
    assert (row.fence, row.move, row.severity) == (True, True, Severity.CRITICAL)


def test_every_code_has_words_and_provenance():
    for row in CATALOG.xids():
        assert row.meaning
        assert row.source
        assert 3 <= len(row.pattern) <= 40
    assert CATALOG.xid(79).pattern == "off the bus"
    assert CATALOG.xid(104) == CATALOG.xid(104)
    assert len(CATALOG.xids()) > 90


def test_an_unknown_code_warns_and_does_nothing():
    row = CATALOG.xid(999)
    assert (row.severity, row.fence, row.move) == (Severity.WARNING, False, False)
    assert "999" in row.pattern


GOOD_METRIC = {
    "name": "temp_c",
    "role": "response",
    "valid": [1, 130],
    "source": "s",
    "aliases": [{"exporter": "x", "names": ["t"]}],
}
GOOD_XID = {"codes": 1, "meaning": "m", "pattern": "p", "severity": "info", "source": "s"}


@pytest.mark.parametrize(
    ("metric", "xid", "said"),
    [
        ({"role": "wish"}, {}, "metrics[0] temp_c: role"),
        ({"valid": [5, 1]}, {}, "temp_c: valid"),
        ({"valid": None}, {}, "temp_c: valid"),
        ({"fold": "mean"}, {}, "temp_c: fold"),
        ({"source": 7}, {}, "temp_c: source"),
        ({"surprise": 1}, {}, "temp_c: unknown keys ['surprise']"),
        ({"aliases": [{"exporter": "y", "names": ["t"]}]}, {}, "alias 0: exporter: 'y'"),
        ({"aliases": [{"exporter": "x", "names": []}]}, {}, "alias 0: names"),
        ({"aliases": [{"exporter": "x", "names": ["t", "t"]}]}, {}, "t: under x and x"),
        ({}, {"codes": "9-x"}, "xids[0]: codes"),
        ({}, {"codes": [1, 1]}, "code 1 is there twice"),
        ({}, {"severity": "awful"}, "xids[0] [1]: severity"),
        ({}, {"move": True}, "move without fence"),
        ({}, {"fence": "yes"}, "xids[0] [1]: fence"),
    ],
)
def test_a_bad_row_is_named(metric, xid, said):
    plain = {"exporters": {"x": "an exporter"}, "metrics": [GOOD_METRIC | metric]}
    with pytest.raises(ValueError, match="yaml") as error:
        Catalog.from_plain(plain, {"xids": [GOOD_XID | xid]})
    assert said in str(error.value)


def test_all_bad_rows_are_named_at_once():
    plain = {"exporters": {}, "metrics": [GOOD_METRIC, GOOD_METRIC]}
    with pytest.raises(ValueError, match="yaml") as error:
        Catalog.from_plain(plain, {"xids": [GOOD_XID, GOOD_XID, "no row"]})
    assert len(str(error.value).splitlines()) >= 4
