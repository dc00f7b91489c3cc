"""Models with compiled blocks are planned and trained like models without, and planning compiles nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from support.models import Llama, LlamaArgs
from support.parity import assert_close, tensor_parallel
from support.ranks import on_ranks
from weft.strategy.planning.auto import assign_auto

TOKENS = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(2))


class Backend:
    """Runs a graph as it was traced, and counts the graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


def compile_blocks(model: Llama, is_wrapped: bool) -> Backend:
    """Compile each block into one graph, in place or by the wrapper that `torch.compile` returns."""
    backend = Backend()
    for idx, block in enumerate(model.layers):
        if is_wrapped:
            model.layers[idx] = torch.compile(block, backend=backend, fullgraph=True)
        else:
            block.compile(backend=backend, fullgraph=True)
    return backend


def plain(name: str) -> str:
    """Return a module's name without the level that a wrapper adds."""
    return name.replace("._orig_mod", "")


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["in place", "wrapper"])
def test_plan_equals_plan_of_uncompiled_model(is_wrapped: bool) -> None:
    model = Llama(LlamaArgs(dtype=torch.float32))
    expected = assign_auto(model, 2, example=(TOKENS,))
    backend = compile_blocks(model, is_wrapped)
    found = assign_auto(model, 2, example=(TOKENS,))
    assert {plain(name): assigned.style for name, assigned in found.styles.items()} == {
        name: assigned.style for name, assigned in expected.styles.items()
    }
    assert [plain(name) for name in found.gathered] == list(expected.gathered)
    assert backend.num_graphs == 0


@on_ranks(2)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["in place", "wrapper"])
def test_training_matches_unsharded(rank: int, world_size: int, is_wrapped: bool) -> None:
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(dtype=torch.float64))
    model: nn.Module = copy.deepcopy(reference)
    backend = compile_blocks(model, is_wrapped)
    model = weft.parallelize(model, tensor_parallel(world_size), "auto")
    assert backend.num_graphs == 0
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(TOKENS).square().mean().backward()
        optimizer.step()
    assert backend.num_graphs > 0
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(name, parameter, expected[plain(name)], 1e-10 * expected[plain(name)].norm().item())
