"""The random numbers of the optimizer steps: unbiased, different everywhere, and independent of sharding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ops.optimizer_cases import STATES, WEIGHTS, assert_same_bits, bits_of, check_state, make_case, steps
from ops.optimizer_oracle import BLOCK, Case, State, block_maxima, companded


@pytest.mark.parametrize("states", ["bfloat16", "codes"])
@pytest.mark.parametrize("formula", ["adamw", "sgd"])
def test_stochastic_rounding_is_unbiased(formula: str, states: str) -> None:
    """The mean over seeds is within 5.5 standard deviations, at most 1/2 step each, of the exact state."""
    torch.manual_seed(2)
    first = make_case(formula, (BLOCK,), "float32", states)
    count = 2000
    sums = [torch.zeros(BLOCK, dtype=torch.float64) for _ in first.states]
    for seed in range(count):
        case = first.clone()
        case.options["seed"] = seed
        case.run()
        for index, state in enumerate(case.states):
            sums[index] += state.values.double().abs()
    for sum_, exact, state in zip(sums, first.exact()[1], first.states, strict=True):
        if states == "codes":
            expected, step = companded(exact, block_maxima(exact), state.values.dtype), torch.tensor(1.0)
            clear = expected >= 1  # smaller second moments are raised to code 1
        else:
            expected, step = exact.abs(), 2.0 ** (exact.abs().log2().floor() - 7)
            clear = exact != 0
        assert clear.sum() > BLOCK / 2
        assert ((sum_ / count - expected) / step)[clear].abs().max() < 5.5 * 0.5 / count**0.5


def test_random_numbers_differ_by_seed_step_and_position() -> None:
    def codes(**options: int) -> Tensor:
        torch.manual_seed(3)
        case = make_case("adamw", (4 * BLOCK,), states="codes", **options)
        case.states[0].values.random_(-127, 127)
        case.states[0].scale.fill_(1.0)
        case.options["lr"] = 0.0
        case.run()
        return case.states[0].values

    base = {"step": 5, "seed": 7, "row": 2, "column": 0, "full_columns": 4096}
    changes = [
        {"step": 6},
        {"step": 5 + 2**32},
        {"seed": 8},
        {"seed": 7 + 2**32},
        {"row": 3},
        {"column": 256},
        {"row": 2 + 2**20},  # 2^32 elements later
        {"row": 2 + 2**40},
    ]
    results = [codes(**base | change) for change in [{}, *changes]]
    for left, right in itertools.combinations(results, 2):
        assert 0.1 < (left != right).float().mean() < 0.6


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("formula", ["adamw", "sgd"])
def test_shards_have_the_bits_of_the_unsharded_step(formula: str, weights: str, states: str) -> None:
    torch.manual_seed(4)
    rows, columns = 5, 1000
    full = make_case(formula, (rows, columns), weights, states)
    list(steps(full, 1))
    full.options["step"] = 2
    shards = [((begin, end), (0, columns)) for begin, end in [(0, 2), (2, 3), (3, 5)]]
    cuts = [0, 512, 768, 1000] if states == "codes" else [0, 300, 301, 1000]
    shards += [((0, rows), (begin, end)) for begin, end in itertools.pairwise(cuts)]
    before, _ = full.clone(), full.run()
    for (top, bottom), (left, right) in shards:

        def shard(tensor: Tensor | None, top=top, bottom=bottom, left=left, right=right) -> Tensor | None:
            if tensor is None:
                return None
            if tensor.shape[1] != columns:  # scales
                left, right = left // BLOCK, -(-right // BLOCK)
            return tensor[top:bottom, left:right].clone(memory_format=torch.contiguous_format)

        def part(case: Case, shard=shard) -> Case:
            cut_states = [State(shard(state.values), shard(state.scale)) for state in case.states]
            return Case(shard(case.parameter), shard(case.low_bits), shard(case.grad), cut_states, dict(case.options))

        local = part(before)
        local.options |= {"row": top, "column": left}
        local.run()
        assert_same_bits(bits_of(local), bits_of(part(full)))


@pytest.mark.parametrize("states", ["bfloat16", "codes"])
def test_positions_beyond_2_to_32_within_a_block(states: str) -> None:
    torch.manual_seed(5)
    case = make_case("adamw", (2, 500), "float32", states, row=1, column=2**31 - 500, full_columns=2**31 + 400)
    # The first block begins 100 positions before 2^32.
    crossing = (case.positions() >= 2**32).flatten()
    assert 0 < crossing[:BLOCK].sum() < BLOCK
    before = case.clone()
    case.run()
    for index, exact in enumerate(before.exact()[1]):
        check_state(before, case, index, exact)
