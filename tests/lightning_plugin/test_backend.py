"""The process group's backend that the strategies choose, and a user's own FSDP2 on the weft backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    NUM_BATCHES,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy


@pytest.mark.parametrize(
    ("chosen", "num_nodes", "expected"),
    [
        (None, 1, "cpu:weft"),
        ("gloo", 1, "gloo"),
        (None, 2, "cpu:weft"),
        ("cpu:weft,cuda:nccl", 1, "cpu:weft,cuda:nccl"),
    ],
)
def test_cpu_backend_defaults_to_weft(tmp_path: Path, chosen: str | None, num_nodes: int, expected: str) -> None:
    """CPU ranks use weft's backend, on any number of nodes; a user's choice is always respected."""
    strategy = WeftModelParallelStrategy(process_group_backend=chosen)
    trainer(2, strategy, tmp_path, num_nodes=num_nodes)
    assert strategy._get_process_group_backend() == expected
    for_fabric = FabricStrategy(process_group_backend=chosen)
    Fabric(accelerator="cpu", devices=2, num_nodes=num_nodes, strategy=for_fabric)
    assert for_fabric._get_process_group_backend() == expected


@pytest.mark.parametrize(
    ("strategy_class", "options"), [(WeftModelParallelStrategy, {"pipeline_module": "model"}), (FabricStrategy, {})]
)
def test_pipeline_on_cuda_adds_cpu_backend(
    monkeypatch: pytest.MonkeyPatch, strategy_class: type, options: dict[str, str]
) -> None:
    """Messages between stages are announced between CPUs; without stages the stock default is used."""
    monkeypatch.setattr(strategy_class, "root_device", torch.device("cuda:0"))
    assert strategy_class()._get_process_group_backend() == "nccl"
    staged = {"pipeline_parallel_size": 2, "pipeline_cuts": ["layers.2"], **options}
    assert strategy_class(**staged)._get_process_group_backend() == "cpu:weft,cuda:nccl"
    offloaded = {"plan": "auto", "offload": {"parameters": "cpu"}}
    assert strategy_class(**offloaded)._get_process_group_backend() == "cpu:weft,cuda:nccl"
    assert strategy_class(**staged, process_group_backend="gloo")._get_process_group_backend() == "gloo"


class ShardedByUser(Model):
    """Data parallel with FSDP2 in configure_model, as Lightning documents it; each rank has its own batches."""

    def configure_model(self) -> None:
        if isinstance(self, FSDPModule):
            return  # Lightning calls configure_model before every run
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.feed_forward, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        assert not torch.is_inference_mode_enabled()
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("num_samples", torch.tensor(len(batch)), sync_dist=True, reduce_fx="sum")
        self.log("rank", float(dist.get_rank()), sync_dist=True)


@on_ranks(2)
def test_user_fsdp_trains_on_weft_backend(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    assert dist.get_backend() == "cpu:weft"
    keep = ModelCheckpoint(dirpath=tmp_path / "best", monitor="val_loss", save_last=True)
    run = trainer(
        world_size,
        WeftModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
        tmp_path,
        max_epochs=5,
        callbacks=[keep, EarlyStopping("val_loss", mode="max", patience=1)],
        enable_checkpointing=True,
    )
    model = ShardedByUser()
    mine = fixed_data().view(NUM_BATCHES, BATCH, -1)[rank::world_size].flatten(0, 1)
    run.fit(model, loader(mine), loader(mine))
    assert run.current_epoch == 2, "early stopping expects a rising loss, so every rank stops after the second epoch"
    losses = torch.zeros(world_size, dtype=torch.float64)
    with torch.no_grad():
        losses[rank] = torch.stack([model.loss(batch) for batch in loader(mine)]).mean()
    dist.all_reduce(losses)
    assert run.callback_metrics["val_loss"].item() == pytest.approx(losses.mean().item(), rel=1e-6)
    assert run.callback_metrics["num_samples"].item() == BATCH * world_size * NUM_BATCHES // world_size
    assert run.callback_metrics["rank"].item() == pytest.approx((world_size - 1) / 2)
    assert (Path(keep.best_model_path) / "meta.pt").is_file()
    [tested] = run.test(model, loader(mine), verbose=False)
    assert tested["test_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert torch.cat(run.predict(model, loader(mine))).shape == mine.shape
    run.validate(model, loader(mine), ckpt_path=keep.best_model_path, verbose=False)
