"""What Prometheus, or what stands in for it, says of itself. Input and output, no judgement.

Each function is one probe: it returns what it found out, or raises NoReply in a few words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from sentinel.config import Config
from sentinel.core.catalog import Catalog
from sentinel.doctor.facts import Elsewhere, Target
from sentinel.edges.status import NoReply, Page, Site

_POINTS: Final = 48  # of the look back over history
_LEAST_STEP_S: Final = 60.0
_TARGETS_BYTES: Final = 64 << 20
_COMMON: Final = ("temp_c", "power_w", "sm_clock_mhz", "fb_used_mib")  # every exporter has some
_GPU_WORDS: Final = "dcgm|nvidia|nvml|gpu"
_LIKE_GPU: Final = re.compile(_GPU_WORDS, re.IGNORECASE)
_GPU_PORT: Final = re.compile(r":(9400|9835|9478)/")
_NAMES_MAX: Final = 10
_UNITS_S: Final = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "w": 604_800.0,
    "y": 31_536_000.0,
}
_LIMITS: Final = ("query.max-samples", "query.timeout", "query.lookback-delta")
_VM_LIMITS: Final = {
    "search.maxSamplesPerQuery": "search.maxSamplesPerQuery",
    "search.maxUniqueTimeseries": "search.maxUniqueTimeseries",
    "search.maxQueryDuration": "search.maxQueryDuration",
}


class Clock(NamedTuple):
    skew_s: float  # theirs less ours
    error_s: float


class Build(NamedTuple):
    kind: str
    version: str


class Runtime(NamedTuple):
    retention: str = ""
    retention_s: float | None = None
    config_ok: bool | None = None
    limits: Mapping[str, str] = {}


class Reach(NamedTuple):
    reach_s: float | None
    gap_share: float


def site(config: Config) -> Site:
    """The way to it that the daemon has. Raises ConfigError where a secret cannot be read."""
    section, tls = config.prometheus, config.prometheus_tls()
    cert, key = tls["cert_file"], tls["key_file"]
    return Site(
        section.url,
        headers=config.prometheus_headers(),
        secret_headers=frozenset(section.header_files),
        basic_auth=config.prometheus_auth(),
        ca_file=tls["ca_file"],
        cert=(cert, key) if cert and key else cert,
        server_name=section.server_name,
        proxies=True,
    )


class Prometheus:
    """Probes of one server. `params` are those of every query of the daemon."""

    def __init__(self, config: Config, at: Site, clock: Callable[[], float]) -> None:
        self._config, self._site, self._clock = config, at, clock
        self._timeout_s = min(config.prometheus.timeout_s, 10.0)
        self._inside = config.prometheus.selector.strip().strip("{}").strip().strip(",")

    def skew(self) -> Clock:
        """By the time at which it answers a query, which is exact, or by its Date header."""
        before_s = self._clock()
        page = self._get("/api/v1/query", {"query": "time()"})
        after_s = self._clock()
        result = _result(page)
        stamp = result if _is_sample(result) else (result[0].get("value") if result else None)
        return clock_of(before_s, after_s, _number(stamp[0]) if stamp else page.date_s)

    def build(self) -> Build:
        """What answers, and its version."""
        page = self._get("/api/v1/status/buildinfo")
        plain = page.data() if page.ok else {}
        plain = plain if isinstance(plain, Mapping) else {}
        version = str(plain.get("version", ""))
        application = str(plain.get("application", ""))
        if "x-server-hostname" in page.headers:
            return Build("VictoriaMetrics", self._vm_version())
        for kind in ("Mimir", "Cortex", "Thanos"):
            if kind.lower() in application.lower():
                return Build(kind, version)
        if not version:
            raise NoReply(f"it does not say (HTTP {page.status})")
        # Thanos calls itself by its own version, and has not reached 1
        return Build("Thanos" if version.startswith("0.") else "Prometheus", version)

    def runtime(self) -> Runtime:
        """How long it keeps samples, and what it allows a query."""
        info = self._get("/api/v1/status/runtimeinfo")
        if not info.ok and "x-server-hostname" in info.headers:
            return self._vm_runtime()
        plain = info.data()
        if not isinstance(plain, Mapping):
            raise NoReply("not an answer of Prometheus's API")
        retention = str(plain.get("storageRetention", ""))
        ok = plain.get("reloadConfigSuccess")
        return Runtime(
            retention,
            _retention_s(retention),
            ok if isinstance(ok, bool) else None,
            self._limits(),
        )

    def reach(self, catalog: Catalog, window_s: float) -> Reach:
        """How far back in the window there are GPU series, and what part of that has none."""
        names = sorted(
            {a.name for n in _COMMON if n in catalog.names
             for a in catalog.names_of(catalog.column(n))}
        )  # fmt: skip
        more = f",{self._inside}" if self._inside else ""
        series = f'{{__name__=~"{"|".join(names)}"{more}}}'
        step_s = max(_LEAST_STEP_S, window_s / _POINTS)
        now_s = self._clock()
        steps = int(window_s / step_s)
        page = self._get(
            "/api/v1/query_range",
            {
                **self._config.prometheus.params,
                "query": f"count({series})",
                "start": f"{now_s - steps * step_s:.3f}",
                "end": f"{now_s:.3f}",
                "step": f"{step_s:.3f}",
            },
        )
        points = [_number(t) for row in _result(page) for t, _ in row.get("values", ())]
        if not points:
            return Reach(None, 0.0)
        first_s = min(points)
        expected = round((now_s - first_s) / step_s) + 1
        return Reach(now_s - first_s, max(0.0, 1.0 - len(points) / expected))

    def targets(self, jobs: Iterable[str]) -> tuple[Target, ...]:
        """Scrape targets under the selector that are of these jobs, or look like GPU
        exporters. Raises NoReply where nothing of scrapes can be found out."""
        try:
            listed, trouble = self._listed(), ""
        except NoReply as err:
            listed, trouble = {}, str(err)
        measured = {}
        for name in ("up", "scrape_samples_scraped", "scrape_duration_seconds"):
            try:
                measured[name] = self._by_target(name, jobs)
            except NoReply as err:
                if trouble:
                    raise NoReply(f"{trouble}; {err}") from None
                measured[name] = {}
        known = set(measured["up"])
        if not self._inside:
            known |= set(listed)
        wanted = set(jobs)
        return tuple(
            self._target(place, listed.get(place), measured)
            for place in sorted(known)
            if place[0] in wanted
            or _LIKE_GPU.search(place[0])
            or _gpu_port(place[1], listed.get(place, {}))
        )

    def elsewhere(self, catalog: Catalog) -> Elsewhere:
        """GPU series that the daemon does not see: outside the selector, or of other names."""
        like = f'{{__name__=~"(?i)(.*_)?({_GPU_WORDS}).*"}}'
        rows = self._instant(f"count by (job, __name__) ({like})")
        by_job: dict[str, int] = {}
        strange = []
        for metric, count in rows:
            name = metric.get("__name__", "")
            if name in catalog.sources:
                job = metric.get("job", "")
                by_job[job] = by_job.get(job, 0) + int(count)
            elif not name.startswith(("sentinel_", "go_", "process_")):
                strange.append(name)
        return Elsewhere(by_job, tuple(sorted(set(strange))[:_NAMES_MAX]))

    def rules(self) -> tuple[str, ...]:
        """Names of the alerting rules that look at the daemon's own metrics."""
        plain = self._get("/api/v1/rules", {"type": "alert"}).data()
        groups = plain.get("groups") if isinstance(plain, Mapping) else None
        if not isinstance(groups, list):
            raise NoReply("not an answer of Prometheus's API")
        rules = [rule for group in groups for rule in group.get("rules") or ()]
        return tuple(
            sorted(
                str(rule.get("name"))
                for rule in rules
                if rule.get("type", "alerting") == "alerting"
                and "sentinel_" in str(rule.get("query", ""))
            )
        )

    def scraped(self) -> tuple[str, ...]:
        """Instances of the daemon that are scraped here."""
        return tuple(sorted(m.get("instance", "") for m, _ in self._instant("sentinel_build_info")))

    def targeted(self) -> tuple[str, ...]:
        """Targets at the daemon's own port, whether or not it answers."""
        port = self._config.http.listen.rpartition(":")[2]
        rows = self._instant(f'up{{instance=~".+:{port}"}}')
        return tuple(sorted(m.get("instance", "") for m, _ in rows))

    def certificate(self) -> float | None:
        return self._site.certificate_ends_s(timeout_s=self._timeout_s)

    # ---- requests -------------------------------------------------------------------

    def _get(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        max_bytes: int = 16 << 20,
        root: bool = False,
    ) -> Page:
        return self._site.get(
            path, params, timeout_s=self._timeout_s, max_bytes=max_bytes, root=root
        )

    def _instant(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series."""
        form = {**self._config.prometheus.params, "query": query}
        return [
            (dict(row["metric"]), _number(row["value"][1]))
            for row in _result(self._get("/api/v1/query", form))
        ]

    def _by_target(self, name: str, jobs: Iterable[str]) -> dict[tuple[str, str], float]:
        """A metric of scrapes by job and instance: under the selector; where that names labels
        that no scrape has, of the jobs that were seen; without one, of all that may be GPU
        exporters too."""
        seen = sorted(map(_escaped, set(jobs) - {""}))
        if self._inside:
            rows = self._instant(f"{name}{{{self._inside}}}")
            if not rows and seen:
                rows = self._instant(f"{name}{{{_one_of(seen)}}}")
        else:
            rows = self._instant(f"{name}{{{_one_of([f'(?i).*({_GPU_WORDS}).*', *seen])}}}")
        return {(m.get("job", ""), m.get("instance", "")): value for m, value in rows}

    def _listed(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        page = self._get("/api/v1/targets", {"state": "active"}, max_bytes=_TARGETS_BYTES)
        plain = page.data()
        active = plain.get("activeTargets") if isinstance(plain, Mapping) else None
        out = {}
        for target in active or ():
            labels = target.get("labels") or {}
            out[str(labels.get("job", "")), str(labels.get("instance", ""))] = target
        return out

    def _target(
        self,
        place: tuple[str, str],
        listed: Mapping[str, Any] | None,
        measured: Mapping[str, Mapping[tuple[str, str], float]],
    ) -> Target:
        listed = listed or {}
        up = measured["up"].get(place)
        health = listed.get("health")
        samples = measured["scrape_samples_scraped"].get(place)
        duration_s = measured["scrape_duration_seconds"].get(place)
        if duration_s is None and listed.get("lastScrapeDuration"):
            duration_s = _number(listed["lastScrapeDuration"])
        if health in ("up", "down"):  # of this very moment, where the query is a lookback
            up = float(health == "up")
        return Target(
            *place,
            up=None if up is None else up > 0,
            error=str(listed.get("lastError") or ""),
            samples=None if samples is None else int(samples),
            duration_s=duration_s,
            timeout_s=duration_of(str(listed.get("scrapeTimeout") or "")),
        )

    def _limits(self) -> dict[str, str]:
        try:
            flags = self._get("/api/v1/status/flags").data()
        except NoReply:
            return {}
        flags = flags if isinstance(flags, Mapping) else {}
        return {name: str(flags[name]) for name in _LIMITS if flags.get(name)}

    # ---- VictoriaMetrics ------------------------------------------------------------

    def _vm_metrics(self) -> str:
        page = self._get("/metrics", root=True)
        return page.body.decode(errors="replace") if page.ok else ""

    def _vm_version(self) -> str:
        try:
            text = self._vm_metrics()
        except NoReply:
            return ""
        found = re.search(r'vm_app_version\{[^}]*short_version="([^"]+)"', text)
        return found.group(1) if found else ""

    def _vm_runtime(self) -> Runtime:
        """Its flags are metrics; of a cluster, each part has its own."""
        flags = dict(re.findall(r'flag\{name="([^"]+)",\s*value="([^"]*)"', self._vm_metrics()))
        retention = flags.get("retentionPeriod", "")
        if retention.isdigit():
            retention += " months"
        limits = {name: flags[name] for name in _VM_LIMITS if flags.get(name)}
        return Runtime(retention, _retention_s(retention), None, limits)


# ---- reading answers ----------------------------------------------------------------


def clock_of(before_s: float, after_s: float, told_s: float | None) -> Clock:
    """Their clock less ours. Whole seconds were cut off, so they stand for half a second on."""
    if told_s is None or not math.isfinite(told_s):
        raise NoReply("it does not tell its time")
    error_s = (after_s - before_s) / 2
    if told_s == math.floor(told_s):
        told_s, error_s = told_s + 0.5, error_s + 0.5
    return Clock(told_s - (before_s + after_s) / 2, error_s)


def duration_of(text: str) -> float | None:
    """Seconds of a duration such as 15d, 1h30m or 10s; None for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhdwy])", text)
    if not parts or "".join(n + unit for n, unit in parts) != text:
        return None
    return sum(float(n) * _UNITS_S[unit] for n, unit in parts)


