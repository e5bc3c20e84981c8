"""Routes followed as Alertmanager follows them; amtool is the judge."""

import subprocess
from pathlib import Path

import pytest
import yaml

from sentinel.doctor import routing
from sentinel.lab import servers

ROOT = Path(__file__).parents[2]
CRITICAL = {
    "alertname": "SentinelGpuFault", "severity": "critical", "cluster": "west", "node": "gpu-01",
}  # fmt: skip
WARNING = CRITICAL | {"alertname": "SentinelGpuDegraded", "severity": "warning"}


def tree(*routes, receiver="rest"):
    names = {receiver, *(name for r in routes for name in _names(r))}
    return {
        "route": {"receiver": receiver, "routes": list(routes)},
        "receivers": [{"name": name} for name in sorted(names)],
    }


def _names(route):
    yield from [route["receiver"]] if "receiver" in route else []
    for child in route.get("routes", ()):
        yield from _names(child)


TREES = [
    tree(),
    tree({"matchers": ['severity="critical"'], "receiver": "pager"}),
    tree({"matchers": ["severity = critical"], "receiver": "pager"}),
    tree({"match": {"severity": "critical"}, "receiver": "pager"}),
    tree({"match_re": {"alertname": "Sentinel.*"}, "receiver": "sentinel"}),
    tree({"matchers": ["alertname=~Sentinel.*", "severity!=critical"], "receiver": "tickets"}),
    tree({"matchers": ['{alertname=~"Sentinel.*", severity="critical"}'], "receiver": "pager"}),
    tree({"matchers": ['alertname!~"Sentinel.*"'], "receiver": "others"}),
    tree({"matchers": ['team=""'], "receiver": "nobody's"}),
    tree({"matchers": ['node="gpu-01"'], "routes": [
        {"matchers": ["severity=critical"], "receiver": "pager"}]}),
    tree({"matchers": ["alertname=~Sentinel.*"], "receiver": "log", "continue": True},
         {"matchers": ["severity=critical"], "receiver": "pager"}),
    tree({"matchers": ["alertname=~Sentinel.*"], "receiver": "log", "continue": True}),
    tree({"matchers": ["cluster=east"], "receiver": "east"},
         {"matchers": ["cluster=~we.*"], "receiver": "west", "routes": [
             {"matchers": ["severity=~critical|page"], "receiver": "pager", "continue": True},
             {"matchers": ["node=gpu-01"], "receiver": "owner"}]}),
]  # fmt: skip
EXAMPLE = yaml.safe_load((ROOT / "deploy" / "alertmanager.example.yaml").read_text())


@pytest.mark.integration
@pytest.mark.parametrize("labels", [CRITICAL, WARNING], ids=["critical", "warning"])
@pytest.mark.parametrize("config", [*TREES, EXAMPLE], ids=lambda c: str(len(str(c))))
def test_amtool_agrees(tmp_path, config, labels):
    file = tmp_path / "alertmanager.yml"
    file.write_text(yaml.safe_dump(config))
    pairs = [f"{name}={value}" for name, value in labels.items()]
    done = subprocess.run(
        [servers.binaries().amtool, "config", "routes", "test", f"--config.file={file}", *pairs],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(routing.receivers(config, labels)) == sorted(done.stdout.strip().split(","))


def test_a_receiver_without_integration_tells_nobody():
    config = {
        "receivers": [
            {"name": "null"},
            {"name": "empty", "webhook_configs": []},
            {"name": "pager", "pagerduty_configs": [{"routing_key": "<secret>"}]},
        ]
    }
    assert not routing.told(config, ["null", "empty", "gone"])
    assert routing.told(config, ["null", "pager"])


@pytest.mark.parametrize(
    "config",
    [{}, {"route": None}, tree({"matchers": ["what is this"]}),
     tree({"matchers": ['severity=~"(("'], "receiver": "x"})],
)  # fmt: skip
def test_what_cannot_be_followed_is_said(config):
    with pytest.raises(ValueError, match=r"\w"):
        routing.receivers(config, CRITICAL)
