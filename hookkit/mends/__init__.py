"""Faults of thunder's and of Dynamo's that have nothing to do with calls, corrected."""
