"""A call as its operations."""
