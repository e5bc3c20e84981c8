"""`sentinel doctor` as a command: its exit codes, what it never does, and that it always ends."""

import base64
import json
import os
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from sentinel.lab.loopback import Answer, server
from sentinel.lab.servers import free_port
from tests.test_cli import Cli

SECRET = "a-secret-that-nobody-may-read"
HOOK_SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVg=="


@pytest.fixture
def doctor(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "cwd"
    folder.mkdir()
    return Cli(folder, capsys, monkeypatch)


def write(doctor, text, name="sentinel.yaml"):
    listen = f'http: {{listen: "127.0.0.1:{free_port()}"}}\n' if "\nhttp: " not in text else ""
    (doctor.folder / name).write_text(text + listen)


@contextmanager
def answering(handle):
    """A loopback server; every request that it got, as (method, path)."""
    seen = []

    def noted(request):
        seen.append((request.method, "/" + "/".join(request.path)))
        return handle(request)

    running = server("127.0.0.1:0", noted, quiet=True)
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}", seen
    finally:
        running.shutdown()
        running.server_close()


@contextmanager
def hanging(drip=False):
    """The URL of a server that takes connections and says nothing, or a byte now and then."""
    end = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(0.1)

        def hold(connection):
            with connection:
                while not end.wait(0.05):
                    try:
                        if drip:
                            connection.send(b"H")
                    except OSError:
                        return

        def serve():
            while not end.is_set():
                try:
                    connection = listener.accept()[0]
                except TimeoutError:
                    continue
                threading.Thread(target=hold, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            end.set()
            thread.join()


def codes(found):
    return {f["code"]: f for f in found["findings"] if f["severity"] != "ok"}


# ---- the configuration --------------------------------------------------------------


def test_a_wrong_configuration_is_told_as_json_too(doctor):
    (doctor.folder / "sentinel.yaml").write_text("prometheus: {url: nonsense, wat: 1}\n")
    found = doctor.json("doctor", code=2)
    assert (found["schema"], found["can_work"], found["exit_code"]) == (1, False, 2)
    assert {f["code"] for f in found["findings"]} == {"configuration-wrong"}
    assert len(found["findings"]) == 2
    assert found["facts"] is None
    told = doctor("doctor", code=2)
    assert "prometheus.url" in told.stderr
    assert told.stdout == ""


def test_no_configuration_is_told(doctor):
    assert "sentinel config example" in doctor("doctor", code=2).stderr
    assert doctor.json("doctor", code=2)["exit_code"] == 2


def test_a_secret_that_cannot_be_read_leaves_the_rest_to_be_looked_at(doctor):
    write(
        doctor,
        'prometheus: {url: "http://127.0.0.1:9", token_file: gone}\nalertmanager: {urls: []}\n',
    )
    found = doctor.json("doctor", code=2)
    bad = codes(found)
    assert "cannot be read" in bad["configuration-wrong"]["what"]
    assert "prometheus-unreachable" not in bad  # it was not asked
    assert found["facts"]["listen"]["state"] == "free"


# ---- what cannot be reached ---------------------------------------------------------


def test_a_prometheus_that_is_down_is_the_first_thing_and_the_rest_is_still_told(doctor):
    write(doctor, 'prometheus: {url: "http://127.0.0.1:9"}\nalertmanager: {urls: []}\n')
    found = doctor.json("doctor", code=3)
    assert found["findings"][0]["code"] == "prometheus-unreachable"
    assert found["can_work"] is False
    assert "alertmanager-none" in codes(found)
    told = doctor("doctor", code=3).stdout
    assert told.strip().splitlines()[-1].startswith("The daemon cannot work: Prometheus at")


def test_what_is_no_prometheus_is_told(doctor):
    with answering(lambda request: Answer(200, "<html>hello</html>")) as (url, _):
        write(doctor, f'prometheus: {{url: "{url}"}}\nalertmanager: {{urls: ["{url}"]}}\n')
        bad = codes(doctor.json("doctor", code=3))
    assert "prometheus-unreachable" in bad
    assert bad["alertmanager-unreachable"]["exit_code"] == 3


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "dripping"])
def test_it_ends_whatever_hangs(doctor, drip):
    with hanging(drip) as url:
        write(
            doctor,
            f'prometheus: {{url: "{url}", timeout_s: 300}}\n'
            f'alertmanager: {{urls: ["{url}"], timeout_s: 300}}\n'
            f'hook: {{url: "{url}/migrate", timeout_s: 300}}\n',
        )
        began = time.monotonic()
        found = doctor.json("doctor", "--for", "5", code=3)
        assert time.monotonic() - began < 30.0
    bad = codes(found)
    assert set(bad) >= {"prometheus-unreachable", "alertmanager-unreachable", "hook-unreachable"}
    assert "within" in bad["prometheus-unreachable"]["what"]


