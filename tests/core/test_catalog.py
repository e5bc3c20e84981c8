"""The catalogue: names and units of every exporter, and codes that may or may not act."""

import copy
import math
from pathlib import Path

import pytest

from sentinel.core.catalog import NEEDS, ROLES, Catalog, Source
from sentinel.core.domain import Severity
from sentinel.data import load_catalog, merged
from sentinel.data.page import metrics_page

ROOT = Path(__file__).parents[2]
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
        ("dcgm_pcie_rx_throughput", {}, 7, "pcie_rx_bytes_per_s", 7000),
        ("dcgm_fi_prof_pcie_rx_bytes", {}, 7, "pcie_rx_bytes_per_s", 7),
        ("dcgm_power_violation", {}, 2e9, "power_violation_s", 2),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", {}, 1.98e9, "sm_clock_mhz", 1980),
        ("DCGM_FI_DEV_FB_USED_BYTES", {}, 2**30, "fb_used_mib", 1024),
        ("DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL", {}, 1.5, "thermal_violation_s", 1.5),
        ("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", {}, 5e6, "nvlink_mb_per_s", 5),
        ("DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", {}, 3, "nvlink_recovery_errors", 3),
        ("DCGM_EXP_GPU_HEALTH_STATUS", {"health_watch": "NVLINK"}, 20, "dcgm_health", 20),
        ("nvidia_smi_clocks_max_sm_clock_hz", {}, 1.98e9, "sm_clock_max_mhz", 1980),
        ("nvidia_smi_fan_speed_ratio", {}, 0.3, "fan_ratio", 0.3),
        ("nvidia_smi_fan_speed", {"index": "0"}, 30, "fan_ratio", 0.3),
        ("nvidia_smi_fan_speed", {}, 0.3, "fan_ratio", 0.3),
        ("nvidia_smi_pcie_rx_util", {"index": "0"}, 5, "pcie_rx_bytes_per_s", 5000),
        ("nvidia_smi_mig_memory_fb_used", {"index": "0"}, 5, "fb_used_mib", 5),
        (
            "nvidia_smi_clocks_event_reasons_counters_sw_power_cap_seconds",
            {},
            2,
            "power_violation_s",
            2,
        ),
        (
            "nvidia_smi_clocks_event_reasons_counters_sw_power_cap",
            {},
            2e6,
            "power_violation_s",
            2,
        ),
        ("gpu_dcgm_utilization_ratio", {}, 0.5, "gr_engine_active_ratio", 0.5),
        ("gpu_dcgm_clock_frequency_hertz", {}, 1.98e9, "sm_clock_mhz", 1980),
        ("gpu_dcgm_memory_bytes_used", {"gpu_memory_state": "free"}, 2**20, "fb_free_mib", 1),
        ("gpu_dcgm_ecc_errors_total", {"gpu_error_type": "dbe"}, 1, "ecc_dbe_volatile", 1),
        ("nvidia_gpu_clock", {"type": "mem"}, 1593, "mem_clock_mhz", 1593),
        ("nvidia_gpu_sm_util_percent", {"ordinal": "0"}, 0.5, "sm_active_ratio", 0.5),
        ("nvidia_power_usage", {"minor": "0"}, 72000, "power_w", 72),
        ("nvidia_pcie_tx_bytes", {"minor": "0"}, 72, "pcie_tx_bytes_per_s", 72000),
        ("nvidia_gpu_fanspeed_percent", {}, 30, "fan_ratio", 0.3),
        ("nvidia_smi_utilization_gpu", {"gpu": "0"}, 1, "gpu_util_ratio", 0.01),
        ("nvidia_smi_utilization_memory", {"gpu": "0"}, 1, "mem_copy_util_ratio", 0.01),
        ("nvidia_smi_fan_speed", {"gpu": "0"}, 30, "fan_ratio", 0.3),
        ("nvidia_gpu_utilization_ratio", {}, 0.5, "gpu_util_ratio", 0.5),
        ("nvidia_gpu_power_limit_watts", {}, 170, "power_limit_w", 170),
        ("nvidia_gpu_fan_speed_percent", {}, 30, "fan_ratio", 0.3),
    ],
)
def test_a_source_name_resolves_to_its_column_and_unit(name, labels, raw, metric, value):
    column, scale, offset = CATALOG.resolve(name, labels)
    assert CATALOG.names[column] == metric
    assert raw * scale + offset == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("gpu_dcgm_memory_bytes_used", {}),  # used, free or reserved: it does not say
        ("gpu_dcgm_pipe_utilization_ratio", {"gpu_pipe": "fp64"}),
        ("nvidia_gpu_clock", {"type": "video"}),
        ("nvidia_gpu_ecc_errors", {"error": "corrected"}),
        ("nvidia_gpu_sm_util_percent", {}),  # of another exporter: the unit is not known
        ("nvidia_smi_encoder_stats_session_count", {"index": "0"}),
    ],
)
def test_a_name_without_the_labels_that_tell_its_meaning_resolves_to_nothing(name, labels):
    assert CATALOG.resolve(name, labels) is None


