"""Random calls of the optimizer steps in any formula, format, shape and place agree with the float64 oracle."""

from __future__ import annotations

import random

import pytest
import torch

from ops.optimizer_cases import FORMULAE, STATES, WEIGHTS, assert_same_bits, bits_of, check_state, make_case
from ops.optimizer_oracle import Case

DRAWS = 300


def _draw(seed: int) -> Case:
    """Return a step after two others, with random hyperparameters and a random place in an unsharded tensor."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = tuple(draw.choice((1, 2, 3, 5, 63, 64, 255, 256, 257, 300, 0)) for _ in range(draw.randrange(4)))
    if torch.Size(shape).numel() > 20_000:
        shape = shape[:1]
    case = make_case(draw.choice(list(FORMULAE)), shape, draw.choice(WEIGHTS), draw.choice(STATES))
    options = case.options
    columns, column = options["full_columns"], draw.choice((0, 1, 256, 2**31 - 17, 2**45))
    options |= {"column": column, "full_columns": column + columns + draw.choice((0, 1, 1000))}
    options |= {"row": draw.choice((0, 1, 2**20)), "seed": draw.getrandbits(64) - 2**63, "lr": draw.choice((0.0, 0.1))}
    options |= {"weight_decay": draw.choice((0.0, 0.3)), "maximize": draw.random() < 0.5}
    for step in (1, 2):
        options["step"] = step
        case.run()
        case.grad = torch.randn(shape).to(case.grad.dtype) * draw.choice((1e-3, 1.0, 30.0))
    if draw.random() < 0.3:
        case.grad = case.grad.float()
    options["step"] = draw.choice((3, 1000, 2**33))
    return case


@pytest.mark.parametrize("first_seed", range(0, DRAWS, 50))
def test_random_calls_are_the_oracle(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        before = _draw(seed)
        after, again = before.clone(), before.clone()
        after.run()
        again.run()
        assert_same_bits(bits_of(after), bits_of(again))
        for index, exact in enumerate(before.exact()[1]):
            check_state(before, after, index, exact)
