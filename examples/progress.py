"""A progress line on stderr, for terminals and for logs."""

from __future__ import annotations

import sys
import time

_WIDTH = 28


class Progress:
    """Shows how much of `total` is done and what remains: a bar on a terminal, else a line every tenth."""

    def __init__(self, total: int, label: str, stream=None):
        self._total, self._label, self._stream = max(total, 1), label, stream or sys.stderr
        self._live = self._stream.isatty()
        self._began, self._done, self._drawn = time.monotonic(), 0, 0.0

    def __enter__(self):
        self._show("")
        return self

    def step(self, note: str = "") -> None:
        """One more of `total` is done."""
        tenth = 10 * self._done // self._total
        self._done += 1
        last, now = self._done == self._total, time.monotonic()
        if last or (now - self._drawn > 0.1 if self._live else 10 * self._done // self._total > tenth):
            self._drawn = now
            self._show(note)

    def _show(self, note: str):
        share, taken = self._done / self._total, time.monotonic() - self._began
        left = f"{taken / share - taken:.0f} s left" if 0 < share < 1 else f"{taken:.0f} s"
        text = f"{self._label} {self._done}/{self._total}, {left}{', ' + note if note else ''}"
        if self._live:
            filled = round(_WIDTH * share)
            text = f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {text}\x1b[K"
        print(text, end="" if self._live else "\n", file=self._stream, flush=True)

    def __exit__(self, *exception):
        if self._live:
            print(file=self._stream, flush=True)
