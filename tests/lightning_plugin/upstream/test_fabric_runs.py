"""What Lightning's integration tests of Fabric's ModelParallelStrategy check, under their names; no plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    FeedForward,
    assert_same_weights,
    fixed_data,
    loader,
    set_torchrun_environment,
)
from lightning_plugin.upstream.parts import compiled, full_values, shard_both, shard_data, shard_features
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from support.ranks import on_ranks
from weft.lightning.fabric import WeftModelParallelStrategy


def fabric_of(rank: int, world_size: int, function: Any, data: Any = "auto", **options: Any) -> Fabric:
    """Return Fabric with `data` data-parallel ranks; the others are tensor-parallel."""
    set_torchrun_environment(rank, world_size)
    precision = options.pop("precision", "32-true")
    tensor = "auto" if data == "auto" else world_size // data
    strategy = WeftModelParallelStrategy(function, data_parallel_size=data, tensor_parallel_size=tensor, **options)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def step(fabric: Fabric, model: nn.Module, optimizer: Any, batch: Tensor | None = None) -> None:
    batch = fixed_data()[:BATCH].to(next(model.parameters()).dtype) if batch is None else batch
    fabric.backward((model(batch) - batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def trained(fabric: Fabric) -> tuple[Any, Any]:
    """Return a model and its optimizer after a step; the random weights are the same on all ranks."""
    fabric.seed_everything(3)
    dtype = torch.float32 if fabric.strategy.precision.precision == "bf16-mixed" else torch.float64
    with fabric.init_module(empty_init=True):
        model = FeedForward(dtype)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    step(fabric, model, optimizer)
    return model, optimizer


def same_folder(fabric: Fabric, folder: Path) -> Path:
    return Path(fabric.broadcast(str(folder)))


@on_ranks(4)
def test_setup_device_mesh(rank: int, world_size: int) -> None:
    for sizes in ((1, 4), (4, 1), (2, 2), ("auto", "auto")):
        fabric = fabric_of(rank, world_size, shard_both, sizes[0])
        mesh = fabric.strategy.device_mesh
        assert mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
        assert mesh.device_type == fabric.device.type
        assert mesh.shape == ((1, 4) if sizes[0] == "auto" else sizes)
        fabric.barrier()


def _assert_steps_match_one_device(fabric: Fabric, model: Any, batches: Any) -> None:
    """Train with SGD on `batches`, of which each data-parallel rank has its own, and compare with one device."""
    reference = FeedForward()
    reference.load_state_dict(full_values(model))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    unsharded = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in batches:
        step(fabric, model, optimizer, batch)
        full = fabric.all_gather(batch, group="data_parallel").flatten(0, 1)
        (reference(full) - full).square().mean().backward()
        unsharded.step()
        unsharded.zero_grad()
    assert_same_weights(full_values(model), full_values(reference))


@on_ranks(2)
@pytest.mark.parametrize("compiles", ["not", "in function", "before"])
def test_tensor_parallel(rank: int, world_size: int, compiles: str) -> None:
    function = compiled(shard_features) if compiles == "in function" else shard_features
    fabric = fabric_of(rank, world_size, function)
    fabric.seed_everything(0)
    with fabric.init_module(empty_init=True):
        model: Any = FeedForward()
    assert model.w1.weight.is_meta
    model = fabric.setup(torch.compile(model, backend="eager") if compiles == "before" else model)
    mesh = fabric.strategy.device_mesh["tensor_parallel"]
    assert all(isinstance(weight, DTensor) and weight.device_mesh == mesh for weight in model.parameters())
    batches = fabric.setup_dataloaders(loader())
    assert isinstance(batches.sampler, DistributedSampler)
    assert len(batches) == len(loader())
    for batch in batches:
        first, second = fabric.all_gather(batch)
        assert torch.equal(first, second)
    _assert_steps_match_one_device(fabric, model, batches)


@on_ranks(4)
def test_fsdp2_tensor_parallel(rank: int, world_size: int) -> None:
    """The compiled model is in test_tensor_parallel: the compiler takes seconds to be imported on each rank."""
    fabric = fabric_of(rank, world_size, shard_both, 2)
    with fabric.init_module(empty_init=True):
        model = FeedForward()
    model = fabric.setup(model)
    mesh = fabric.strategy.device_mesh
    assert all(weight.device_mesh.shape == (2, 2) and not weight.is_meta for weight in model.parameters())
    batches = fabric.setup_dataloaders(loader())
    assert isinstance(batches.sampler, DistributedSampler)
    assert len(batches) == len(loader()) // 2
    for batch in batches:
        gathered = fabric.all_gather(batch)
        tensor_ranks, data_ranks = (mesh[name].mesh for name in ("tensor_parallel", "data_parallel"))
        assert torch.equal(*gathered[tensor_ranks])
        assert not torch.equal(*gathered[data_ranks])
    _assert_steps_match_one_device(fabric, model, batches)


@on_ranks(4)
def test_collectives_of_stock_cover_the_world(rank: int, world_size: int) -> None:
    """Without a plan; a group can also be an axis of the mesh, and with a plan the data axes are the default."""
    for strategy in (None, "auto"):
        fabric = fabric_of(rank, world_size, None, 2, plan=strategy)
        mesh, value = fabric.strategy.device_mesh, torch.tensor([float(rank)])
        everyone, data = [0.0, 1.0, 2.0, 3.0], [float(rank % 2), rank % 2 + 2.0]
        tensor = [rank // 2 * 2.0, rank // 2 * 2.0 + 1]
        default = everyone if strategy is None else data
        groups = {"tensor_parallel": tensor, "data_parallel": data, "world": everyone, None: default}
        for group, expected in groups.items():
            assert fabric.all_gather(value, group=group).flatten().tolist() == expected
            assert fabric.all_reduce(value.clone(), group=group, reduce_op="sum").item() == sum(expected)
        for group in (mesh["tensor_parallel"], mesh.get_group("tensor_parallel")):
            assert fabric.all_gather(value, group=group).flatten().tolist() == tensor
        wrong = {"experts": r"got the group 'experts'; pass one of 'data_parallel', 'tensor_", mesh: "2 axes"}
        for group, text in wrong.items():
            with pytest.raises(ValueError, match=text):
                fabric.all_gather(value, group=group)
        assert fabric.strategy.reduce_boolean_decision(rank == 1, all=False)
        assert not fabric.strategy.reduce_boolean_decision(rank == 1)


@on_ranks(2)
def test_no_backward_sync_pauses_modules_of_the_user(rank: int, world_size: int) -> None:
    fabric = fabric_of(rank, world_size, shard_data, 2)
    reference, model = FeedForward(), FeedForward()
    model.load_state_dict(reference.state_dict())
    model = fabric.setup(model)
    reference.load_state_dict(full_values(model))
    batches = fixed_data().split(BATCH)[:4]
    with fabric.no_backward_sync(model):
        fabric.backward(model(batches[rank]).square().mean())
        assert all(weight.grad is None for weight in model.parameters())
    fabric.backward(model(batches[2 + rank]).square().mean())
    for batch in batches:
        (reference(batch).square().mean() / world_size).backward()
    gradients = {name: weight.grad.full_tensor() for name, weight in model.module.named_parameters()}
    assert_same_weights(gradients, {name: weight.grad for name, weight in reference.named_parameters()})


@on_ranks(4)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_train_save_load(rank: int, world_size: int, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for _ in range(2):  # the second save replaces the first one
        fabric = fabric_of(rank, world_size, shard_both, 2, precision=precision)
        model, optimizer = trained(fabric)
        fabric.save(path, {"model": model, "optimizer": optimizer, "steps": 1})
        saved = full_values(model)
    files = {".metadata", "meta.pt", *(f"__{idx}_0.distcp" for idx in range(world_size))}
    assert set(os.listdir(path)) == files

    fabric = fabric_of(rank, world_size, shard_both, 2, precision=precision)
    model, optimizer = trained(fabric)
    step(fabric, model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}
    assert fabric.load(path, state) == {}
    assert state["steps"] == 1
    assert_same_weights(full_values(model), saved, rtol=0)
    state = {"model": model, "other": 11}
    with pytest.raises(KeyError, match="The requested state contains a key 'other' that does not exist"):
        fabric.load(path, state)
    fabric.load(path, state, strict=False)
    assert state["other"] == 11
    step(fabric, model, optimizer)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_save_full_state_dict(rank: int, world_size: int, tmp_path: Path) -> None:
    fabric = fabric_of(rank, world_size, shard_data, 2, save_distributed_checkpoint=False)
    path, plain_path = tmp_path / "full.pt", tmp_path / f"plain{rank}.pt"
    model, optimizer = trained(fabric)
    fabric.save(path, {"model": model, "optimizer": optimizer, "steps": 1})
    fabric.barrier()
    expected = full_values(model)
    saved = torch.load(path, weights_only=True)
    assert saved["steps"] == 1
    assert set(saved["optimizer"]) == {"state", "param_groups"}
    assert_same_weights(saved["model"], expected, rtol=0)
    step(fabric, model, optimizer)
    after_step = full_values(model)

    # A plain model and optimizer of Fabric on one device
    one = Fabric(accelerator="cpu", devices=1)
    plain, plain_optimizer = trained(one)
    assert one.load(path, {"model": plain, "optimizer": plain_optimizer}) == {"steps": 1}
    assert_same_weights(full_values(plain), expected, rtol=0)
    one.save(plain_path, {"model": plain, "optimizer": plain_optimizer, "steps": 2})
    moments = torch.load(plain_path, weights_only=True)["optimizer"]["state"][0]["exp_avg"]
    [name] = [name for name in saved["optimizer"]["state"] if name.endswith("w1.weight")]
    assert torch.equal(moments, saved["optimizer"]["state"][name]["exp_avg"])

    # The file of each of the two, in a sharded model
    for source, steps in ((path, 1), (plain_path, 2)):
        fabric = fabric_of(rank, world_size, shard_data, 2)
        model, optimizer = trained(fabric)
        step(fabric, model, optimizer)
        assert fabric.load(tmp_path / source.name, {"model": model, "optimizer": optimizer}) == {"steps": steps}
        assert_same_weights(full_values(model), expected, rtol=0)
        step(fabric, model, optimizer)
        assert_same_weights(full_values(model), after_step)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_load_full_state_dict_into_sharded_model(rank: int, world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain, path = FeedForward(), tmp_path / "weights.pt"
    if rank == 0:
        torch.save({"model": plain.state_dict(), "steps": 1}, tmp_path / "full.pt")
        torch.save(plain.state_dict(), path)
    fabric = fabric_of(rank, world_size, shard_data, 2)
    fabric.barrier()
    model, optimizer = trained(fabric)
    state = {"model": model, "steps": 44}
    fabric.load(tmp_path / "full.pt", state)
    assert state["steps"] == 1
    assert_same_weights(full_values(model), full_values(plain), rtol=0)
    step(fabric, model, optimizer)
    fabric.load_raw(path, model)
    assert_same_weights(full_values(model), full_values(plain), rtol=0)


@on_ranks(2)
def test_load_raw_module_state(rank: int, world_size: int, tmp_path: Path) -> None:
    """Lightning tests its private function; `fabric.load_raw` calls it."""
    torch.manual_seed(5)
    values = FeedForward().state_dict()
    file, partial = tmp_path / f"{rank}.pt", tmp_path / f"partial{rank}.pt"
    torch.save(values, file)
    torch.save({name: value for name, value in values.items() if name != "w2.weight"}, partial)
    fabric = fabric_of(rank, world_size, shard_features)
    model = fabric.setup(FeedForward())
    fabric.load_raw(file, model)
    assert_same_weights(full_values(model), values, rtol=0)
    with pytest.raises(KeyError, match=r"The model contains a key 'w2\.weight' that does not exist"):
        fabric.load_raw(partial, model)
    fabric.load_raw(partial, model, strict=False)


@on_ranks(2)
@pytest.mark.parametrize("moves", [True, False])
def test_setup_module_move_to_device(rank: int, world_size: int, moves: bool) -> None:
    fabric = fabric_of(rank, world_size, shard_data)
    model = fabric.setup_module(FeedForward(), move_to_device=moves)
    assert isinstance(model.w1.weight, DTensor)
    assert model.w1.weight.device == model.device == fabric.device


@on_ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true"])
def test_module_init_context(rank: int, world_size: int, precision: str) -> None:
    dtype = {"32-true": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]
    fabric = fabric_of(rank, world_size, keep_or_shard, precision=precision)
    for empty, device in ((False, "cpu"), (True, "meta")):
        with fabric.init_module(empty_init=empty):
            model = nn.Sequential(nn.Linear(4, 4))
        assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {(device, dtype)}
        model = fabric.setup(model)
        assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {("cpu", dtype)}


def keep_or_shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


@on_ranks(2)
def test_save_filter(rank: int, world_size: int, tmp_path: Path) -> None:
    for is_distributed in (False, True):
        fabric = fabric_of(rank, world_size, shard_data, 2, save_distributed_checkpoint=is_distributed)
        model = fabric.setup(FeedForward())
        path, chosen = tmp_path / "filtered.pt", {"model": lambda name, value: "w2" in name}
        if is_distributed:
            with pytest.raises(NotImplementedError, match="doesn't support loading distributed filtered"):
                fabric.save(path, {"model": model}, filter=chosen)
            continue
        fabric.save(path, {"model": model}, filter=chosen)
        fabric.barrier()
        [(name, value)] = torch.load(path, weights_only=True)["model"].items()
        assert name == "w2.weight"
        assert type(value) is Tensor


@on_ranks(2)
@pytest.mark.parametrize("by", ["norm", "value"])
def test_clip_gradients(rank: int, world_size: int, by: str) -> None:
    fabric = fabric_of(rank, world_size, shard_both)
    model = fabric.setup(FeedForward())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = fixed_data()[:BATCH]
    fabric.backward(model(batch).square().sum())
    before = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    if by == "value":
        fabric.clip_gradients(model, optimizer, clip_val=0.1)
        expected = {name: gradient.clamp(-0.1, 0.1) for name, gradient in before.items()}
    else:  # Lightning skips this case, because its norm is wrong
        norm = torch.cat([gradient.flatten() for gradient in before.values()]).norm()
        assert fabric.clip_gradients(model, optimizer, max_norm=norm.item() / 10).item() == pytest.approx(norm.item())
        expected = {name: gradient / 10 for name, gradient in before.items()}
    clipped = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert_same_weights(clipped, expected, rtol=1e-5)
    optimizer.step()


@on_ranks(4)
def test_save_sharded_and_consolidate_and_load(rank: int, world_size: int, tmp_path: Path) -> None:
    fabric = fabric_of(rank, world_size, shard_both, 2)
    model, optimizer = trained(fabric)
    fabric.save(tmp_path / "sharded", {"model": model, "optimizer": optimizer, "steps": 1})
    if rank == 0:
        torch.save(_load_distributed_checkpoint(tmp_path / "sharded"), tmp_path / "full.pt")
    fabric.barrier()
    expected = full_values(model)
    model, optimizer = trained(fabric_of(rank, world_size, shard_both, 2))
    step(fabric, model, optimizer)
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    fabric.load(tmp_path / "full.pt", state)
    assert state["steps"] == 1
    assert_same_weights(full_values(model), expected, rtol=0)
