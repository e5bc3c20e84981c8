"""The one error tree, and the exit codes that the command line documents.

SentinelError
├── ConfigError        2  a file, key or value of the configuration
├── DependencyError    3  Prometheus, Alertmanager, the daemon's own API: unreachable or wrong
└── StateError         4  the state directory, the store, a bundle
"""

from __future__ import annotations


class SentinelError(Exception):
    """An error that a person can do something about: its text says what, where and how."""

    exit_code = 1


class ConfigError(SentinelError):
    exit_code = 2


class DependencyError(SentinelError):
    exit_code = 3


class StateError(SentinelError):
    exit_code = 4
