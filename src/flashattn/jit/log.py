"""What is told to the user: one logger, and warnings that are given once."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("flashattn")


class _Fallback(logging.Handler):
    """Writes to stderr for as long as the application has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self] and sys.stderr is not None:
            try:
                sys.stderr.write(f"flashattn: {self.format(record)}\n")
            except Exception:
                self.handleError(record)


def configure(level: str | None) -> None:
    """Show lines of `level` ("info", ...) and above; None keeps the application's choice, or else shows info."""
    if not any(isinstance(handler, _Fallback) for handler in logger.handlers):
        logger.addHandler(_Fallback())
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel((level or "info").upper())


class Notices:
    """Warnings, each given once."""

    def __init__(self):
        self._given = set()

    def warn(self, key, text: str) -> None:
        """Log `text` as a warning unless one with an equal `key` was given before."""
        if key not in self._given:
            self._given.add(key)
            logger.warning("%s", text)
