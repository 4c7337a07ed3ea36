"""The hookkit rule for softclip. hookkit imports this module, and nobody else does."""

import torch

import hookkit

__all__ = ["register"]


def register() -> None:
    """Register the package's rules; named in pyproject.toml as an entry point of the group ``hookkit.rules``."""

    # By name: this imports nothing, and the rule is there when a program imports the operation.
    @hookkit.rule("softclip:softclip")
    def softclip(x, bound=1.0):
        bent = torch.tanh(x / bound)
        return bound * bent, hookkit.save(bent=bent)

    @softclip.backward
    def _(saved, grad):
        return {"x": grad * (1 - saved.bent * saved.bent)}
