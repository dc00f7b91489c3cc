"""`offload` in the Trainer and Fabric: the results without it to the bit, on layouts and after loading; errors.

With the target "cpu" on CPU ranks, parameters are stepped on copies, as those of a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers.offload import OffloadedAdamW, OffloadedLowPrecisionAdamW

DIM, HIDDEN, NUM_STEPS = 64, 2048, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Sequential | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            self.model = nn.Sequential(Mlp(), Mlp())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.model(batch) - batch.flip(-1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.model(batch).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def _batches() -> torch.utils.data.DataLoader:
    values = torch.randn(8 * NUM_STEPS, DIM, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(values, batch_size=8)


def fit(
    world_size: int,
    folder: Path,
    ckpt_path: Path | None = None,
    max_epochs: int = 1,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a trained Model, its Trainer and its optimizer."""
    is_split = options.get("master_weights") is not None
    model, strategy = Model(), WeftModelParallelStrategy(plan="auto", **options)
    settings = {"max_epochs": max_epochs, "precision": "bf16-mixed" if is_split else "32-true"}
    settings |= trainer_options or {}
    run = trainer(world_size, strategy, folder, use_distributed_sampler=False, **settings)
    run.fit(model, _batches(), ckpt_path=ckpt_path)
    [optimizer] = run.optimizers
    return model, run, optimizer


def _tensors(model: Model, optimizer: Optimizer) -> list[Tensor]:
    states = (optimizer.state[parameter] for parameter in model.parameters())
    return [
        *map(local_shard, model.parameters()),
        *(local_shard(each[name]) for each in states for name in sorted(each)),
    ]


def _assert_equal(run: Any, expected: Any, message: str) -> None:
    assert run[0].losses == expected[0].losses, message
    pairs = zip(_tensors(run[0], run[2]), _tensors(expected[0], expected[2]), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs), message


CASES: dict[str, dict[str, Any]] = {
    "tp2": {},
    "by rows": {"optimizer_in_backward": "rows"},
    "split8": {"optimizer_in_backward": "rows", "optimizer_state": "int8", "master_weights": "split8"},
    "dp2": {"layout": "dp2", "optimizer_in_backward": True},
    "pp2": {"layout": "pp2", "pipeline_cuts": ["model.1"], "num_micro_batches": 2},
}


@on_ranks(2, keeps_groups=True)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "disk") for name in CASES),
        *((name, "cpu") for name in ("tp2", "split8", "dp2")),
        ("dp2", "parameters"),
    ],
)
def test_training_and_resuming_have_the_same_bits(
    rank: int, world_size: int, tmp_path: Path, name: str, target: str
) -> None:
    """One epoch, a checkpoint, and a second epoch; each is also loaded by the other kind of run."""
    set_torchrun_environment(rank, world_size)
    offloads = {"cpu": {"optimizer": "cpu"}, "disk": {"optimizer": f"disk:{tmp_path}/states-{rank}"}}
    offload = {"offload": {**offloads, "parameters": {"parameters": "cpu"}}[target]}
    options = CASES[name]
    expected = fit(world_size, tmp_path, **options)
    run = fit(world_size, tmp_path, **options, **offload)
    kind = OffloadedLowPrecisionAdamW if "optimizer_state" in options else OffloadedAdamW
    assert target == "parameters" or (type(run[2]) is kind and run[2]._kept)
    _assert_equal(run, expected, "first epoch")
    for kept in run[2]._kept.values() if target == "disk" else ():
        assert all(local_shard(kept[key].local).nbytes >= 64 << 10 for key in kept)
    folders = [tmp_path / "with", tmp_path / "without"]
    for each, folder in zip((run, expected), folders, strict=True):
        each[1].save_checkpoint(folder)
    resumed = [
        fit(world_size, tmp_path, folder, 2, **options, **(offload if folder == folders[1] else {}))
        for folder in folders
    ]
    _assert_equal(resumed[1], resumed[0], "second epoch")
    assert (type(resumed[1][2]) is kind) == (target != "parameters")
    assert len(resumed[0][0].losses) == len(expected[0].losses)