@pytest.mark.parametrize(
    ("labels", "metric", "name", "value"),
    [
        ({"remapped_rows_failure": "Yes"}, "remap_failure", "graphics", 1),
        ({"remapped_rows_failure": "No"}, "remap_failure", "graphics", 0),
        ({"remapped_rows_pending": "Yes"}, "remap_pending", "video", 1),
    ],
)
def test_what_telegraf_writes_as_a_label_is_read_off_another_series(labels, metric, name, value):
    column, scale, offset = CATALOG.resolve(f"nvidia_smi_clocks_current_{name}", labels)
    assert (CATALOG.names[column], 1410 * scale + offset) == (metric, value)


def test_each_throttle_reason_of_telegraf_is_a_bit_of_its_own():
    bits = {}
    for alias in CATALOG.names_of(CATALOG.column("throttle_reasons")):
        for label, said in alias.where:
            bits.setdefault(label.removeprefix("clocks_event_reason_"), {})[said] = alias.offset
    assert {name: told["Active"] for name, told in bits.items()} == {
        "sw_power_cap": 4,
        "hw_slowdown": 8,
        "sw_thermal_slowdown": 32,
        "hw_thermal_slowdown": 64,
        "hw_power_brake_slowdown": 128,
        "gpu_idle": 1,
    }
    assert {told["Not Active"] for told in bits.values()} == {0}


def test_a_sliding_count_and_a_counter_of_xids_are_told_apart():
    sliding = CATALOG.alias("DCGM_EXP_XID_ERRORS_COUNT", {"xid": "79"})
    total = CATALOG.alias("DCGM_EXP_XID_ERRORS_TOTAL", {"xid": "79"})
    assert (sliding.window_s, total.window_s) == (300, math.inf)
    assert sliding.source is total.source is Source.XID_COUNT


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


def test_every_metric_says_what_it_adds_and_what_it_needs():
    needed = {need for metric in CATALOG.metrics for need in metric.needs}
    assert needed == set(NEEDS)
    for metric in CATALOG.metrics:
        assert 10 < len(metric.adds) < 130, metric.name
        assert not metric.adds.endswith("."), metric.name
        for word in ("nvlink", "ecc"):
            if metric.name.startswith(word):
                assert word in metric.needs, metric.name


def test_the_default_list_of_dcgm_exporter_is_marked():
    default = {a.name for a in CATALOG.aliases if a.exporter == "dcgm" and a.standard}
    listed = """SM_CLOCK MEM_CLOCK MEMORY_TEMP GPU_TEMP POWER_USAGE TOTAL_ENERGY_CONSUMPTION
        PCIE_REPLAY_COUNTER GPU_UTIL MEM_COPY_UTIL ENC_UTIL DEC_UTIL XID_ERRORS FB_FREE FB_USED
        FB_RESERVED UNCORRECTABLE_REMAPPED_ROWS CORRECTABLE_REMAPPED_ROWS ROW_REMAP_FAILURE
        NVLINK_BANDWIDTH_TOTAL VGPU_LICENSE_STATUS"""
    profiling = "GR_ENGINE_ACTIVE PIPE_TENSOR_ACTIVE DRAM_ACTIVE PCIE_TX_BYTES PCIE_RX_BYTES"
    assert default == {f"DCGM_FI_DEV_{name}" for name in listed.split()} | {
        f"DCGM_FI_PROF_{name}" for name in profiling.split()
    }


def test_every_exporter_has_names_and_says_what_it_is():
    used = {alias.exporter for alias in CATALOG.aliases}
    assert used == set(CATALOG.exporters)
    assert all(len(text) > 10 for text in CATALOG.exporters.values())


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
        ({"kind": "guess"}, {}, "temp_c: kind"),
        ({"needs": ["luck"]}, {}, "temp_c: needs: 'luck'"),
        (
            {"aliases": [{"exporter": "x", "names": ["t"], "code_label": "xid"}]},
            {},
            "code_label: only an Xid",
        ),
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


# ---- rows of one's own -----------------------------------------------------------------