def test_it_ends_where_a_secret_file_hangs(doctor):
    """A pipe that nobody writes to hangs whoever opens it, as a network disk that is gone."""
    os.mkfifo(doctor.folder / "hook.secret")
    write(
        doctor,
        'prometheus: {url: "http://127.0.0.1:9"}\nalertmanager: {urls: []}\n'
        "hook: {secret_file: hook.secret}\n",
    )
    found = doctor.json("doctor", "--for", "5", code=2)
    assert "no answer within" in codes(found)["configuration-wrong"]["what"]
    assert found["facts"]["listen"]["state"] == "free"
    os.close(os.open(doctor.folder / "hook.secret", os.O_WRONLY | os.O_NONBLOCK))  # let it end


def test_a_scheme_that_is_not_spoken_there_is_told(doctor):
    with answering(lambda request: Answer(404, {})) as (url, _):
        secure = url.replace("http://", "https://")
        write(
            doctor,
            f'mode: act\nprometheus: {{url: "{secure}"}}\nalertmanager: {{urls: ["{secure}"]}}\n'
            f'hook: {{url: "{secure}/migrate", secret_file: hook.secret}}\n',
        )
        (doctor.folder / "hook.secret").write_text(HOOK_SECRET)
        bad = codes(doctor.json("doctor", code=3))
    for code in ("prometheus-unreachable", "alertmanager-unreachable", "hook-unreachable"):
        assert "ssl" in bad[code]["what"].lower() or "tls" in bad[code]["what"].lower()


# ---- what it never does -------------------------------------------------------------


def test_it_asks_and_never_orders(doctor):
    with answering(lambda request: Answer(404, {"error": "no"})) as (url, seen):
        write(
            doctor,
            f'mode: act\nprometheus: {{url: "{url}/prom"}}\n'
            f'alertmanager: {{urls: ["{url}/am"]}}\n'
            f'hook: {{url: "{url}/migrate", secret_file: hook.secret}}\n'
            "state: {dir: nowhere/yet}\n",
        )
        (doctor.folder / "hook.secret").write_text(HOOK_SECRET)
        before = sorted(doctor.folder.rglob("*"))
        found = doctor.json("doctor", code=3)
        assert sorted(doctor.folder.rglob("*")) == before
    assert {method for method, path in seen if not path.startswith("/prom")} == {"GET"}
    assert {path for method, path in seen if method != "GET"} <= {"/prom/api/v1/query"}
    assert sum(path.startswith("/migrate/sentinel-doctor-") for _, path in seen) == 1
    assert found["facts"]["hook"]["status"] == 404


@pytest.mark.parametrize(
    "access",
    [
        "token_file: secret",
        "basic_auth: {username: me, password_file: secret}",
        "header_files: {X-Api-Key: secret}",
    ],
)
def test_no_secret_is_ever_shown(doctor, access):
    """By a server that repeats all it was sent."""

    def echo(request):
        return Answer(401, {"status": "error", "error": f"no: {dict(request.headers)}"})

    shared = access if "header" not in access else "token_file: secret"
    with answering(echo) as (url, _):
        write(
            doctor,
            f'prometheus: {{url: "{url}", {access}}}\n'
            f'alertmanager: {{urls: ["{url}"], {shared}}}\n'
            f'http: {{listen: "127.0.0.1:{free_port()}", token_file: secret}}\n',
        )
        (doctor.folder / "secret").write_text(SECRET)
        for flags in ((), ("--full",), ("--json",)):
            told = doctor("doctor", *flags, code=3)
            text = told.stdout + told.stderr
            assert SECRET not in text
            assert base64.b64encode(f"me:{SECRET}".encode()).decode() not in text
            assert "credentials" in told.stdout


# ---- its form -----------------------------------------------------------------------


def test_json_alone_is_on_stdout(doctor):
    write(doctor, 'prometheus: {url: "http://127.0.0.1:9"}\nalertmanager: {urls: []}\n')
    told = doctor("doctor", "--json", code=3)
    assert json.loads(told.stdout)["schema"] == 1
    assert told.stderr == ""


def test_the_help_says_that_it_changes_nothing(doctor):
    assert "Changes nothing" in doctor("doctor", "--help").stdout
