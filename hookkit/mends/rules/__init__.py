"""The rules of mends: operations of torch that thunder lacks, or gets wrong. Each is what a user could have written."""

from hookkit.mends.rules import gradients, gradients_by_pytorch, missing_operations, values

__all__ = ["MENDS", "gradients", "gradients_by_pytorch", "missing_operations", "values"]

MENDS = [*values.MENDS, *gradients.MENDS, *gradients_by_pytorch.MENDS, *missing_operations.MENDS]
