"""The pages hold together, load nothing from elsewhere, and explain every alert."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import yaml

from sentinel.core import incident

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", ["/", "/runbooks"])
def test_pages_load_only_what_this_server_has(client: httpx.Client, path: str) -> None:
    page = client.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "style=" not in page.text, "the policy allows no inline style"
    assert "<script>" not in page.text, "nor inline script"
    for link in re.findall(r'(?:src|href)="([^"#][^"]*)"', page.text):
        if link == "data:,":
            continue
        assert link.startswith("/"), link
        assert client.get(link).status_code == 200, link


def test_only_the_files_that_belong_to_the_pages_are_served(client: httpx.Client) -> None:
    for name in ("../app.py", "..%2fapp.py", "app.py", ""):
        assert client.get(f"/static/{name}").status_code == 404


def test_every_alert_has_a_runbook(client: httpx.Client) -> None:
    anchors = set(re.findall(r'<h2 id="(\w+)">', client.get("/runbooks").text))
    source = Path(incident.__file__).read_text()
    names = set(re.findall(r'"(Sentinel[A-Z]\w+)"', source))
    assert len(names) >= 7
    rules = yaml.safe_load((ROOT / "rules" / "sentinel.rules.yaml").read_text())
    names |= {rule["alert"] for rule in rules["groups"][0]["rules"]}
    assert {n.lower() for n in names} <= anchors
    assert set(re.findall(r'href="#(\w+)"', client.get("/runbooks").text)) <= anchors


def test_the_script_builds_text_not_markup() -> None:
    script = (ROOT / "sentinel/web/static/status.js").read_text()
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script
