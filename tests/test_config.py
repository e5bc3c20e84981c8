"""What a configuration may say, and how its mistakes are told."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel import configfile
from sentinel.config import Config
from sentinel.configfile import ConfigProblems, Problem, keys
from sentinel.configmetrics import AliasRow, MetricRow
from sentinel.core.catalog import NEEDS, ROLES, Fold, MetricKind
from sentinel.core.domain import Mode
from sentinel.core.identity import Identity
from sentinel.core.policy import Policy
from sentinel.data import load_catalog
from sentinel.errors import ConfigError

ROOT = Path(__file__).parent.parent
BAD = sorted((Path(__file__).parent / "config" / "bad").glob("*.yaml"))
URL = 'prometheus: {url: "http://127.0.0.1:9090"}\n'


def parse(text: str, folder: Path = Path("/etc/sentinel")) -> Config:
    return Config.parse(text, folder / "sentinel.yaml")


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_every_mistake_is_told_with_file_key_and_what_to_do(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    with pytest.raises(ConfigProblems) as caught:
        Config.load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert len(caught.value.problems) == 1, "one mistake, one line"


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    text = "prometheus: {url: x}\nmode: go\nlimits: {open_moves: -1, typo: 1}\nlog: {level: LOUD}\n"
    with pytest.raises(ConfigProblems) as caught:
        parse(text)
    told = [(p.line, p.key) for p in caught.value.problems]
    assert told == [
        (1, "prometheus.url"),
        (2, "mode"),
        (3, "limits.open_moves"),
        (3, "limits.typo"),
        (4, "log.level"),
    ]


def test_only_the_url_of_prometheus_is_required_and_defaults_are_the_policys() -> None:
    config = parse(URL)
    assert config.policy() == Policy()
    assert config.policy().mode is Mode.OBSERVE
    assert config.grid_s() == 60.0
    assert config.http.listen == "127.0.0.1:9477"
    assert config.token() is None
    assert config.hook_secret() is None


def test_auto_follows_the_tick() -> None:
    times = parse(URL + "tick: {interval_s: 1}\n").policy().times
    assert (times.tick_s, times.deviant_for_s, times.lost_for_s, times.poll_s) == (1, 30, 1, 1)
    assert (times.clear_for_s, times.evidence_max_age_s, times.sent_timeout_s) == (30, 10, 20)
    config = parse(URL + "tick: {interval_s: 30}\ndetection: {clear_for_s: 5, grid_s: auto}\n")
    assert config.policy().times.clear_for_s == 5
    assert config.policy().times.deviant_for_s == 240
    assert (config.grid_s(), config.pull_window_s(), config.max_age_s()) == (120, 120, 120)
    assert config.tick_deadline_s() == 24


def test_labels_may_have_names_that_prometheus_3_allows() -> None:
    config = parse(URL + "identity: {node_from: [host.name, k8s/node-name]}\n")
    assert config.identity().node_from == ("host.name", "k8s/node-name")


@pytest.mark.parametrize(("written", "read"), [("on", "on"), ("off", "off"), ("auto", "auto")])
def test_on_and_off_may_stand_without_quotes(written: str, read: str) -> None:
    text = f'prometheus: {{url: "http://127.0.0.1:9090", gzip: {written}}}\n'
    assert parse(text).prometheus.gzip == read


def test_the_keys_that_others_rely_on() -> None:
    config = parse(
        """
