"""Interpreter values: unwrapped, wrapped, and paired with the arguments of a call."""
