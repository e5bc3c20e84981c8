"""What is shipped to be copied into other programs' folders is to those programs' taste."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sentinel.lab.servers import binaries
from sentinel.web.metrics import DESCRIBED

ROOT = Path(__file__).parent.parent
RULES = ROOT / "rules" / "sentinel.rules.yaml"


def judge(*argv: object) -> str:
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.integration
def test_promtool_takes_the_rules_their_tests_and_the_example(tmp_path: Path) -> None:
    promtool = binaries().promtool
    shutil.copy(RULES, tmp_path)
    shutil.copy(ROOT / "deploy" / "prometheus.example.yaml", tmp_path)
    judge(promtool, "check", "config", tmp_path / "prometheus.example.yaml")
    judge(promtool, "test", "rules", *sorted((ROOT / "rules" / "tests").glob("*.yaml")))


@pytest.mark.integration
def test_amtool_takes_the_example_and_routes_by_severity(tmp_path: Path) -> None:
    config = ROOT / "deploy" / "alertmanager.example.yaml"
    amtool = binaries().amtool
    judge(amtool, "check-config", config)

    def route(*labels: str) -> str:
        return judge(
            amtool, "config", "routes", "test", f"--config.file={config}", *labels
        ).split()[0]

    assert route("alertname=SentinelGpuFault", "severity=critical") == "pager"
    assert route("alertname=SentinelGpuDegraded", "severity=warning") == "tickets"
    assert route("alertname=SentinelWatchdog", "severity=info") == "dead-mans-switch"
    assert route("alertname=SentinelGpuDegraded", "severity=info") == "nobody"


def test_rules_ask_only_for_metrics_that_there_are() -> None:
    described = {f"sentinel_{d.name}" for d in DESCRIBED}
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    for rule in rules:
        assert set(re.findall(r"sentinel_\w+", rule["expr"])) <= described, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_rule_has_a_test() -> None:
    tested = "".join(p.read_text() for p in (ROOT / "rules" / "tests").glob("*.yaml"))
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert f"alertname: {rule['alert']}\n        exp_alerts" in tested, rule["alert"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "gpu-sentinel.service").read_text()
    assert "WatchdogSec=" in text
    assert "RestartPreventExitStatus=2\n" in text, "a wrong configuration is not tried again"
    analyze = shutil.which("systemd-analyze")
    if analyze is None:  # nothing more can be said on a machine without systemd
        return
    unit = tmp_path / "gpu-sentinel.service"
    unit.write_text(text.replace("/opt/gpu-sentinel/bin/sentinel", "/bin/true"))
    assert judge(analyze, "verify", unit) == ""
    told = judge(analyze, "security", "--offline=true", unit)
    exposure = float(re.findall(r"exposure level .*: ([0-9.]+)", told)[0])
    assert exposure < 2.0
