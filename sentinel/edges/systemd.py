"""sd_notify in a dozen lines: one datagram to the socket that systemd names, if it does.

The protocol is stable and tiny, and the packages that wrap it are no longer kept.
"""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Sends e.g. READY=1 or WATCHDOG=1; False when not run by systemd. Never raises: a
    monitor that cannot be told is no reason to stop watching GPUs."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.sendall(state.encode())
    except OSError:
        return False
    return True
