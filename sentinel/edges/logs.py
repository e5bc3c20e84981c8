"""Logs for people (console) or machines (JSON lines): one line per event, repeats counted."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Console(logging.Formatter):
    default_time_format = "%H:%M:%S"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extra = {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        return line + "".join(f" {k}={v}" for k, v in extra.items())


class Once:
    """Says a message when it changes, and how often it was repeated when it ends."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._now: dict[str, tuple[str, int]] = {}

    def error(self, key: str, text: str) -> None:
        before, count = self._now.get(key, ("", 0))
        if before == text:
            self._now[key] = (text, count + 1)
            return
        self._now[key] = (text, 1)
        self._log.error(text)

    def clear(self, key: str, text: str) -> None:
        """The trouble `key` is over: one line, with how many times it was met."""
        before, count = self._now.pop(key, ("", 0))
        if before:
            self._log.info("%s (after %d times: %s)", text, count, before)


def configure(*, json_lines: bool, level: str = "INFO", stream: TextIO | None = None) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else Console())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("apscheduler", "urllib3", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
