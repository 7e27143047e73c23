"""Everything on the host: requests, scheduling, memory accounting, the engine loop, HTTP."""