def test_a_row_of_ones_own_adds_a_name_and_leaves_the_rest():
    row = {"name": "power_w", "aliases": [{"names": ["site_gpu_milliwatts"], "scale": 0.001}]}
    catalog = load_catalog([row])
    assert catalog.resolve("site_gpu_milliwatts", {}) == (catalog.column("power_w"), 0.001, 0)
    assert catalog.names == CATALOG.names
    assert set(catalog.sources) == {*CATALOG.sources, "site_gpu_milliwatts"}
    assert catalog.metrics == CATALOG.metrics
    assert catalog.alias("site_gpu_milliwatts", {}).exporter == "own"
    assert "own" in catalog.exporters


def test_an_alias_of_ones_own_displaces_the_shipped_one_of_the_same_name_and_labels():
    name = "nvidia_power_usage"  # one exporter says milliwatts, another of the same names watts
    row = {"name": "power_w", "aliases": [{"exporter": "phstudy", "names": [name]}]}
    catalog = load_catalog([row])
    assert catalog.resolve(name, {}) == (catalog.column("power_w"), 1, 0)
    assert [a.exporter for a in catalog.aliases if a.name == name] == ["phstudy"]
    only = {**row, "aliases": [{"names": [name], "where": {"job": "phstudy"}}]}
    catalog = load_catalog([only])
    assert catalog.resolve(name, {"job": "phstudy"})[1] == 1
    assert catalog.resolve(name, {"job": "bugroger"})[1] == 0.001


def test_an_alias_may_move_to_another_metric():
    row = {"name": "energy_j", "aliases": [{"names": ["DCGM_FI_DEV_POWER_USAGE"]}]}
    catalog = load_catalog([row])
    assert catalog.resolve("DCGM_FI_DEV_POWER_USAGE", {})[0] == catalog.column("energy_j")
    (row,) = [a for a in catalog.aliases if a.name == "DCGM_FI_DEV_POWER_USAGE"]
    assert row.column == catalog.column("energy_j")


def test_keys_that_are_given_replace_those_of_the_metric():
    catalog = load_catalog([{"name": "temp_c", "valid": [1, 90], "label": "heat"}])
    old, new = (c.metrics[c.column("temp_c")] for c in (CATALOG, catalog))
    assert (new.valid_max, new.label) == (90, "heat")
    assert (new.unit, new.role, new.source) == (old.unit, old.role, old.source)
    assert catalog.names_of(catalog.column("temp_c")) == CATALOG.names_of(CATALOG.column("temp_c"))


def test_a_metric_of_ones_own_comes_after_all_others():
    row = {
        "name": "liquid_temp_c",
        "unit": "°C",
        "role": "state",
        "valid": [1, 90],
        "aliases": [{"names": ["rack_liquid_celsius"], "where": {"side": "inlet"}}],
    }
    catalog = load_catalog([row])
    assert catalog.names == (*CATALOG.names, "liquid_temp_c")
    assert catalog.resolve("rack_liquid_celsius", {"side": "inlet"})[0] == len(CATALOG.names)
    assert catalog.resolve("rack_liquid_celsius", {"side": "outlet"}) is None
    assert load_catalog().names == CATALOG.names  # nothing is left behind


def test_a_count_of_xids_of_ones_own():
    alias = {"names": ["site_xids_total"], "code_label": "code"}
    row = load_catalog([{"name": "xid", "aliases": [alias]}]).alias("site_xids_total", {})
    assert (row.source, row.code_label, row.column) == (Source.XID_COUNT, "code", -1)


def test_merging_changes_nothing_that_was_given():
    plain = {"exporters": {"x": "an exporter"}, "metrics": [GOOD_METRIC]}
    before = copy.deepcopy(plain)
    rows = [{"name": "temp_c", "aliases": [{"names": ["t"]}]}]
    made = merged(plain, rows)
    assert plain == before
    assert rows == [{"name": "temp_c", "aliases": [{"names": ["t"]}]}]
    assert made["metrics"][0]["aliases"] == [{"exporter": "own", "names": ["t"]}]
    assert merged(plain, ())["metrics"] == plain["metrics"]


def test_the_page_of_the_metrics_is_up_to_date_and_has_all_of_them():
    page = (ROOT / "docs" / "metrics-read.md").read_text()
    assert page == metrics_page(CATALOG), "run `make generated` and commit"
    for metric in CATALOG.metrics:
        assert f"\n### {metric.name}\n" in page
        assert metric.adds in page
    for name in CATALOG.sources:
        assert name == "up" or f"`{name}" in page, name
