"""The rules of mends: operations of torch that thunder lacks, or gets wrong. Each is what a user could have written."""

from hookkit.mends.rules import corrections, missing_operations

__all__ = ["corrections", "missing_operations"]