prometheus: {url: "http://127.0.0.1:9090", selector: ''}
alertmanager: {urls: ["http://127.0.0.1:9093"]}
identity: {cluster: default, node_from: [Hostname, hostname, instance], node_rewrite: []}
jobs: {source: labels, id_from: [hpc_job, exported_pod, pod], settle_s: 300}
detection: {pages_per_week: 2, tickets_per_week: 20}
limits: {open_moves: 1, fenced_nodes: 2, fenced_percent: 1, gpu_hours_lost_per_day: 500}
state: {dir: "./state"}
mode: act
tick: {interval_s: 15}
spares: {hosts: ["gpu-15"], gpus: []}
hook: {kind: webhook, url: "http://127.0.0.1:9999/migrate", secret_file: "hook.secret"}
http: {listen: "127.0.0.1:9477", external_url: "", token_file: "api.token"}
"""
    )
    assert config.policy().spare_nodes == {"gpu-15"}
    assert config.policy().mode is Mode.ACT
    assert config.identity().job_id_from == ("hpc_job", "exported_pod", "pod")
    assert config.state_dir() == Path("/etc/sentinel/state")
    assert config.external_url() == "http://127.0.0.1:9477"


def test_node_names_are_rewritten_by_the_rules_in_the_file() -> None:
    text = URL + r"identity: {node_rewrite: [{match: '\.example$', replace: ''}]}"
    assert parse(text).identity().node_rewrite == ((r"\.example$", ""),)


def test_labels_are_read_as_identity_reads_them_unless_the_file_says_otherwise() -> None:
    assert parse(URL).identity() == Identity()
    told = parse(URL + "identity: {replica_from: [ruler], node_from: [host]}\n").identity()
    assert (told.replica_from, told.node_from) == (("ruler",), ("host",))


# ---- metrics of one's own -------------------------------------------------------------


def test_the_catalogue_is_the_shipped_one_unless_the_file_adds_to_it() -> None:
    shipped = load_catalog()
    assert parse(URL).catalog().aliases == shipped.aliases
    text = "metrics: [{name: power_w, aliases: [{names: [site_mw], scale: 0.001}]}]\n"
    catalog = parse(URL + text).catalog()
    assert catalog.resolve("site_mw", {}) == (catalog.column("power_w"), 0.001, 0.0)
    assert catalog.metrics == shipped.metrics


def test_the_example_of_the_reference_is_a_configuration() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(metrics:.*?)```", page, re.DOTALL)
    config = parse(URL + example)
    catalog = config.catalog()
    assert catalog.resolve("bmc_gpu_power_milliwatts", {}) == (catalog.column("power_w"), 0.001, 0)
    assert catalog.metrics[catalog.column("temp_c")].valid_max == 140
    assert catalog.names[-1] == "coolant_temp_c"
    assert catalog.alias("syslog_gpu_xids_total", {}).code_label == "code"  # type: ignore[union-attr]
    for row in MetricRow.model_fields:
        assert f"`{row}`" in page, row
    for row in AliasRow.model_fields:
        assert f"`{row}`" in page, row


def test_the_words_of_a_row_are_those_of_the_catalogue() -> None:
    def words(name: str) -> set[str]:
        (union, _) = typing.get_args(MetricRow.model_fields[name].annotation)
        return set(typing.get_args(union))

    assert words("role") == set(ROLES)
    assert words("kind") == {str(kind) for kind in MetricKind}
    assert words("fold") == {str(fold) for fold in Fold}


ROW = st.fixed_dictionaries(
    {"name": st.sampled_from(["power_w", "xid", "temp_c", "mine"])},
    optional={
        "unit": st.sampled_from(["W", "mW"]),
        "role": st.sampled_from(ROLES),
        "kind": st.sampled_from([str(kind) for kind in MetricKind]),
        "valid": st.lists(st.integers(-5, 5), min_size=1, max_size=3),
        "fold": st.sampled_from([str(fold) for fold in Fold]),
        "needs": st.lists(st.sampled_from([*NEEDS, "luck"]), max_size=2),
        "aliases": st.lists(
            st.fixed_dictionaries(
                {"names": st.lists(st.sampled_from(["a", "DCGM_FI_DEV_GPU_TEMP", "b-"]))},
                optional={
                    "exporter": st.sampled_from(["dcgm", "mine", ""]),
                    "where": st.dictionaries(st.sampled_from(["x", "y-"]), st.just("*")),
                    "scale": st.sampled_from([0, 0.5, "1"]),
                    "flag": st.booleans(),
                    "code_label": st.sampled_from(["xid", "1"]),
                    "window_s": st.sampled_from([300, 0]),
                },
            ),
            max_size=3,
        ),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROW, max_size=3))
def test_rows_are_refused_with_a_line_or_make_a_catalogue(rows: list[object]) -> None:
    text = URL + yaml.safe_dump({"metrics": rows})
    problems: tuple[Problem, ...] = ()
    try:
        parse(text).catalog()
    except ConfigProblems as told:
        problems = told.problems
    assert all(p.line > 1 and p.key.startswith("metrics") for p in problems)


def test_a_section_whose_keys_are_all_commented_out_is_its_defaults() -> None:
    assert parse(URL + "limits:\n  #open_moves: 3\n") == parse(URL)


def test_yaml_anchors_are_read_and_not_mistaken_for_doubles() -> None:
    text = "alertmanager: {urls: &u ['http://a:1']}\nspares: {hosts: *u}\n" + URL
    assert parse(text).spares.hosts == ("http://a:1",)


# ---- secrets ------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.write_text(text)


def test_secrets_come_from_files_beside_the_configuration(tmp_path: Path) -> None:
    write(tmp_path / "api.token", "0123456789abcdef0123\n")
    write(tmp_path / "hook.secret", "whsec_c2VjcmV0c2VjcmV0c2VjcmV0\n")
    text = URL + "http: {token_file: api.token}\nhook: {secret_file: hook.secret}\n"
    config = parse(text, tmp_path)
    assert config.token() == "0123456789abcdef0123"
    assert config.hook_secret() == "whsec_c2VjcmV0c2VjcmV0c2VjcmV0"
    config.check_files()


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_TOKEN", "from-the-environment")
    monkeypatch.setenv("SENTINEL_PROMETHEUS_PASSWORD", "pw")
    config = parse(
        'prometheus: {url: "http://a:1", basic_auth: {username: u}}\nhttp: {token_file: gone}\n'
    )
    assert config.token() == "from-the-environment"
    assert config.prometheus_auth() == ("u", "pw")


def test_a_bearer_token_becomes_a_header(tmp_path: Path) -> None:
    write(tmp_path / "t", "abc\n")
    text = 'prometheus: {url: "http://a:1", token_file: t, headers: {X-Scope-OrgID: gpu}}'
    headers = parse(text, tmp_path).prometheus_headers()
    assert headers == {"X-Scope-OrgID": "gpu", "Authorization": "Bearer abc"}


def test_every_alertmanager_is_spoken_to_as_configured(tmp_path: Path) -> None:
    write(tmp_path / "pw", "hunter2\n")
    auth = "basic_auth: {username: u, password_file: pw}"
    text = URL + f"alertmanager: {{urls: ['http://a:1', 'https://b:2'], {auth}}}\n"
    first, second = parse(text, tmp_path).alertmanager_targets()
    assert (first.url, first.username, first.password) == ("http://a:1", "u", "hunter2")
    assert (second.url, second.password, second.tls) == ("https://b:2", "hunter2", None)
    assert "hunter2" not in repr(first)


def test_every_wrong_secret_is_told_at_once_and_none_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "short", "hunter2")
    write(tmp_path / "plain", "hunter2hunter2hunter2hunter2")
    text = (
        'prometheus: {url: "http://a:1", token_file: missing, ca_file: no.pem}\n'
        "http: {token_file: short}\nhook: {secret_file: plain}\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse(text, tmp_path).check_files()
    told = str(caught.value)
    for key in (
        "prometheus.token_file",
        "prometheus.ca_file",
        "http.token_file",
        "hook.secret_file",
    ):
        assert key in told
    assert "hunter2" not in told
    assert f"{tmp_path}/missing: cannot be read (No such file or directory)" in told


def test_orders_must_be_signed_in_mode_act() -> None:
    config = parse(URL + 'mode: act\nhook: {url: "http://a:1/migrate"}\n')
    with pytest.raises(ConfigError, match=r"hook\.secret_file: is required in mode act"):
        config.check_files()


def test_a_file_that_is_not_there_is_told_with_a_way_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read .*config example"):
        Config.load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"mode: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Config.load(tmp_path / "latin.yaml")


# ---- documentation ------------------------------------------------------------------


def test_the_example_means_exactly_the_defaults() -> None:
    text = configfile.example(Config, "An example.")
    assert parse(text) == parse(URL)


def test_the_example_with_every_key_uncommented_means_the_defaults_too() -> None:
    text = re.sub(r"^(\s*)#(?=\w)", r"\1", configfile.example(Config, "x"), flags=re.M)
    data = yaml.safe_load(text)
    for section in ("prometheus", "alertmanager"):
        assert data[section].pop("basic_auth")["username"] == "sentinel"
    assert parse(yaml.safe_dump(data)) == parse(URL)
    assert all(_has(data, key.path) for key in keys(Config) if not key.is_example)


def _has(data: object, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return True


def test_every_key_has_a_sentence_and_every_second_is_named_so() -> None:
    for key in keys(Config):
        assert key.text.endswith((".", "].")), key.path
        if key.path[-1].endswith("_s"):
            assert key.unit == "s", key.path
        if isinstance(key.value, (int, float)) and not isinstance(key.value, bool):
            assert key.unit, key.path


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("deploy/sentinel.example.yaml", configfile.example_file),
        ("docs/configuration.md", configfile.reference_page),
    ],
)
def test_the_files_made_from_the_models_have_not_drifted(path: str, made: object) -> None:
    assert callable(made)
    assert (ROOT / path).read_text() == made(Config), "run `make generated` and commit"


def test_the_schema_knows_every_section_and_refuses_others() -> None:
    schema = json.loads(json.dumps(Config.model_json_schema()))
    assert set(schema["properties"]) == {key.path[0] for key in keys(Config)}
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prometheus"]
