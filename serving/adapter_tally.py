"""Requests by adapter, counted as they come and go."""

from collections import Counter

from serving.request import Request


class AdapterTally:
    """How many requests there are in one phase, in total and by adapter.

    Attributes:
      num_requests: of all, those on the base model included.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self._num_users: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        """A request has entered the phase."""
        self.num_requests += 1
        for adapter_id in request.adapters:
            self._num_users[adapter_id] += 1

    def remove(self, request: Request) -> None:
        """A request has left the phase."""
        self.num_requests -= 1
        for adapter_id in request.adapters:
            self._num_users[adapter_id] -= 1
            if self._num_users[adapter_id] == 0:
                del self._num_users[adapter_id]

    def by_adapter(self) -> Counter[str]:
        """Requests of each adapter that has any: a copy, which another thread may ask for."""
        return self._num_users.copy()

    def __contains__(self, adapter_id: str) -> bool:
        """True if a request in this phase uses the adapter."""
        return adapter_id in self._num_users
