"""Whole training programs around Functions of the contract, the examples and two operations: eager's after three steps.

``tests/fuzz_training.py`` draws such programs for as long as one likes.
"""

import pytest
import torch
from training import WAYS, Recipe, difference

PROGRAM = Recipe(
    seed=1,
    blocks=(
        ("digits.LeanNorm", "residual"),
        ("square / logdet", "checkpoint"),
        ("contract: `once_differentiable`", "no_grad"),
        ("Linear", "in place"),
    ),
    shapes=((3,),),
    dtypes=(torch.float32, torch.float64),
    optimizer="AdamW",
    accumulate=1,
    clip=True,
    evaluated=False,
)


@pytest.mark.parametrize("way", WAYS)
def test_three_steps_of_training_are_those_of_eager_pytorch(way):
    assert difference(PROGRAM, way) is None