def train_by_fabric(accelerator: str, **options: Any) -> list[Tensor]:
    """Return this rank's shards after some steps."""
    fabric = Fabric(accelerator=accelerator, devices=2, strategy=FabricStrategy(**options))
    fabric.launch()
    torch.manual_seed(3)
    with fabric.init_module():
        model = nn.Sequential(Mlp(), Mlp())
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in fabric.setup_dataloaders(_batches(), use_distributed_sampler=False):
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [local_shard(parameter) for parameter in model.parameters()]


@on_ranks(2, keeps_groups=True)
def test_fabric(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    found = []
    for offload in (None, {"optimizer": f"disk:{tmp_path}/{rank}"}):
        found.append(train_by_fabric("cpu", plan="auto", offload=offload))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@on_ranks(2, keeps_groups=True)
@pytest.mark.parametrize("offload", [{"optimizer": "cpu"}, {"parameters": "cpu"}], ids=["states", "parameters"])
def test_a_model_can_be_tested_and_fitted_again(rank: int, world_size: int, tmp_path: Path, offload: Any) -> None:
    set_torchrun_environment(rank, world_size)
    layout = "dp2" if "parameters" in offload else "tp2"
    model, run, _ = fit(world_size, tmp_path, layout=layout, offload=offload)
    run.test(model, _batches(), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(model, _batches())
    assert len(model.losses) == 2 * NUM_STEPS  # the second fit goes on after the first epoch


@on_ranks(2)
def test_a_full_disk_of_one_rank_is_raised_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    (tmp_path / "file").touch()
    offload = {"optimizer": f"disk:{tmp_path}/{'file' if rank == 1 else rank}"}
    error, message = (FileExistsError, "file") if rank == 1 else (RuntimeError, "rank 1 failed to keep the states of")
    with pytest.raises(error, match=message):
        fit(world_size, tmp_path, offload=offload)


INVALID = {
    "none": ({"offload": "disk:/scratch"}, r"got offload='disk:/scratch'; pass a dict with the keys 'optimizer' or"),
    "key": ({"offload": {"weights": "disk:/scratch"}}, r"got offload=\{'weights': .*\}; pass a dict with the keys"),
    "target": (
        {"offload": {"optimizer": "gpu"}},
        r"'gpu' for optimizer states; pass 'cpu', or 'disk:' and",
    ),
    "parameters": (
        {"offload": {"parameters": "disk:/scratch"}},
        r"and parameters can be in CPU memory only; pass 'cpu'",
    ),
    "replicas": (
        {"offload": {"parameters": "cpu"}, "layout": "dp2", "zero_stage": 0},
        r"and zero_stage=0, and FSDP2 offloads parameters; pass zero_stage=3",
    ),
    "stages": (
        {"offload": {"parameters": "cpu"}, "layout": "pp2", "pipeline_cuts": ["model.1"]},
        r"and pipeline_cuts, whose stages keep their parameters on the device; leave one of them out",
    ),
    "no plan": ({"offload": {"parameters": "cpu"}}, r"without a plan, with which weft shards; pass plan='auto'"),
    "shards": (
        {"offload": {"optimizer": "disk:/scratch"}, "layout": "dp2", "zero_stage": 1},
        r"and zero_stage=1, which shards states in memory; pass zero_stage=0, 2 or 3",
    ),
}


@pytest.mark.parametrize("kind", INVALID)
@pytest.mark.parametrize("strategy", [WeftModelParallelStrategy, FabricStrategy], ids=["Trainer", "Fabric"])
def test_invalid_options_raise(kind: str, strategy: Any) -> None:
    options, message = INVALID[kind]
    with pytest.raises(ValueError, match=message):
        strategy(**options) if kind == "no plan" else strategy(plan="auto", **options)


def test_parameters_on_one_data_rank_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\{'parameters': 'cpu'\} with 1 data-parallel rank, and FSDP2 offloads"):
        fit(1, tmp_path, offload={"parameters": "cpu"})
