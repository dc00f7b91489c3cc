"""What Lightning's unit tests of Fabric's ModelParallelStrategy check, under their names; no plan."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning_plugin.upstream.parts import Environment, JoinedError, PartlyReset, record_joining
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from weft.lightning.fabric import WeftModelParallelStrategy


def keep(model: nn.Module, mesh: Any) -> nn.Module:
    return model


def strategy_without_ranks(parallelize_fn: Any = keep, **options: Any) -> Any:
    """Return a strategy that has a device and a mesh, but no process group."""
    strategy = WeftModelParallelStrategy(parallelize_fn, **options)
    strategy._device_mesh = Mock()
    strategy.parallel_devices = [torch.device("cpu")]
    return strategy


def modules(*inner: nn.Module) -> Any:
    """Return a mock of a module that has only the given modules, and no children."""
    return Mock(modules=Mock(return_value=list(inner)))


def test_torch_greater_equal_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.fabric.strategies.model_parallel._TORCH_GREATER_EQUAL_2_4", False)
    with pytest.raises(ImportError, match=r"ModelParallelStrategy requires PyTorch 2\.4 or higher"):
        WeftModelParallelStrategy(keep)


def test_device_mesh_access() -> None:
    with pytest.raises(RuntimeError, match=r"Accessing the device mesh .* not allowed"):
        _ = WeftModelParallelStrategy(keep).device_mesh


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (8, 2), (2, 1)])
def test_validate_device_mesh_dimensions(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = WeftModelParallelStrategy(keep, data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy.num_nodes = 2
    strategy.cluster_environment = Mock(world_size=Mock(return_value=8), local_rank=Mock(return_value=0))
    strategy.accelerator = Mock()
    monkeypatch.setattr(strategy, "_setup_distributed", Mock())
    with pytest.raises(RuntimeError, match="multiplied should equal the world size"):
        strategy.setup_environment()


def test_checkpoint_io_unsupported() -> None:
    strategy = WeftModelParallelStrategy(keep)
    with pytest.raises(NotImplementedError, match="does not use the `CheckpointIO` plugin"):
        _ = strategy.checkpoint_io
    with pytest.raises(NotImplementedError, match="does not support setting a `CheckpointIO` plugin"):
        strategy.checkpoint_io = Mock()


def test_fsdp_v1_modules_unsupported() -> None:
    wrapped = modules(Mock(spec=FullyShardedDataParallel))
    with pytest.raises(TypeError, match=r"only supports the new FSDP2 APIs in PyTorch >= 2\.4"):
        strategy_without_ranks().setup_module(wrapped)


def test_parallelize_fn_call() -> None:
    model, parallel = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    function = Mock(return_value=parallel)
    strategy = strategy_without_ranks(function)
    assert strategy.setup_module_and_optimizers(model, [optimizer])[:2] == (parallel, [optimizer])
    function.assert_called_once_with(model, strategy.device_mesh)
    assert optimizer.param_groups[0]["fused"] is None
    with pytest.raises(TypeError, match=r"`parallelize_fn` must return a `nn\.Module` instance, but got: NoneType"):
        strategy_without_ranks(Mock(return_value=None)).setup_module(model)


def test_no_backward_sync() -> None:
    control = WeftModelParallelStrategy(keep)._backward_sync_control
    assert isinstance(control, type(ModelParallelStrategy(keep)._backward_sync_control))
    sharded = Mock(spec=FSDPModule)
    for is_enabled in (True, False):
        sharded.reset_mock()
        with control.no_backward_sync(modules(sharded, nn.Linear(2, 2)), is_enabled):
            sharded.set_requires_gradient_sync.assert_called_once_with(not is_enabled, recurse=False)
        sharded.set_requires_gradient_sync.assert_called_with(is_enabled, recurse=False)


def test_save_checkpoint_storage_options(tmp_path: Path) -> None:
    text = r"ModelParallelStrategy\.save_checkpoint\(\.\.\., storage_options=\.\.\.\)` is not supported"
    with pytest.raises(TypeError, match=text):
        WeftModelParallelStrategy(keep).save_checkpoint(tmp_path / "a", Mock(), storage_options={"key": 1})


def test_save_checkpoint_path_exists(tmp_path: Path) -> None:
    """The saves that replace a checkpoint need ranks: see test_train_save_load."""
    (tmp_path / "file").touch()
    strategy = WeftModelParallelStrategy(keep, save_distributed_checkpoint=False)
    with pytest.raises(IsADirectoryError, match="exists and is a directory"):
        strategy.save_checkpoint(tmp_path, {"model": nn.Linear(2, 2)})
    assert (tmp_path / "file").exists()


def test_save_checkpoint_one_dist_module_required(tmp_path: Path) -> None:
    strategy = WeftModelParallelStrategy(keep)
    for state in ({}, {"model": nn.Linear(2, 2)}):
        with pytest.raises(ValueError, match="Could not find a distributed model in the provided checkpoint state"):
            strategy.save_checkpoint(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("state", [None, {}], ids=["None", "{}"])
def test_load_checkpoint_no_state(state: Any, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"ModelParallelStrategy\.load_checkpoint\(\.\.\., state=(None|\{\})"):
            WeftModelParallelStrategy(keep).load_checkpoint(path, state)


def test_load_checkpoint_one_dist_module_required(tmp_path: Path) -> None:
    strategy, model = WeftModelParallelStrategy(keep), nn.Linear(2, 2)
    for state in ({"other": 1}, {"model": model}):
        with pytest.raises(ValueError, match="Could not find a distributed model in the provided checkpoint state"):
            strategy.load_checkpoint(tmp_path, state)
    file = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, file)
    assert strategy.load_checkpoint(file, model) == {}  # a module instead of a dict
    assert model.weight.eq(1).all()


def test_load_unknown_checkpoint_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.fabric.strategies.model_parallel._has_dtensor_modules", lambda module: True)
    with pytest.raises(ValueError, match="does not point to a valid checkpoint"):
        WeftModelParallelStrategy(keep).load_checkpoint(tmp_path, {"model": Mock()})


def test_load_raw_checkpoint_validate_single_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="The given path must be a single file containing the full state dict"):
        WeftModelParallelStrategy(keep).load_checkpoint(tmp_path, nn.Linear(2, 2))


def test_load_raw_checkpoint_optimizer_unsupported(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(NotImplementedError, match="Loading a single optimizer object from a checkpoint is not support"):
        WeftModelParallelStrategy(keep).load_checkpoint(tmp_path, optimizer)


def test_set_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_joining(monkeypatch)
    strategy = WeftModelParallelStrategy(keep, timeout=timedelta(seconds=30))
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment, strategy.accelerator = Environment(), MagicMock()
    with pytest.raises(JoinedError):
        strategy.setup_environment()
    assert (seen["timeout"], seen["backend"]) == (timedelta(seconds=30), strategy._get_process_group_backend())
    assert (seen["rank"], seen["world_size"]) == (0, 1)


def test_meta_device_materialization() -> None:
    strategy = strategy_without_ranks()
    with torch.device("meta"):
        model = PartlyReset()
    with pytest.warns(UserWarning, match=r"`reset_parameters\(\)` method for re-initialization: NoReset"):
        model = strategy.setup_module(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.buffer.tolist() == [3.0, 3.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.setup_module(PartlyReset())


def test_precision_of_strategy_is_checked() -> None:
    """Lightning's test of its connector, `test_unsupported_precision`, has one case of ModelParallelStrategy."""
    with pytest.raises(ValueError, match=r"`ModelParallelStrategy` does not support `Fabric\(\.\.\., precision=.64-tr"):
        Fabric(accelerator="cpu", devices=2, precision="64-true", strategy=WeftModelParallelStrategy(keep))
