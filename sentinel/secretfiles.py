"""Secrets and certificates out of the files that a configuration names.

Every function takes the key as it is spelled in the configuration, so that what is wrong is told
where it is to be mended; no error shows a secret.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from sentinel.errors import ConfigError


def secret(spelled: str, path: Path | None, env: str) -> str | None:
    """From the environment, else from the file; None where neither is named. Raises
    ConfigError."""
    value = os.environ.get(env, "").strip()
    if value or path is None:
        return value or None
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "not text"
        raise ConfigError(
            f"{spelled}: {path}: cannot be read ({why}); create it, or set ${env}"
        ) from err
    if not value:
        raise ConfigError(f"{spelled}: {path}: is empty; put the secret in it, or set ${env}")
    return value


def for_a_header(spelled: str, value: str) -> str:
    """The same value, if an HTTP header can carry it. Raises ConfigError."""
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"{spelled}: its value is no line of printable ASCII text")
    return value


def trust(spelled: str, path: Path | None) -> ssl.SSLContext | None:
    """TLS that trusts the certificates of a file; None where none is named. Raises
    ConfigError."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as err:
        why = err.strerror or err
        raise ConfigError(f"{spelled}: {path}: no certificates can be read ({why})") from err


def check_client_certificate(section: str, cert: str, key: str | None) -> None:
    """Loads a certificate with its key, as a connection would. Raises ConfigError."""
    where = f"{cert} and {key}" if key else cert

    def no_password() -> str:
        raise ConfigError(
            f"{section}.key_file: {where}: the key is encrypted; nobody is there to type its "
            "password, so keep it unencrypted and readable by the daemon alone"
        )

    try:
        ssl.create_default_context().load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as err:
        why = err.strerror or err
        raise ConfigError(
            f"{section}.cert_file: {where}: no certificate with its key can be read ({why})"
        ) from err
