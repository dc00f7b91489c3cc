"""`optimizer_state` and `master_weights` in the Trainer and Fabric: training on layouts, checkpoints, errors."""

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

from support.ranks import on_ranks
from weft import ops
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.optimizers.low_precision import LowPrecisionOptimizer
from weft.strategy.optimizers.saved_states import states_to_save

DIM, HIDDEN, NUM_STEPS = 24, 512, 6
INT8 = {"optimizer_state": "int8"}
SPLIT = {"optimizer_state": "int8", "master_weights": "split"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(pl.LightningModule):
    """Two blocks, whose matrices are quantized; a row of a down projection has two blocks of codes."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.seed = seed
        self.model: nn.Sequential | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(self.seed)
            self.model = nn.Sequential(Block(), Block())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.model(batch) - batch.flip(-1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def _batches() -> torch.utils.data.DataLoader:
    values = torch.randn(8 * NUM_STEPS, DIM, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(values, batch_size=8)


def _fit(world_size: int, folder: Path, ckpt_path: Path | None = None, seed: int = 3, **options: Any) -> Any:
    precision = "bf16-mixed" if options.get("master_weights", "float32") != "float32" else "32-true"
    settings = {"max_epochs": options.pop("max_epochs", 1), "precision": options.pop("precision", precision)}
    model = Model(seed)
    strategy = WeftModelParallelStrategy(**{"plan": "auto", **options})
    run = trainer(world_size, strategy, folder, use_distributed_sampler=False, **settings)
    run.fit(model, _batches(), ckpt_path=ckpt_path)
    return model, run


def _weights(model: Model, run: Any) -> dict[str, Tensor]:
    """Return the weights, with their lower bits joined, unsharded."""
    [optimizer] = run.optimizers
    found = {}
    for name, parameter in model.named_parameters():
        local = local_shard(parameter)
        low = optimizer.state[parameter].get("low_bits")
        joined = local if low is None else ops.join_float(local, local_shard(low))
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            full = torch.distributed.tensor.DTensor.from_local(
                joined, mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
            joined = full.full_tensor()
        found[name] = joined.float()
    return found


@on_ranks(2, keeps_groups=True)
@pytest.mark.parametrize("options", [INT8, SPLIT], ids=["int8", "split"])
def test_layouts_train_to_the_same_losses(rank: int, world_size: int, tmp_path: Path, options: dict[str, Any]) -> None:
    """Every layout, against one without shards; all data-parallel ranks have the same batches."""
    set_torchrun_environment(rank, world_size)
    expected, _ = _fit(world_size, tmp_path, layout="dp2", zero_stage=0, **options)
    assert expected.losses[-1] < expected.losses[0]
    cases: dict[str, dict[str, Any]] = {
        "tp2": {},
        "tp2 in the backward": {"optimizer_in_backward": True},
        "tp2 by rows": {"optimizer_in_backward": "rows"},
        "dp2": {"layout": "dp2"},
        "dp2 in the backward": {"layout": "dp2", "optimizer_in_backward": True},
        "pp2": {"layout": "pp2", "pipeline_cuts": ["model.1"], "num_micro_batches": 2},
    }
    tolerance = 2e-2 if "master_weights" in options else 1e-4  # the order of bfloat16 sums
    for name, case in cases.items():
        model, run = _fit(world_size, tmp_path, **options, **case)
        [optimizer] = run.optimizers
        assert isinstance(optimizer, LowPrecisionOptimizer) and isinstance(optimizer, torch.optim.AdamW)
        large = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2]
        assert {optimizer.state[p]["exp_avg"].dtype for p in large} == {torch.int8}, name
        assert {p.dtype for p in large} == {torch.bfloat16 if "master_weights" in options else torch.float32}, name
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.1 ** (NUM_STEPS // 2)), name
        if model.losses:  # the last stage has the losses
            losses = torch.tensor(model.losses).view(NUM_STEPS, -1).mean(1).tolist()
            assert losses == pytest.approx(expected.losses, rel=tolerance), (name, losses)


@on_ranks(2, keeps_groups=True)
def test_accumulated_gradients(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    results = []
    for in_backward in (False, True, "rows"):
        model = Model()
        strategy = WeftModelParallelStrategy(plan="auto", optimizer_in_backward=in_backward, **INT8)
        run = trainer(world_size, strategy, tmp_path, max_epochs=1, accumulate_grad_batches=3)
        run.fit(model, _batches())
        assert run.global_step == NUM_STEPS // 3
        results.append(_weights(model, run))
    for result in results[1:]:
        for name, value in result.items():
            torch.testing.assert_close(value, results[0][name], rtol=0, atol=0)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {},
    "dp2": {"layout": "dp2"},
    "pp2": {"layout": "pp2", "pipeline_cuts": ["model.1"], "num_micro_batches": 2},
}


@on_ranks(2, keeps_groups=True)
@pytest.mark.parametrize("fmt", ["directory", "file"])
@pytest.mark.parametrize("options", [INT8, SPLIT], ids=["int8", "split"])
def test_checkpoints_resume_on_other_layouts(
    rank: int, world_size: int, tmp_path: Path, options: dict[str, Any], fmt: str
) -> None:
    """Weights, codes and scales are the same to the bit; a file has states in float32, which are quantized anew."""
    set_torchrun_environment(rank, world_size)
    common = {**options, "save_distributed_checkpoint": fmt == "directory"}
    layouts = {name: layout for name, layout in LAYOUTS.items() if fmt == "directory" or name != "pp2"}
    for name, layout in layouts.items():
        model, run = _fit(world_size, tmp_path, **layout, **common)
        path = tmp_path / f"{name}.ckpt"
        run.save_checkpoint(path)
        expected, saved = _weights(model, run), _states(model, run)
        for other in layouts.values():
            resumed, again = _fit(world_size, tmp_path, path, 99, max_epochs=1, **other, **common)
            assert not resumed.losses  # the epoch is over
            for key, value in _weights(resumed, again).items():
                if key in expected:  # both ranks have this stage
                    assert torch.equal(value, expected[key]), f"{name} {key}"
            loaded = _states(resumed, again)
            for key in saved.keys() & loaded.keys():
                if fmt == "directory" or key.startswith("step"):
                    assert torch.equal(loaded[key], saved[key]), f"{name} {key}"
                elif "scale" in key:
                    torch.testing.assert_close(loaded[key], saved[key], rtol=1e-6, atol=0, msg=f"{name} {key}")
                else:
                    assert (loaded[key].float() - saved[key].float()).abs().max() <= 1, f"{name} {key}"


def _states(model: Model, run: Any) -> dict[str, Tensor]:
    [optimizer] = run.optimizers
    full = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            full[f"{key} of {name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


@on_ranks(2, keeps_groups=True)
def test_checkpoints_load_into_other_formats(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    formats: dict[str, dict[str, Any]] = {
        "float32": {},
        "int8": INT8,
        "bfloat16": {"optimizer_state": "bfloat16"},
        "split": SPLIT,
        "split8": {"optimizer_state": "float32", "master_weights": "split8"},
    }
    for saved, options in formats.items():
        model, run = _fit(world_size, tmp_path, **options)
        run.save_checkpoint(tmp_path / f"{saved}.ckpt")
        expected = _weights(model, run)
        for loaded, others in formats.items():
            resumed, again = _fit(world_size, tmp_path, tmp_path / f"{saved}.ckpt", 99, max_epochs=1, **others)
            for key, value in _weights(resumed, again).items():
                # float32 weights are exact in a split format, and split weights in float32.
                rounding = {"split8": 2**-16}.get(loaded, 0)
                torch.testing.assert_close(value, expected[key], rtol=rounding, atol=0, msg=f"{saved} {loaded} {key}")
            [optimizer] = again.optimizers
            steps = {float(state["step"]) for state in optimizer.state.values()}
            assert steps == {NUM_STEPS}


@on_ranks(2, keeps_groups=True)
def test_fabric(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    results = []
    for layout in ("tp2", "dp2"):
        strategy = FabricStrategy(plan="auto", layout=layout, zero_stage=0 if layout == "dp2" else None, **SPLIT)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="bf16-mixed")
        fabric.launch()
        torch.manual_seed(3)
        model = fabric.setup(nn.Sequential(Block(), Block()))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for batch in _batches():
            loss = (model(batch) - batch.flip(-1)).float().square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=2e-2) and results[0][-1] < results[0][0]


@on_ranks(1)
@pytest.mark.parametrize(
    ("options", "precision", "text"),
    [
        ({"optimizer_state": "int4"}, None, "got optimizer_state='int4'; pass one of 'float32', 'bfloat16', 'int8'"),
        ({"master_weights": "half"}, None, "got master_weights='half'; pass one of 'float32', 'split', 'split8'"),
        ({**INT8, "fused_optimizers": False}, None, "with fused_optimizers=False; pass fused_optimizers=True"),
        ({**INT8, "zero_stage": 1}, None, "and zero_stage=1, which shards states in other units"),
        ({**SPLIT, "join_gate_up": True}, None, "whose joined weights cannot be split"),
        (SPLIT, "32-true", "with precision='32-true', which does not compute with bfloat16 weights"),
    ],
)
def test_wrong_options_raise(
    rank: int, tmp_path: Path, options: dict[str, Any], precision: str | None, text: str
) -> None:
    set_torchrun_environment(rank, 1)
    with pytest.raises(ValueError, match=text):
        _fit(1, tmp_path, **options, **({} if precision is None else {"precision": precision}))


class TiedModel(pl.LightningModule):
    """An embedding whose weight is that of the last layer: both stages of a pipeline have a copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 256, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@on_ranks(2)
def test_copies_of_tied_weights_stay_equal(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    model = TiedModel()
    strategy = WeftModelParallelStrategy(layout="pp2", pipeline_cuts=["blocks.1"], num_micro_batches=2, **INT8)
    tokens = torch.randint(256, (8 * NUM_STEPS, 5), generator=torch.Generator().manual_seed(1))
    run = trainer(world_size, strategy, tmp_path)
    run.fit(model, torch.utils.data.DataLoader(tokens, batch_size=8))
    copy = (model.words if rank == 0 else model.head).weight
    states = run.optimizers[0].state[copy]
    for value in (copy, states["exp_avg"], states["exp_avg_sq"], states["exp_avg_sq_scale"]):
        local = local_shard(value).float()
        gathered = [torch.empty_like(local) for _ in range(world_size)]
        torch.distributed.all_gather(gathered, local)
        assert torch.equal(gathered[0], gathered[1])
        assert local.abs().max() > 0


@on_ranks(2, keeps_groups=True)
def test_states_of_blocks_that_depend_on_the_mesh_resume(rank: int, world_size: int, tmp_path: Path) -> None:
    """Shards of 300 columns: their states are saved in float32, and read from codes of blocks of the full rows."""
    set_torchrun_environment(rank, world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "HIDDEN", 600)
        for layout, other in ((LAYOUTS["tp2"], LAYOUTS["dp2"]), (LAYOUTS["dp2"], LAYOUTS["tp2"])):
            model, run = _fit(world_size, tmp_path, **layout, **INT8)
            path = tmp_path / "last.ckpt"
            run.save_checkpoint(path)
            saved, expected = _states_in_float32(model, run), _weights(model, run)
            resumed, again = _fit(world_size, tmp_path, path, 99, **other, **INT8)
            for key, value in _weights(resumed, again).items():
                assert torch.equal(value, expected[key]), key
            loaded = _states_in_float32(resumed, again)
            assert any("down_proj" in key for key in loaded)
            for key, value in loaded.items():
                # A code is at most half a step from the value in the companded domain: 1 / 127 of the scale.
                bound = float(saved[key].abs().max()) / 127
                torch.testing.assert_close(value, saved[key], rtol=0.02, atol=bound, msg=key)
                assert (value - saved[key]).abs().mean() < 0.1 * saved[key].abs().mean() + 1e-12, key


def _states_in_float32(model: Model, run: Any) -> dict[str, Tensor]:
    [optimizer] = run.optimizers
    full = {}
    for name, parameter in model.named_parameters():
        for key, value in states_to_save(optimizer.state[parameter], parameter, in_float32=True).items():
            full[f"{key} of {name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full
