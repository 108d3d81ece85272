"""n-step transitions out of a stream of steps, for B environments side by side."""

from __future__ import annotations


class NStep:
    """Placeholder."""
