"""Where the real servers come from: PATH first, else Debian packages.

The packages are fetched with the machine's own package manager and mirror, through package
lists of their own, and only unpacked: no root, no maintainer script, no system service.
Debian's newer release is tried first because its binaries run on older systems too; the
machine's own release is the fallback. The unpacked trees are kept in a cache folder
(`SENTINEL_CACHE`, default `$XDG_CACHE_HOME/gpu-sentinel`) and used again. What only some tests
need has a tree of its own, so that nobody else downloads it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
    "victoria-metrics": ("victoria-metrics", "victoria-metrics-prod"),
}
_SITE: Final = ("prometheus", "promtool", "alertmanager", "amtool")
_PREFERRED_SUITE: Final = "trixie"
_SEPARATE_PACKAGE: Final = "promtool"  # part of `prometheus` in older releases
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TEMPLATE: Final = Path("usr/share/prometheus/alertmanager/default.tmpl")
_APT_TIMEOUT_S: Final = 300.0

_ADVICE: Final = (
    "put prometheus, promtool, alertmanager and amtool on PATH "
    "(Debian, Ubuntu: apt-get install prometheus prometheus-alertmanager)"
)


@dataclass(frozen=True, slots=True)
class _Tree:
    """One folder of the cache: what is unpacked there, and which programs that must give.
    `own_release` takes the machine's own release even where a newer one is to be had."""

    folder: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    own_release: bool = False


_SERVERS: Final = _Tree("servers", ("prometheus", "prometheus-alertmanager"), _SITE)
_OWN_RELEASE: Final = _Tree("servers-own-release", ("prometheus",), ("prometheus",), True)
_VICTORIA: Final = _Tree("victoria-metrics", ("victoria-metrics",), ("victoria-metrics",))


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
    found = {name: path for name in _SITE if (path := _on_path(name))}
    if len(found) < len(_SITE):
        root = _unpacked(_SERVERS)
        found = {name: _below(root, name) for name in _SITE} | found
    return Binaries(**found, share=_share_for(found["alertmanager"]))


def find_victoria_metrics() -> Path:
    """VictoriaMetrics, the single server, from PATH or from the cache. Raises DependencyError."""
    name = "victoria-metrics"
    return _on_path(name) or _below(_unpacked(_VICTORIA), name)


def prometheus_of_release(*, own: bool) -> Path:
    """The Prometheus that Debian packages, whatever is on PATH: of the machine's own release,
    or of the newest that runs here. Raises DependencyError."""
    return _below(_unpacked(_OWN_RELEASE if own else _SERVERS), "prometheus")


def cache_dir() -> Path:
    explicit = os.environ.get("SENTINEL_CACHE")
    if explicit:
        return Path(explicit).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "gpu-sentinel"


def _on_path(name: str) -> Path | None:
    return next((Path(hit) for command in _COMMANDS[name] if (hit := shutil.which(command))), None)


def _below(root: Path, name: str) -> Path:
    """Raises DependencyError where the unpacked packages have no such program."""
    for command in _COMMANDS[name]:
        if (path := root / "usr/bin" / command).is_file():
            return path
    raise DependencyError(f"{name} is not in {root}; remove that folder to fetch it anew")


def _has(root: Path, programs: Iterable[str]) -> bool:
    return all(
        any((root / "usr/bin" / command).is_file() for command in _COMMANDS[name])
        for name in programs
    )


def _share_for(alertmanager: Path) -> Path | None:
    """Debian's build reads its template from a fixed path; upstream's carries it inside."""
    root = alertmanager.parent.parent.parent
    if (Path("/") / _TEMPLATE).exists() or not (root / _TEMPLATE).exists():
        return None
    return root / "usr/share"


def _unpacked(tree: _Tree) -> Path:
    """The folder of the cache, filled where it is missing or lacks a program."""
    root = cache_dir() / tree.folder
    if _has(root, tree.programs):
        return root
    with _lock(cache_dir() / f"{tree.folder}.lock"):
        if not _has(root, tree.programs):
            _fetch(root, tree)
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


def _fetch(root: Path, tree: _Tree) -> None:
    """Fills `root` from the first package source that works, in one rename."""
    wanted = " and ".join(tree.packages)
    absent = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if absent:
        raise DependencyError(f"no {wanted} here and no {absent[0]} to fetch it: {_ADVICE}")
    failures = []
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="fetch-") as scratch:
        for attempt, sources in enumerate(_package_sources(tree)):
            work = Path(scratch) / str(attempt)
            try:
                filled = _download(work, sources, tree)
            except _FetchFailed as failure:
                failures.append(str(failure))
                continue
            if root.exists():  # filled in part, by whatever hand: make way for the whole
                root.rename(Path(scratch) / "incomplete")
            filled.rename(root)
            return
    reasons = "; ".join(failures) or "no package source is configured"
    raise DependencyError(f"cannot fetch {wanted} from packages ({reasons}): {_ADVICE}")


class _FetchFailed(Exception):
    """One package source did not work; the next is tried."""


def _package_sources(tree: _Tree) -> Iterator[str | None]:
    """Text of a source list to use; None stands for the machine's own configuration."""
    mirror = None if tree.own_release else _debian_mirror()
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


def _download(work: Path, sources: str | None, tree: _Tree) -> Path:
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
    for package in tree.packages:
        _run([*apt, "download", package], cwd=work)
    root = work / "root"
    _unpack(work, root)
    if not _has(root, set(tree.programs) & {_SEPARATE_PACKAGE}):
        _run([*apt, "download", _SEPARATE_PACKAGE], cwd=work)
        _unpack(work, root)
    for name in tree.programs:
        try:
            program = _below(root, name)
        except DependencyError:
            raise _FetchFailed(f"the packages hold no {name}") from None
        _run([str(program), "--version"])
    return root


def _unpack(work: Path, root: Path) -> None:
    for package in sorted(work.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(root)])
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
