"""Where the real Prometheus and Alertmanager come from: PATH first, else Debian packages.

The packages are fetched with the machine's own package manager and mirror, through package
lists of their own, and only unpacked: no root, no maintainer script, no system service.
Debian's newer release is tried first because its binaries run on older systems too; the
machine's own release is the fallback. The unpacked tree is kept in a cache folder
(`SENTINEL_CACHE`, default `$XDG_CACHE_HOME/gpu-sentinel`) and used again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sentinel.errors import DependencyError

# The command names that upstream and Debian use, in order of preference.
_COMMANDS: Final = {
    "prometheus": ("prometheus",),
    "promtool": ("promtool",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "amtool": ("amtool",),
}
_PREFERRED_SUITE: Final = "trixie"
_PACKAGES: Final = ("prometheus", "prometheus-alertmanager")
_SEPARATE_PACKAGE: Final = "promtool"  # part of `prometheus` in older releases
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TEMPLATE: Final = Path("usr/share/prometheus/alertmanager/default.tmpl")
_APT_TIMEOUT_S: Final = 300.0

_ADVICE: Final = (
    "put prometheus, promtool, alertmanager and amtool on PATH "
    "(Debian, Ubuntu: apt-get install prometheus prometheus-alertmanager)"
)


@dataclass(frozen=True, slots=True)
class Binaries:
    """Absolute paths. `share` is an unpacked /usr/share that Debian's Alertmanager must see
    in place of the system's; None where the system's own will do."""

    prometheus: Path
    promtool: Path
    alertmanager: Path
    amtool: Path
    share: Path | None = None


def find_binaries() -> Binaries:
    """The four programs, from PATH or from the cache, which is filled at need.

    Raises DependencyError, which says what to install.
    """
    on_path = {name: _on_path(commands) for name, commands in _COMMANDS.items()}
    if not all(on_path.values()):
        root = _unpacked()
        for name, commands in _COMMANDS.items():
            on_path[name] = on_path[name] or _below(root, commands)
    found = {name: path for name, path in on_path.items() if path is not None}
    missing = sorted(set(_COMMANDS) - set(found))
    if missing:
        raise DependencyError(f"{', '.join(missing)} not found: {_ADVICE}")
    return Binaries(**found, share=_share_for(found["alertmanager"]))


def cache_dir() -> Path:
    explicit = os.environ.get("SENTINEL_CACHE")
    if explicit:
        return Path(explicit).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "gpu-sentinel"


def _on_path(commands: Sequence[str]) -> Path | None:
    return next((Path(hit) for name in commands if (hit := shutil.which(name))), None)


def _below(root: Path, commands: Sequence[str]) -> Path | None:
    candidates = (root / "usr/bin" / name for name in commands)
    return next((path for path in candidates if path.is_file()), None)


def _share_for(alertmanager: Path) -> Path | None:
    """Debian's build reads its template from a fixed path; upstream's carries it inside."""
    root = alertmanager.parent.parent.parent
    if (Path("/") / _TEMPLATE).exists() or not (root / _TEMPLATE).exists():
        return None
    return root / "usr/share"


def _unpacked() -> Path:
    root = cache_dir() / "servers"
    if root.is_dir():
        return root
    with _lock(cache_dir() / "servers.lock"):
        if not root.is_dir():
            _fetch(root)
    return root


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise DependencyError(
            f"cannot write the cache folder {path.parent}: {error.strerror}; "
            f"set SENTINEL_CACHE to a writable folder, or {_ADVICE}"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(root: Path) -> None:
    """Fills `root` from the first package source that works, in one rename."""
    absent = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if absent:
        raise DependencyError(f"no Prometheus here and no {absent[0]} to fetch one: {_ADVICE}")
    failures = []
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="fetch-") as scratch:
        for attempt, sources in enumerate(_package_sources()):
            work = Path(scratch) / str(attempt)
            try:
                tree = _download(work, sources)
            except _FetchFailed as failure:
                failures.append(str(failure))
                continue
            tree.rename(root)
            return
    reasons = "; ".join(failures) or "no package source is configured"
    raise DependencyError(f"cannot fetch Prometheus from packages ({reasons}): {_ADVICE}")


class _FetchFailed(Exception):
    """One package source did not work; the next is tried."""


def _package_sources() -> Iterator[str | None]:
    """Text of a source list to use; None stands for the machine's own configuration."""
    mirror = _debian_mirror()
    if mirror is not None and _KEYRING.exists():
        yield (
            f"Types: deb\nURIs: {mirror}\nSuites: {_PREFERRED_SUITE}\nComponents: main\n"
            f"Signed-By: {_KEYRING}\n"
        )
    yield None


def _debian_mirror() -> str | None:
    form = "$(REPO_URI)"
    try:
        listed = _run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"])
    except _FetchFailed:
        return None
    return next((uri for uri in listed.split() if uri.rstrip("/").endswith("/debian")), None)


def _download(work: Path, sources: str | None) -> Path:
    """The unpacked tree below `work`. Raises _FetchFailed."""
    lists, archives = work / "lists", work / "cache/archives"
    (lists / "partial").mkdir(parents=True)
    (archives / "partial").mkdir(parents=True)
    options = {
        "Dir::State::lists": str(lists),
        "Dir::Cache": str(work / "cache"),
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "30",
    }
    if sources is not None:
        (work / "only.sources").write_text(sources)
        options["Dir::Etc::sourcelist"] = str(work / "only.sources")
        options["Dir::Etc::sourceparts"] = "/nonexistent"
    apt = ["apt-get", *(word for item in options.items() for word in ("-o", "=".join(item)))]
    _run([*apt, "update"], cwd=work)
    for package in _PACKAGES:
        _run([*apt, "download", package], cwd=work)
    tree = work / "root"
    _unpack(work, tree)
    if _below(tree, _COMMANDS["promtool"]) is None:
        _run([*apt, "download", _SEPARATE_PACKAGE], cwd=work)
        _unpack(work, tree)
    for name, commands in _COMMANDS.items():
        path = _below(tree, commands)
        if path is None:
            raise _FetchFailed(f"the packages hold no {name}")
        _run([str(path), "--version"])
    return tree


def _unpack(work: Path, tree: Path) -> None:
    for package in sorted(work.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(tree)])
        package.unlink()


def _run(argv: Sequence[str], cwd: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_APT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _FetchFailed(f"{argv[0]}: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line] or ["no message"]
        raise _FetchFailed(f"{argv[0]} {argv[-1]}: {lines[-1][:200]}")
    return done.stdout
