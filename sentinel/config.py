"""The configuration: what is read from a file, and what the rest of the program asks of it.

Relative paths are relative to the configuration file. Secrets come from files or from the
environment, never from the configuration itself.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr

from sentinel import configfile, secretfiles
from sentinel.configfile import ConfigProblems, Document, Problem
from sentinel.configkeys import (
    ALERTMANAGER_PASSWORD_ENV,
    ALERTMANAGER_TOKEN_ENV,
    HOOK_SECRET_ENV,
    PROMETHEUS_HEADER_ENV,
    PROMETHEUS_PASSWORD_ENV,
    PROMETHEUS_TOKEN_ENV,
    TOKEN_ENV,
    AlertmanagerSection,
    BasicAuth,
    DetectionSection,
    HookSection,
    HttpSection,
    IdentitySection,
    JobsSection,
    LearnSection,
    LimitsSection,
    LinksSection,
    List,
    LogSection,
    PrometheusSection,
    Section,
    SparesSection,
    StateSection,
    TickSection,
    key,
)
from sentinel.configmetrics import OWN_METRICS, MetricRow, contradictions
from sentinel.core.catalog import Catalog
from sentinel.core.domain import Mode, Severity
from sentinel.core.identity import Identity
from sentinel.core.links import Links
from sentinel.core.policy import Budget, Limits, Policy, Times
from sentinel.data import load_catalog
from sentinel.edges.alertmanager import Target
from sentinel.errors import ConfigError

_MIN_TOKEN: Final = 16


def _section(kind: type[Section], text: str, **more: Any) -> Any:
    return Field(default_factory=kind, description=text, **more)


class Config(Section):
    """A whole configuration, valid as such. Made by `load`, or from a mapping in tests."""

    mode: Literal["observe", "recommend", "act"] = key(
        "observe", "observe alerts only, act also fences and moves; recommend is not here yet."
    )
    prometheus: PrometheusSection = Field(description="Where telemetry comes from.")
    alertmanager: AlertmanagerSection = _section(AlertmanagerSection, "Where alerts go.")
    # `identity()` below is what the program asks for; in the file the section has that name
    naming: IdentitySection = _section(IdentitySection, "Whose GPUs these are.", alias="identity")
    jobs: JobsSection = _section(JobsSection, "What the GPUs work on.")
    metrics: Annotated[tuple[MetricRow, ...], List] = key(
        (), "Metrics, and names of metrics, of your own; docs/configuration.md has an example."
    )
    detection: DetectionSection = _section(DetectionSection, "What counts as going wrong.")
    limits: LimitsSection = _section(
        LimitsSection, "How much may be taken from the fleet; all of them hold at once."
    )
    spares: SparesSection = _section(SparesSection, "Where work may move to.")
    hook: HookSection = _section(HookSection, "The scheduler that fences nodes and moves work.")
    state: StateSection = _section(StateSection, "What survives a restart.")
    tick: TickSection = _section(TickSection, "The pace of the loop.")
    learn: LearnSection = _section(LearnSection, "Learning what is normal.")
    links: LinksSection = _section(LinksSection, "Where an alert's links lead to.")
    http: HttpSection = _section(HttpSection, "The daemon's own API, metrics and status.")
    log: LogSection = _section(LogSection, "The daemon's log.")

    notes: ClassVar[dict[str, str]] = {"metrics": OWN_METRICS}  # below the tables of the keys

    _path: Path | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file. Raises ConfigProblems that tells every mistake in it."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as err:
            raise ConfigError(
                f"{path}: cannot be read ({err.strerror}); "
                "`sentinel config example` prints a file to start from"
            ) from err
        except UnicodeDecodeError as err:
            raise ConfigError(f"{path}: is not UTF-8 text (byte {err.start})") from err
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> Self:
        """The configuration written in `text`, with relative paths relative to `path`."""
        document = configfile.parse(text, str(path))
        config = configfile.validate(cls, document)
        problems = list(config._contradictions(document))
        if problems:
            raise ConfigProblems(problems)
        config._path = path.absolute()
        return config

    def _contradictions(self, document: Document) -> Iterator[Problem]:
        """Keys that are each valid and do not go together."""

        def problem(name: str, text: str, value: object = None) -> Problem:
            return document.problem(tuple(name.split(".")), text, value)

        if self.mode == "recommend":
            yield problem("mode", "is not in this version; use observe or act", self.mode)
        if self.mode == "act" and not self.hook.url:
            yield problem("hook.url", "is required in mode act; or use mode: observe")
        if self.state.url:
            text = "a shared database is not in this version; use state.dir"
            yield problem("state.url", text)  # its value may hold a password
        for name, section in (("prometheus", self.prometheus), ("alertmanager", self.alertmanager)):
            if section.basic_auth and section.token_file:
                yield problem(f"{name}.token_file", "use basic_auth or token_file, not both")
        yield from self._contradictory_access(problem)
        if self.pull_window_s() < 2 * self.tick.interval_s:
            text = f"is shorter than two ticks of {self.tick.interval_s:g} s"
            yield problem("prometheus.window_s", text, self.prometheus.window_s)
        if self.grid_s() < self.tick.interval_s:
            text = f"is shorter than a tick of {self.tick.interval_s:g} s"
            yield problem("detection.grid_s", text, self.detection.grid_s)
        for name in sorted(set(self.spares.hosts) & {""}):
            yield problem("spares.hosts", "holds an empty name", name)
        for path, text, value in contradictions(self.metrics):
            yield document.problem(("metrics", *path), text, value)

    def _contradictory_access(self, problem: Callable[..., Problem]) -> Iterator[Problem]:
        section = self.prometheus
        plain = {name.lower() for name in section.headers}
        secret = {name.lower() for name in section.header_files}
        if "authorization" in plain:
            yield problem("prometheus.headers", "use basic_auth or token_file for Authorization")
        if "authorization" in secret and (section.basic_auth or section.token_file):
            text = "Authorization comes from basic_auth or token_file already"
            yield problem("prometheus.header_files", text)
        if "" in section.split_by:
            yield problem("prometheus.split_by", "holds an empty selector, which is everything")
        for name in sorted(plain & secret):
            text = "is given twice, here and in prometheus.headers"
            yield problem("prometheus.header_files", text, name)
        if section.key_file and not section.cert_file:
            yield problem("prometheus.key_file", "is of no use without cert_file")
        if not section.url.startswith("https:"):
            for name in ("cert_file", "server_name"):
                if value := getattr(section, name):
                    yield problem(f"prometheus.{name}", "is of no use without an https URL", value)

    # ---- what the rest of the program asks for --------------------------------------

    @property
    def path(self) -> Path | None:
        """Where this was read from; None for one made in memory."""
        return self._path

    def policy(self) -> Policy:
        """What decisions are made under."""
        limits, detection, hook = self.limits, self.detection, self.hook
        tick_s = self.tick.interval_s
        return Policy(
            cluster=self.naming.cluster,
            mode=Mode(self.mode),
            limits=Limits(**{f.name: getattr(limits, f.name) for f in dataclasses.fields(Limits)}),
            times=Times(
                tick_s=tick_s,
                deviant_for_s=_auto(detection.deviant_for_s, max(30.0, 8 * tick_s)),
                fault_for_s=detection.fault_for_s,
                lost_for_s=_auto(detection.lost_for_s, tick_s),
                clear_for_s=_auto(detection.clear_for_s, max(30.0, 20 * tick_s)),
                clear_latched_for_s=detection.clear_latched_for_s,
                sent_timeout_s=max(2 * hook.timeout_s, 4 * tick_s),
                poll_s=_auto(hook.poll_s, tick_s),
                migration_deadline_s=hook.deadline_s,
                verify_for_s=hook.verify_for_s,
                evidence_max_age_s=_auto(limits.evidence_max_age_s, max(10.0, 4 * tick_s)),
            ),
            budget=Budget(
                detection.pages_per_week, detection.tickets_per_week, detection.page_score
            ),
            fence_severity=Severity(limits.fence_severity),
            move_severity=Severity(limits.move_severity),
            attempts_max=limits.attempts_max,
            spare_nodes=frozenset(self.spares.hosts),
            spare_gpus=frozenset(self.spares.gpus),
        )

    def identity(self) -> Identity:
        """How labels become nodes, jobs and tenants."""
        return Identity(
            node_from=self.naming.node_from,
            node_rewrite=tuple((r.match, r.replace) for r in self.naming.node_rewrite),
            job_id_from=self.jobs.id_from,
            tenant_from=self.jobs.tenant_from,
            replica_from=self.naming.replica_from,
            group_from=self.jobs.group_from,
            role_from=self.jobs.role_from,
            service_from=self.jobs.service_from,
            rack_from=self.naming.rack_from,
            rack_pattern=self.naming.rack_pattern,
        )

    def catalog(self) -> Catalog:
        """The metrics that are shipped, with the rows of this configuration merged in."""
        return load_catalog([row.plain() for row in self.metrics])

    def grid_s(self) -> float:
        return _auto(self.detection.grid_s, 4 * self.tick.interval_s)

    def pull_window_s(self) -> float:
        return _auto(self.prometheus.window_s, max(60.0, 4 * self.tick.interval_s))

    def max_age_s(self) -> float:
        return _auto(self.detection.max_age_s, self.pull_window_s())

    def tick_deadline_s(self) -> float:
        return _auto(self.tick.deadline_s, max(2.0, 0.8 * self.tick.interval_s))

    def file(self, name: str) -> Path:
        """A path of the configuration, made absolute."""
        base = self._path.parent if self._path else Path.cwd()
        return (base / name).absolute()

    def state_dir(self) -> Path:
        return self.file(self.state.dir)

    def external_url(self) -> str:
        """How others reach the daemon: http.external_url, else the address it listens on."""
        if self.http.external_url:
            return self.http.external_url
        host, _, port = self.http.listen.rpartition(":")
        if host in ("0.0.0.0", "[::]"):  # noqa: S104 - compared with, not bound to
            host = socket.getfqdn()
        return f"http://{host}:{port}"

    def alert_links(self) -> Links:
        """Where the links of alerts lead to."""
        links, base = self.links, self.links.prometheus
        host = urlsplit(self.prometheus.url).hostname or ""
        if not base and not _is_loopback(host):
            base = self.prometheus.url
        catalog = self.catalog()
        series = {
            name: tuple(dict.fromkeys(alias.name for alias in catalog.names_of(column)))
            for column, name in enumerate(catalog.names)
        }
        return Links(self.external_url(), links.dashboard, links.runbook, base, series)

    def alertmanager_targets(self) -> tuple[Target, ...]:
        """Every Alertmanager, with what it takes to speak to it. Raises ConfigError."""
        section = self.alertmanager
        user, password = self._basic_auth(
            "alertmanager.basic_auth", section.basic_auth, ALERTMANAGER_PASSWORD_ENV
        ) or ("", "")
        spelled = "alertmanager.token_file"
        token = self._secret(ALERTMANAGER_TOKEN_ENV, spelled, section.token_file) or ""
        tls = self._tls("alertmanager.ca_file", section.ca_file)
        return tuple(Target(url, user, password, token, tls) for url in section.urls)

    def hook_tls(self) -> ssl.SSLContext | None:
        """Whom the hook trusts; None: the system's certificates. Raises ConfigError."""
        return self._tls("hook.ca_file", self.hook.ca_file)

    # ---- secrets ---------------------------------------------------------------------

    def token(self) -> str | None:
        """The bearer token for everything that changes; None refuses all of it."""
        token = self._secret(TOKEN_ENV, "http.token_file", self.http.token_file)
        if token is not None and len(token) < _MIN_TOKEN:
            raise ConfigError(
                f"the token of http.token_file has {len(token)} characters, at least {_MIN_TOKEN} "
                "are needed; make one with `openssl rand -hex 32`"
            )
        return token

    def hook_secret(self) -> str | None:
        """The signing secret of the hook and its callbacks (`whsec_` and base64)."""
        secret = self._secret(HOOK_SECRET_ENV, "hook.secret_file", self.hook.secret_file)
        if secret is None:
            return None
        try:
            raw = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if not secret.startswith("whsec_") or len(raw) < _MIN_TOKEN:
            raise ConfigError(
                "the secret of hook.secret_file is not whsec_ and base64 of 16 bytes or more; "
                'make one with `echo "whsec_$(openssl rand -base64 32)"`'
            )
        return secret

    def prometheus_auth(self) -> tuple[str, str] | None:
        """User name and password, if the configuration names a user. Raises ConfigError."""
        basic = self.prometheus.basic_auth
        return self._basic_auth("prometheus.basic_auth", basic, PROMETHEUS_PASSWORD_ENV)

    def prometheus_headers(self) -> dict[str, str]:
        """Extra headers, with the secret ones and the bearer token. Raises ConfigError."""
        headers = dict(self.prometheus.headers)
        for name, file in self.prometheus.header_files.items():
            env = PROMETHEUS_HEADER_ENV + re.sub(r"[^A-Z0-9]", "_", name.upper())
            spelled = f"prometheus.header_files[{name}]"
            value = self._secret(env, spelled, file)
            if value is None:
                raise ConfigError(f"{spelled}: needs a file, or ${env}")
            headers[name] = secretfiles.for_a_header(spelled, value)
        file = self.prometheus.token_file
        token = self._secret(PROMETHEUS_TOKEN_ENV, "prometheus.token_file", file)
        if token:
            token = secretfiles.for_a_header("prometheus.token_file", token)
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def prometheus_tls(self) -> dict[str, str | None]:
        """Files by what they are for: `ca_file`, `cert_file`, `key_file`; None for none."""
        names = ("ca_file", "cert_file", "key_file")
        files = {name: getattr(self.prometheus, name) for name in names}
        return {name: str(self.file(file)) if file else None for name, file in files.items()}

    def check_files(self) -> None:
        """Reads every secret and certificate once. Raises ConfigError that tells all that is
        wrong."""
        problems = []
        for read in (
            self.token,
            self.hook_secret,
            self.prometheus_auth,
            self.prometheus_headers,
            lambda: self._tls("prometheus.ca_file", self.prometheus.ca_file),
            self._check_client_certificate,
            self.alertmanager_targets,
            lambda: self._tls("hook.ca_file", self.hook.ca_file),
        ):
            try:
                read()
            except ConfigError as err:
                problems.append(str(err))
        if self.mode == "act" and not problems and self.hook_secret() is None:
            problems.append(
                f"hook.secret_file: is required in mode act (or ${HOOK_SECRET_ENV}): orders must "
                "be signed"
            )
        if problems:
            raise ConfigError("\n".join(problems))

    def _basic_auth(
        self, spelled: str, basic: BasicAuth | None, env: str
    ) -> tuple[str, str] | None:
        if basic is None:
            return None
        password = self._secret(env, f"{spelled}.password_file", basic.password_file)
        if password is None:
            raise ConfigError(f"{spelled}: needs password_file, or ${env}")
        return basic.username, password

    def _tls(self, spelled: str, name: str) -> ssl.SSLContext | None:
        """What a certificate file makes of TLS; None where none is named."""
        return secretfiles.trust(spelled, self.file(name) if name else None)

    def _check_client_certificate(self) -> None:
        files = self.prometheus_tls()
        if files["cert_file"] is not None:
            secretfiles.check_client_certificate(
                "prometheus", files["cert_file"], files["key_file"]
            )

    def _secret(self, env: str, spelled: str, name: str) -> str | None:
        """From the environment, else from the file; None where neither is named."""
        return secretfiles.secret(spelled, self.file(name) if name else None, env)


def _auto(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
