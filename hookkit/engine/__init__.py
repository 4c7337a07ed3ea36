"""Everything that knows thunder's values and traces: the life of a call, from match to wrapped result."""
