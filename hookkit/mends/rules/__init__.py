"""The rules of mends: operations of torch that thunder lacks, or gets wrong. Each is what a user could have written."""

from hookkit.mends.mend import Mend
from hookkit.mends.rules import corrections, missing_operations

MENDS: list[Mend] = []

__all__ = ["MENDS", "corrections", "missing_operations"]
