"""How long the engine may be kept waiting: one budget per step, and a circuit breaker. Pure; time is an argument.

A step has the whole budget, of which a fifth is left after a slow answer. After a passed deadline nothing is asked
for a pause that doubles up to MAX_PAUSE_S, and steps have that fifth until an answer comes.
Called by the scheduler client on the scheduler's thread.
"""

from __future__ import annotations

SLOW_SHARE = 0.2
MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0


class Patience:
    """Ask `allowance_s` before each request, and tell afterwards what came of it."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._slow_s = SLOW_SHARE * budget_s
        self._left_s = 0.0
        self._has_given_up = False
        self._pause_s = MIN_PAUSE_S
        self._asks_again_at = float("-inf")

    def begin_step(self) -> None:
        """Renew the budget."""
        self._left_s = self._slow_s if self._has_given_up else self._budget_s

    def allowance_s(self, now: float) -> float:
        """How long the next request may wait; 0 means: do not ask."""
        return self._left_s if now >= self._asks_again_at else 0.0

    def answered(self, waited_s: float) -> None:
        """The server has answered."""
        self._has_given_up = False
        self._pause_s = MIN_PAUSE_S
        self._spend(waited_s)

    def gave_up(self, waited_s: float, now: float) -> None:
        """The deadline has passed."""
        self._has_given_up = True
        self._asks_again_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._spend(waited_s)

    def check(self) -> None:
        """Never negative, never past its bounds."""
        assert 0.0 <= self._left_s <= self._budget_s
        assert MIN_PAUSE_S <= self._pause_s <= MAX_PAUSE_S

    def _spend(self, waited_s: float) -> None:
        self._left_s = max(0.0, self._left_s - waited_s)
        if waited_s > self._slow_s:
            self._left_s = min(self._left_s, self._slow_s)
