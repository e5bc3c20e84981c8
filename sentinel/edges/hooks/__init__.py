"""The ways to tell a scheduler what to do, one protocol before them all (`protocol.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sentinel.errors import ConfigError

if TYPE_CHECKING:
    from sentinel.config import Config
    from sentinel.edges.hooks.protocol import Hook, Source


def open_hook(config: Config) -> Hook | None:
    """The way to the scheduler that the configuration names; None where it names none.
    Raises ConfigError."""
    from sentinel.edges.hooks.webhook import WebhookHook

    hook = config.hook
    if not hook.url:
        return None
    secret = config.hook_secret()
    if secret is None:
        raise ConfigError("hook.secret_file: is required: orders must be signed")
    return WebhookHook(
        hook.url,
        secret,
        external_url=config.external_url(),
        timeout_s=hook.timeout_s,
        tls=config.hook_tls(),
        checkpoint=(hook.checkpoint_mode, hook.checkpoint_grace_s),
    )


def open_source(config: Config) -> Source | None:
    """Who says which work runs where, besides labels; None where the hook's kind cannot.
    Raises ConfigError."""
    return None
