"""Rate-limited warnings about what other nodes do wrong, so that none of them can flood the log."""

from __future__ import annotations

import logging
from collections import Counter


class RateLimitedLog:
    """Logs warnings that may repeat without end: the 1st, 2nd, 4th, 8th, ... time.

    Other nodes cause them, so details in their words are shortened to one line, and do not count as another warning.
    """

    def __init__(self, log: logging.Logger):
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, text: str, detail: object = "") -> None:
        """Count a warning, and log it with the detail if its count is a power of two."""
        self._counts[text] += 1
        if (total := self._counts[text]).bit_count() == 1:
            self._log.warning(f"{text} ({total} so far)" + (f": {str(detail)!r:.200}" if detail else ""))
