"""Parallelized models work with other parts of PyTorch: optimizers, clipping, checkpoints, FSDP2, hooks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weft
from support.models import FeedForward, Llama, LlamaArgs, token_batches
from support.parity import assert_close, assert_gradients_agree, assert_same_training, tensor_parallel
from support.ranks import on_ranks

PLAN = {"layers.*.feed_forward": "column_row_mlp", "layers.1.attention.wo": "replicate"}
TOKENS = token_batches(10, 37)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@on_ranks(2)
@pytest.mark.parametrize("option", ["fused", "foreach"])
def test_adamw_variants_match_unsharded(world_size: int, option: str) -> None:
    mesh = tensor_parallel(world_size)
    assert_same_training(
        lambda m: weft.parallelize(m, mesh, PLAN),
        Llama(LlamaArgs(dtype=torch.float64)),
        token_loss,
        TOKENS[:3],
        "AdamW",
        **{option: True},
    )


@on_ranks(2)
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_matches_unsharded(world_size: int, foreach: bool) -> None:
    reference = Llama(LlamaArgs(dtype=torch.float64))
    model = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), PLAN)
    for each in (model, reference):
        token_loss(each, TOKENS[0]).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in (model, reference)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    assert_gradients_agree(model, reference, 1e-10)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@on_ranks(2)
def test_distributed_checkpoint_loads_into_other_plans(world_size: int, folder: str) -> None:
    mesh = tensor_parallel(world_size)
    saved = weft.parallelize(Llama(LlamaArgs()), mesh, "auto")
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    torch.manual_seed(1)
    plain = Llama(LlamaArgs())
    loaded = weft.parallelize(
        copy.deepcopy(plain),
        mesh,
        {"layers.*.feed_forward.w1": "column", "layers.*.feed_forward.w2": "row", "layers.*.feed_forward.w3": "column"},
    )
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    assert torch.equal(loaded(TOKENS[0][0]), loaded(TOKENS[0][0]))
    torch.testing.assert_close(loaded(TOKENS[0][0]), saved(TOKENS[0][0]))
    unsharded = plain.state_dict()
    dcp.load(unsharded, checkpoint_id=folder)
    plain.load_state_dict(unsharded)
    torch.testing.assert_close(plain(TOKENS[0][0]), saved(TOKENS[0][0]))


def data_and_tensor(data: int, tensor: int):
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data_parallel", "tensor_parallel"))


@on_ranks(4)
def test_fsdp2_over_data_axis_matches_unsharded(rank: int, world_size: int) -> None:
    mesh = data_and_tensor(2, 2)
    for reshard in (True, False):
        reference = Llama(LlamaArgs(dtype=torch.float64, hidden_dim=40))
        model = weft.parallelize(copy.deepcopy(reference), mesh, "auto")
        for layer in model.layers:
            fully_shard(layer.feed_forward, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
            fully_shard(layer, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh["data_parallel"])
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
        for step in range(2):
            halves = TOKENS[2 * step : 2 * step + 2]
            token_loss(model, halves[rank // 2]).backward()
            theirs = sum(token_loss(reference, half) for half in halves) / 2
            theirs.backward()
            weft.strategy.check_replicated_gradients(model)
            for each in optimizers:
                each.step()
                each.zero_grad()
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            assert_close(name, parameter.full_tensor(), expected[name], 1e-10 * expected[name].norm().item())


@on_ranks(2)
def test_join_gate_up_after_fully_shard_raises(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = weft.parallelize(nn.Sequential(FeedForward(8, 12)), mesh, {"0": "column_row_mlp"})
    assert weft.strategy.join_gate_up(model) == 1
    fully_shard(model, mesh=mesh["data_parallel"])
    with pytest.raises(ValueError, match="fully_shard, which gathers each weight into memory of its own"):
        weft.strategy.join_gate_up(model)


@on_ranks(2)
def test_fully_shard_inside_fused_mlp_raises(world_size: int) -> None:
    mesh = data_and_tensor(world_size, 1)
    model = nn.ModuleDict({"mlp": FeedForward(8, 12)})
    weft.parallelize(model, mesh, {"mlp": "column_row_mlp"})
    fully_shard(model["mlp"].w1, mesh=mesh["data_parallel"])
    with pytest.raises(ValueError, match="fully_shard was applied to 'w1', a layer of a fused MLP"):
        model["mlp"](torch.randn(2, 8))
    model = nn.ModuleDict({"mlp": FeedForward(8, 12)})
    fully_shard(model["mlp"].w1, mesh=mesh["data_parallel"])
    with pytest.raises(ValueError, match=r"already applied to 'mlp.w1'.*call parallelize first"):
        weft.parallelize(model, mesh, {"mlp": "column_row_mlp"})


@on_ranks(1, 2)
def test_weight_gradients_complete_in_order(world_size: int) -> None:
    """A step in the backward needs this order: w2, w3, w1; each gradient is freed before the next exists."""
    model = FeedForward(8, 12)
    weft.parallelize(model, tensor_parallel(world_size), {"": "column_row_mlp"})
    events: list[str] = []

    def complete(parameter: Tensor, name: str) -> None:
        alive = [n for n, p in model.named_parameters() if p.grad is not None]
        events.append(f"{name} complete, alive: {','.join(alive)}")
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: complete(p, name))
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        y = model(x)
        _, (h1, _), _, (h3, _) = y.grad_fn.next_functions  # the inputs of the operator's last node: x, h1, w2, h3
        h1.register_prehook(lambda _: events.append("w1 begins"))
        h3.register_prehook(lambda _: events.append("w3 begins"))
        y.sum().backward()
        assert x.grad is not None
    w1, w2, w3 = (f"{name}.weight complete, alive: {name}.weight" for name in ("w1", "w2", "w3"))
    assert events == [w2, "w3 begins", w3, "w1 begins", w1] * 2


@on_ranks(2)
def test_frozen_weights_get_no_gradient(world_size: int) -> None:
    model = FeedForward(8, 12)
    model.w3.weight.requires_grad_(False)
    weft.parallelize(model, tensor_parallel(world_size), {"": "column_row_mlp"})
    model(torch.randn(3, 8)).sum().backward()
    assert model.w3.weight.grad is None
    assert isinstance(model.w1.weight.grad, DTensor)


@on_ranks(2)
def test_torch_checkpoint_of_block_keeps_gradients(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs(dtype=torch.float64)), tensor_parallel(world_size), "auto")
    layer = model.layers[0]
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    layer(x, model.cos, model.sin).sum().backward()
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(layer, x, model.cos, model.sin, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, expected)


@on_ranks(2)
def test_autocast_keeps_float32_gradients(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), "auto")
    with torch.autocast("cpu", torch.bfloat16):
        token_loss(model, TOKENS[0]).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    weft.strategy.check_replicated_gradients(model)