def _retention_s(text: str) -> float | None:
    """Of "15d", "15d or 512MB" and "1 months"; None where only a size limits it."""
    for word in re.split(r"\s+or\s+", text):
        months = re.fullmatch(r"(\d+) months", word)
        found = float(months[1]) * 31 * 86_400 if months else duration_of(word)
        if found:
            return found
    return None


def _result(page: Page) -> list[Any]:
    """The `result` of a query's answer. Raises NoReply."""
    if not page.ok:
        try:
            said = page.json()
        except NoReply:
            said = {}
        text = str(said.get("error", "")) if isinstance(said, Mapping) else ""
        raise NoReply(f"HTTP {page.status}" + (f": {text[:200]}" if text else ""))
    data = page.data()
    result = data.get("result") if isinstance(data, Mapping) else None
    if not isinstance(result, list):
        raise NoReply("not an answer of Prometheus's query API")
    return result


def _is_sample(result: list[Any]) -> bool:
    return len(result) == 2 and not isinstance(result[0], Mapping)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _one_of(patterns: list[str]) -> str:
    """A matcher of jobs by regular expressions."""
    text = "|".join(patterns).replace("\\", "\\\\").replace('"', '\\"')
    return f'job=~"{text}"'


def _escaped(text: str) -> str:
    """For Prometheus's regular expressions, which know no escaped blanks or dashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _gpu_port(instance: str, listed: Mapping[str, Any]) -> bool:
    """Whether it is scraped at a port that GPU exporters alone use."""
    return bool(_GPU_PORT.search(f"{instance}/ {listed.get('scrapeUrl', '')}"))
