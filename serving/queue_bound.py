"""Bounds how many requests wait for their first token: what is refused at once can go elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from serving.errors import InvalidRequestError, OverloadedError

DEFAULT_MAX_WAITING = 1024
MAX_RETRY_AFTER_S = 60  # an estimate further ahead is no estimate
_NUM_STARTS = 64  # recent first tokens, from which the rate is taken


class QueueBound:
    """Requests that have had no output yet, at most `max_waiting`. Touched on the event loop only.

    Running requests count while their prompt is read: to a client, both are waiting.

    Attributes:
      max_waiting: most requests that wait.
      on_refused: called with the number of requests refused.
    """

    def __init__(
        self,
        max_waiting: int = DEFAULT_MAX_WAITING,
        on_refused: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_waiting = max_waiting
        self.on_refused = on_refused
        self._clock = clock
        self._waiting: set[str] = set()
        self._starts_s: deque[float] = deque(maxlen=_NUM_STARTS)  # since somebody waits
        self._since_s = clock()  # when somebody began to wait, or the last start that is not kept

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, request_ids: Sequence[str]) -> None:
        """Lets requests wait, all or none.

        Raises:
          InvalidRequestError: If they are more than may ever wait.
          OverloadedError: If too many wait already.
        """
        num_new = len(request_ids)
        if num_new > self.max_waiting:
            raise InvalidRequestError(
                f"the request makes {num_new} choices, but at most {self.max_waiting} may wait (--max-waiting); send "
                "fewer prompts or a smaller n"
            )
        num_too_many = len(self._waiting) + num_new - self.max_waiting
        if num_too_many > 0:
            if self.on_refused is not None:
                self.on_refused(num_new)
            retry_after_s = self._retry_after_s(num_too_many)
            raise OverloadedError(
                f"{len(self._waiting)} requests wait for their first token, of at most {self.max_waiting} "
                f"(--max-waiting); try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
                code="queue_full",
            )
        if not self._waiting:
            self._starts_s.clear()
            self._since_s = self._clock()
        self._waiting.update(request_ids)

    def start(self, request_id: str) -> None:
        """A request has an output; called for every one of them."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            if len(self._starts_s) == _NUM_STARTS:
                self._since_s = self._starts_s[0]
            self._starts_s.append(self._clock())

    def leave(self, request_id: str) -> None:
        """A request has gone before it had an output."""
        self._waiting.discard(request_id)

    def _retry_after_s(self, num_too_many: int) -> int:
        """Seconds until so many waiting requests have started, if they start as they did lately."""
        seconds_each = (self._clock() - self._since_s) / max(1, len(self._starts_s))
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(num_too_many * seconds_each)))
