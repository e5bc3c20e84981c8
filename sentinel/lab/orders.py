"""The webhook protocol as the reference scheduler hears it, and how it can be told to misbehave.

Written from the protocol alone, with the public Standard Webhooks library: that the daemon's
own signing agrees with it is a finding, not an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec
from standardwebhooks import Webhook, WebhookVerificationError

ALWAYS: Final = -1  # of a misdeed: every order from now on


class Signer:
    """Signs and checks with one shared secret, `whsec_` and base64."""

    def __init__(self, secret: str) -> None:
        self._webhook = Webhook(secret)

    def verified(self, headers: Mapping[str, str], body: bytes) -> bool:
        """False for whatever is malformed, too old, or signed with another secret."""
        try:
            self._webhook.verify(body, dict(headers), json_parse=False)
        except (WebhookVerificationError, ValueError):  # malformed base64 or text: ValueError
            return False
        return True

    def headers(self, message_id: str, body: bytes) -> dict[str, str]:
        now = datetime.now(UTC)
        return {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": self._webhook.sign(message_id, now, body.decode()),
        }


class Spare(msgspec.Struct, frozen=True):
    node: str
    gpu_uuids: list[str]


class Work(msgspec.Struct, frozen=True):
    kind: str
    id: str
    tenant: str = ""


class Order(msgspec.Struct, frozen=True):
    """What a POST asks for. Fields that this scheduler has no use for are ignored."""

    schema: Literal[1]
    operation_id: str
    action: Literal["fence", "move", "unfence"]
    node: str
    workload: Work | None = None
    exclude_nodes: list[str] = []
    spare_hint: list[Spare] = []
    dry_run: bool = False
    callback_url: str = ""
    deadline: str | float | None = None


class Submission(msgspec.Struct, frozen=True):
    job: str
    uuids: tuple[str, ...]
    tenant: str = ""


class Behaviour(msgspec.Struct, forbid_unknown_fields=True):
    """Delays in seconds, and misdeeds: how many of the next orders meet each (-1: all)."""

    accept_delay_s: float = 0.0
    run_s: float = 1.0  # how long a job takes to restart elsewhere
    refuse: int = 0  # 422 with the id, although it could be done
    hang: int = 0  # keeps nothing and never answers
    lose_answer: int = 0  # keeps it, starts it, then drops the connection
    no_callback: int = 0
    fail: int = 0  # accepted, then failed
    lie_finished: int = 0  # says finished with a placement, and moves nothing

    def takes(self, misdeed: str) -> bool:
        left: int = getattr(self, misdeed)
        if left > 0:
            setattr(self, misdeed, left - 1)
        return left != 0
