"""Findings on the names of nodes: whether they can be those that the scheduler uses."""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.config import Config
from sentinel.doctor.facts import Naming
from sentinel.doctor.report import Finding, Severity
from sentinel.doctor.words import count, some

_OWN_NAME = (
    "give the exporter its node's name: in Kubernetes NODE_NAME from spec.nodeName, "
    "elsewhere the host's own name (docker run --hostname $(hostname))"
)
_REWRITE_PORT = " identity: {node_rewrite: [{match: ':\\d+$', replace: ''}]}"
_REWRITE_DOMAIN = " identity: {node_rewrite: [{match: '\\..*$', replace: ''}]}"


def naming_findings(config: Config, naming: Naming) -> Iterator[Finding]:
    label = next(iter(naming.told_by), "")
    yield Finding(
        "names",
        Severity.OK,
        "names",
        f"by label {label or '(none)'}: {some(naming.first)}"
        + (f" ({count(naming.nodes, 'node')})" if naming.nodes > 3 else ""),
    )
    if naming.exported:
        yield Finding(
            "labels-exported",
            Severity.OK,
            "names",
            f"the labels of work are renamed ({some(naming.exported)}): honor_labels is off, "
            "and read as such",
        )
    nameless = naming.hidden_by and not naming.looks.get("localhost")
    for word, judged in _LOOKS.items():
        if naming.looks.get(word) and not (nameless and word == "address"):
            yield judged(config, naming, naming.looks[word], naming.examples.get(word, ""))
    if nameless:
        yield Finding(
            "names-localhost",
            _severity(config),
            "names",
            f"exporters call their host {naming.hidden_by}: label {label} is used instead, such as "
            f"{next(iter(naming.first), '')}",
            "that is the address which is scraped, and the scheduler calls its nodes otherwise",
            (*_other_label(naming), _OWN_NAME),
            exit_code=int(config.mode == "act"),
        )


def _severity(config: Config) -> Severity:
    """The scheduler must know the name in mode act; alerts are readable with a worse one."""
    return Severity.PROBLEM if config.mode == "act" else Severity.ADVICE


def _localhost(config: Config, naming: Naming, nodes: int, example: str) -> Finding:
    return Finding(
        "names-localhost",
        Severity.PROBLEM,
        "names",
        f"nodes are called {example or 'nothing at all'}: all hosts look like one",
        "GPUs of different hosts are counted as one node's, and no fence can be told its node",
        (
            *_other_label(naming),
            _OWN_NAME,
        ),
        exit_code=1,
    )


def _pod(config: Config, naming: Naming, nodes: int, example: str) -> Finding:
    return Finding(
        "names-pods",
        Severity.PROBLEM,
        "names",
        f"{count(nodes, 'node is', 'nodes are')} called by the exporter's pod, such as {example}",
        "every restart of the exporter gives its node another name, and the scheduler knows none "
        "of them",
        (
            *_other_label(naming),
            "give dcgm-exporter its node's name, in its DaemonSet's env:",
            " - name: NODE_NAME",
            "   valueFrom: {fieldRef: {fieldPath: spec.nodeName}}",
            "or add the label `node` in prometheus.yml (relabel_configs of that job):",
            " - {source_labels: [__meta_kubernetes_pod_node_name], target_label: node}",
        ),
        exit_code=int(config.mode == "act"),
    )


def _container(config: Config, naming: Naming, nodes: int, example: str) -> Finding:
    return Finding(
        "names-containers",
        Severity.PROBLEM,
        "names",
        f"{count(nodes, 'node is', 'nodes are')} called by the exporter's container, such as "
        f"{example}",
        "every restart of the exporter gives its node another name",
        (
            *_other_label(naming),
            "start the container with the host's name: docker run --hostname $(hostname)",
        ),
        exit_code=int(config.mode == "act"),
    )


def _address(config: Config, naming: Naming, nodes: int, example: str) -> Finding:
    port = ":" in example
    steps: tuple[str, ...] = ("cut the port off:", _REWRITE_PORT) if port else ()
    if example.replace(":", "").replace(".", "").isdigit():
        steps = (
            *_other_label(naming),
            "let the exporter name its host (dcgm-exporter shows Hostname), or give targets by "
            "name in prometheus.yml",
        )
    return Finding(
        "names-addresses",
        _severity(config),
        "names",
        f"{count(nodes, 'node is', 'nodes are')} called by the address that is scraped, such as "
        f"{example}",
        "the scheduler calls its nodes otherwise, and will not find them",
        steps,
        exit_code=int(config.mode == "act"),
    )


def _fqdn(config: Config, naming: Naming, nodes: int, example: str) -> Finding:
    return Finding(
        "names-domains",
        Severity.ADVICE,
        "names",
        f"{count(nodes, 'node name ends', 'node names end')} in a domain, such as {example}",
        "Kubernetes mostly calls nodes so; Slurm mostly does not",
        ("if your scheduler's names are short:", _REWRITE_DOMAIN),
    )


_LOOKS = {
    "localhost": _localhost,
    "pod": _pod,
    "container": _container,
    "address": _address,
    "fqdn": _fqdn,
}


def _other_label(naming: Naming) -> tuple[str, ...]:
    """A label at hand that may name the node."""
    if not naming.candidates:
        return ()
    label, value = next(iter(naming.candidates.items()))
    return (
        f"label {label} (such as {value}) may name it:",
        f" identity: {{node_from: [{label}]}}",
    )
