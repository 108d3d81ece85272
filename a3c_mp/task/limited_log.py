"""Rate-limited warnings about what other nodes do wrong, so that none of them can flood the log."""

from __future__ import annotations

import logging
from collections import Counter


class RateLimitedLog:
    """Logs warnings that may repeat without end: those whose count is a power of two.

    Other nodes cause them, so details in their words are shortened to one line, and do not count as another warning.
    """

    def __init__(self, log: logging.Logger):
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, text: str, detail: object = "", count: int = 1, traceback: bool = False) -> None:
        """Count a warning, and log it if its count says so.

        Args:
            text: what is counted.
            detail: what differs between the warnings of one text.
            count: how often it has happened.
            traceback: log that of the exception that is being handled too.
        """
        for _ in range(count):
            self._counts[text] += 1
            total = self._counts[text]
            if total & (total - 1) == 0:
                shown = f": {str(detail)!r:.200}" if detail else ""
                self._log.warning(f"{text} ({total} so far){shown}", exc_info=traceback)
