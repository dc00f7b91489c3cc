"""What Lightning's unit tests of the Trainer's ModelParallelStrategy check, under their names; no plan."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_plugin.upstream.parts import Environment, JoinedError, PartlyReset, record_joining
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weft.lightning import WeftModelParallelStrategy


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = PartlyReset()

    def configure_model(self) -> None:
        pass


def strategy_with(module: LightningModule, **options: Any) -> Any:
    """Return a strategy that has a device and a module, but no process group."""
    strategy = WeftModelParallelStrategy(**options)
    strategy.connect(module)
    strategy._lightning_module = module
    strategy.accelerator = MagicMock()
    strategy.parallel_devices = [torch.device("cpu")]
    return strategy


def test_torch_greater_equal_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.strategies.model_parallel._TORCH_GREATER_EQUAL_2_4", False)
    with pytest.raises(ImportError, match=r"ModelParallelStrategy requires PyTorch 2\.4 or higher"):
        WeftModelParallelStrategy()


def test_device_mesh_access() -> None:
    with pytest.raises(RuntimeError, match=r"Accessing the device mesh .* not allowed"):
        _ = WeftModelParallelStrategy().device_mesh


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (8, 2), (2, 1)])
def test_validate_device_mesh_dimensions(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = WeftModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy.num_nodes = 2
    strategy.cluster_environment = Mock(world_size=Mock(return_value=8), local_rank=Mock(return_value=0))
    strategy.accelerator = MagicMock()
    monkeypatch.setattr(strategy, "_setup_distributed", Mock())
    with pytest.raises(RuntimeError, match="multiplied should equal the world size"):
        strategy.setup_environment()


def test_fsdp_v1_modules_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Model()
    strategy = strategy_with(module)
    monkeypatch.setattr(module, "modules", Mock(return_value=[Mock(spec=FullyShardedDataParallel)]))
    with pytest.raises(TypeError, match=r"only supports the new FSDP2 APIs in PyTorch >= 2\.4"):
        strategy.setup(Mock())


def test_configure_model_required() -> None:
    with pytest.raises(TypeError, match="you are required to override the `configure_model"):
        strategy_with(LightningModule()).setup(Mock())
    strategy_with(Model()).setup(Mock())


def test_save_checkpoint_storage_options(tmp_path: Path) -> None:
    text = r"ModelParallelStrategy\.save_checkpoint\(\.\.\., storage_options=\.\.\.\)` is not supported"
    with pytest.raises(TypeError, match=text):
        WeftModelParallelStrategy().save_checkpoint(Mock(), tmp_path / "a", storage_options={"key": 1})


def test_save_checkpoint_path_exists(tmp_path: Path) -> None:
    """The saves that replace a directory of shards need ranks: see test_save_load_sharded_state_dict."""
    (tmp_path / "file").touch()
    strategy = WeftModelParallelStrategy(save_distributed_checkpoint=False)
    with pytest.raises(IsADirectoryError, match="exists and is a directory"):
        strategy.save_checkpoint({"step": 1}, tmp_path)
    strategy.save_checkpoint({"step": 2}, tmp_path / "file")  # replaces a file
    assert torch.load(tmp_path / "file") == {"step": 2}
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/meta.pt").touch()  # makes it a directory of Lightning
    strategy.save_checkpoint({"step": 3}, tmp_path / "shards")
    assert torch.load(tmp_path / "shards") == {"step": 3}


def test_load_unknown_checkpoint_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.fabric.strategies.model_parallel._has_dtensor_modules", lambda module: True)
    with pytest.raises(ValueError, match="does not point to a valid checkpoint"):
        strategy_with(Model()).load_checkpoint(tmp_path)


def test_set_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_joining(monkeypatch)
    strategy = strategy_with(Model(), timeout=timedelta(seconds=30))
    strategy.cluster_environment = Environment()
    with pytest.raises(JoinedError):
        strategy.setup_environment()
    assert (seen["timeout"], seen["backend"]) == (timedelta(seconds=30), strategy._get_process_group_backend())
    assert (seen["rank"], seen["world_size"]) == (0, 1)


def test_meta_device_materialization() -> None:
    with torch.device("meta"):
        module = Model()
    with pytest.warns(UserWarning, match=r"`reset_parameters\(\)` method for re-initialization: NoReset"):
        strategy_with(module).setup(Mock())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert module.inner.buffer.tolist() == [3.0, 3.0]
    assert isinstance(module.inner.inner[1], nn.Linear)
