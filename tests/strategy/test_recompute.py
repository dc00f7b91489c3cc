"""The bytes that a column_row_mlp saves for the backward with and without `recompute`, and unchanged results."""

from __future__ import annotations

import copy

import pytest
import torch
from ops.memory.counting import counted
from torch import Tensor, nn

import weft
from support.models import FeedForward, Llama, LlamaArgs, token_batches
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks

RECOMPUTE = {"style": "column_row_mlp", "recompute": True}
TOKENS, DIM, HIDDEN = 8192, 1024, 4096


class _Scaled(nn.Module):
    """Passes the MLP an input that only the MLP's graph keeps alive."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = FeedForward(DIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x * 2).sum()


@on_ranks(2, 4, timeout=300)
def test_recompute_saves_only_input(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    saved = {}
    with counted() as count:
        x = torch.ones(TOKENS, DIM)
        weft.memory.tag([x], "saved_activations")  # as `watch` tags a batch in its first forward
        for recompute in (False, True):
            model = weft.parallelize(_Scaled(), mesh, {"mlp": {**RECOMPUTE, "recompute": recompute}})
            watch = weft.memory.watch(model)
            before = count.now("saved_activations")
            loss = model(x)
            saved[recompute] = count.now("saved_activations") - before - loss.nbytes
            watch.remove()
            del loss, model, watch
    assert saved[True] == TOKENS * DIM * 4
    assert saved[False] == TOKENS * DIM * 4 + 2 * TOKENS * HIDDEN // world_size * 4


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@on_ranks(1, 2, 3)
def test_recompute_matches_unsharded(world_size: int) -> None:
    torch.manual_seed(0)
    mesh = tensor_parallel(world_size)
    plan = {"layers.*.feed_forward": RECOMPUTE}
    assert_same_training(
        lambda model: weft.parallelize(model, mesh, plan),
        Llama(LlamaArgs(dtype=torch.float64)),
        _cross_entropy,
        token_batches(3, 37),
        "SGD",
    )


@on_ranks(2)
@pytest.mark.parametrize("bias", [False, True])
def test_recompute_gradients_are_bitwise_equal(world_size: int, bias: bool) -> None:
    torch.manual_seed(0)
    mesh = tensor_parallel(world_size)
    model = FeedForward(12, 30, bias=bias)
    x = torch.randn(5, 12)
    gradients = []
    for recompute in (False, True):
        copied = weft.parallelize(copy.deepcopy(model), mesh, {"": {**RECOMPUTE, "recompute": recompute}})
        inputs = x.clone().requires_grad_()
        copied(inputs).square().sum().backward()
        gradients.append([inputs.grad, *(p.grad.to_local() for p in copied.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@on_ranks(2)
def test_recompute_is_reported_and_exported(world_size: int) -> None:
    model = weft.parallelize(FeedForward(8, 12), tensor_parallel(world_size), {"": RECOMPUTE})
    assert {row.note for row in weft.strategy.report(model).rows} == {"silu, gated, recompute"}
    local = torch.jit.script(weft.export_local(model))
    assert "recompute" in local.code and local.recompute
    x = torch.randn(3, 8)
    assert torch.equal(local(x), model(x))


@on_ranks(2)
def test_recompute_without_fusion_raises(world_size: int) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 8))
    with pytest.raises(ValueError, match=r"is an option of the fused operator.*remove recompute"):
        weft.parallelize(model, tensor_parallel(world_size), {"": RECOMPUTE})
    assert type(model[0]) is nn.Linear


def test_non_boolean_recompute_raises() -> None:
    with pytest.raises(ValueError, match=r"has the value .*'recompute': 'yes'.*write a style"):
        weft.strategy.Plan({"mlp": {"style": "column_row_mlp", "recompute": "yes"}})
    assert weft.strategy.Plan({"mlp": RECOMPUTE}).to_dict() == {"mlp": RECOMPUTE}
