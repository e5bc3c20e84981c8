"""What is looked at on this host: the state folder, the port, the secret files."""

import fcntl
import os
import socket
import sqlite3
import threading
from pathlib import Path

import pytest

from sentinel.config import Config
from sentinel.doctor import ask_local
from sentinel.edges.store import Store
from sentinel.lab.loopback import Answer, server
from sentinel.lab.servers import free_port


def config(folder, text=""):
    return Config.parse(f'prometheus: {{url: "http://127.0.0.1:9"}}\n{text}', folder / "s.yaml")


def listing(folder):
    """Every file with its size and times: what looking must not change."""
    return {
        str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(folder).rglob("*"))
    }


# ---- state --------------------------------------------------------------------------


def test_a_folder_that_is_not_there_yet_will_be_made(tmp_path):
    seen = ask_local.state(config(tmp_path))
    assert (seen.exists, seen.writable, seen.trouble, seen.schema) == (False, True, "", None)
    assert seen.free_bytes > 0
    assert not (tmp_path / "state").exists()


def test_a_store_is_looked_at_without_touching_it(tmp_path):
    Store.open(dir=tmp_path / "state").close()
    before = listing(tmp_path)
    seen = ask_local.state(config(tmp_path))
    assert (seen.schema, seen.store_trouble, seen.held_by_pid) == (seen.schema_read, "", None)
    assert listing(tmp_path) == before


def test_the_process_that_holds_the_folder_is_told(tmp_path):
    store = Store.open(dir=tmp_path / "state")
    before = listing(tmp_path)
    seen = ask_local.state(config(tmp_path))
    assert seen.held_by_pid == os.getpid()
    assert seen.schema == seen.schema_read
    assert listing(tmp_path) == before
    store.close()


def test_looking_does_not_hold_the_folder(tmp_path):
    Store.open(dir=tmp_path / "state").close()
    ask_local.state(config(tmp_path))
    with (tmp_path / "state" / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b"no database at all" * 100, "not a database"), (None, "no such table")],
)
def test_a_store_that_is_none_is_told(tmp_path, content, words):
    folder = tmp_path / "state"
    folder.mkdir()
    if content is None:
        connection = sqlite3.connect(folder / "state.db")
        connection.execute("CREATE TABLE other (x)")
        connection.close()
    else:
        (folder / "state.db").write_bytes(content)
    assert words in ask_local.state(config(tmp_path)).store_trouble


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "state").write_text("")
    assert ask_local.state(config(tmp_path)).trouble == "is a file, not a folder"


def test_a_place_where_no_folder_can_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    seen = ask_local.state(config(tmp_path, "state: {dir: file/inside}\n"))
    assert not seen.writable
    assert "cannot be written by this user" in seen.trouble


def test_a_folder_that_may_not_even_be_looked_into_is_told(tmp_path, monkeypatch):
    """As root everything may: the refusal is made up, what comes of it is not."""

    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refused)
    seen = ask_local.state(config(tmp_path))
    assert (seen.writable, seen.trouble) == (False, "permission denied")


# ---- port ---------------------------------------------------------------------------


def at(folder, address):
    return ask_local.listen(config(folder, f'http: {{listen: "{address}"}}\n'))


def test_a_free_port_is_free(tmp_path):
    seen = at(tmp_path, f"127.0.0.1:{free_port()}")
    assert (seen.state, seen.trouble) == ("free", "")


def test_another_program_at_the_port_is_told(tmp_path):
    other = server("127.0.0.1:0", lambda request: Answer(404, {}), quiet=True)
    threading.Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
    seen = at(tmp_path, f"127.0.0.1:{other.server_address[1]}")
    assert (seen.state, seen.trouble) == ("taken", "it answers HTTP 404")
    other.shutdown()
    other.server_close()


def test_a_program_that_does_not_speak_http_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        thread = threading.Thread(target=lambda: silent.accept()[0].close(), daemon=True)
        thread.start()
        seen = at(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        thread.join()
    assert seen.state == "taken"


def test_an_address_of_another_host_is_told(tmp_path):
    assert at(tmp_path, "192.0.2.77:9477").state in ("wrong", "taken")
    assert at(tmp_path, "no-such-host.invalid:9477").state == "wrong"


def test_our_own_daemon_is_known(tmp_path, face, serve):
    client = serve(face, token=None, hook_secret=None)
    seen = at(tmp_path, f"{client.base_url.host}:{client.base_url.port}")
    assert (seen.state, seen.ready) == ("ours", True)
    assert seen.version


# ---- secrets ------------------------------------------------------------------------


def test_secret_files_are_listed_with_their_modes_and_never_read(tmp_path):
    for name, mode in (("hook.secret", "600"), ("api.token", "644")):
        (tmp_path / name).write_text("not-told")
        (tmp_path / name).chmod(int(mode, 8))
    text = (
        "hook: {secret_file: hook.secret}\nhttp: {token_file: api.token}\n"
        "alertmanager: {urls: [], token_file: gone.token}\n"
    )
    seen = {s.key: s for s in ask_local.secrets(config(tmp_path, text))}
    assert {k: s.mode for k, s in seen.items()} == {
        "hook.secret_file": "600",
        "http.token_file": "644",
        "alertmanager.token_file": "",
    }
    assert seen["alertmanager.token_file"].trouble == "no such file or directory"
    assert "not-told" not in repr(seen)
