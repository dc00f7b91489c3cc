"""The summary of shards that a strategy logs at the start, and its warning about a replicated model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_plugin.scripts.plugin_models import Model, loader, set_torchrun_environment, trainer
from torch import Tensor, nn

from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy import parallelize
from weft.strategy.reports.summary import MAX_LINES, replicated_lines, summary


@on_ranks(1)
def test_one_device_logs_no_sharding(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    strategy = WeftModelParallelStrategy(plan="auto")
    strategy._engine.console.log = log_lines.append
    run = trainer(world_size, strategy, tmp_path)
    model = Model()
    run.fit(model, loader())
    run.test(model, loader(), verbose=False)
    assert [text for text in log_lines if "nothing is sharded" in text] == [
        "weft: nothing is sharded, as there is one device (on CPU, devices='auto' means 1)."
    ]


@on_ranks(2)
def test_replicated_model_warns(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    warned: list[str] = []
    strategy = WeftModelParallelStrategy(plan={"norm": "replicate"})
    strategy._engine.console.warn = warned.append
    trainer(world_size, strategy, tmp_path).fit(Model(), loader())
    [text] = warned
    assert text.startswith("weft: every rank holds 100 % of the parameters' bytes in full")
    assert "weft_fsdp" in text and "pipeline_cuts" in text and "\n" not in text


class Staged(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"layout": "pp2", "pipeline_cuts": ["2"]},
            "weft: each rank has the layers of its own stages, which are not sharded.",
        ),
        ({"layout": "dp2", "zero_stage": 0}, "weft: replicated: 4 of 4 parameters, 100.0 % of their bytes."),
        ({"layout": "dp2", "zero_stage": 3}, "weft: replicated: 0 of 4 parameters, 0.0 % of their bytes."),
    ],
)
def test_summary_of_layouts_without_tensor_parallelism(
    rank: int, world_size: int, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    strategy = WeftModelParallelStrategy(plan="auto", **options)
    strategy._engine.console.log = log_lines.append
    trainer(world_size, strategy, tmp_path).fit(Staged(), loader())
    [lines] = [text.splitlines() for text in log_lines if "layout:" in text]
    assert lines[1] == sentence and not any("sharded: " in line for line in lines)


@on_ranks(2)
def test_summary_of_modules_and_largest_replicated_parameters(world_size: int) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2), "table": nn.Embedding(50, 32)})
    parallelize(model, tensor_parallel(world_size), "auto")
    lines = summary(model)
    assert len(lines) <= MAX_LINES - 4, "the strategy adds lines of its own"
    assert lines[0] == (
        "sharded: 2 MultiheadAttention with weights gathered for each forward; 2 NonDynamicallyQuantizableLinear with "
        "weights gathered for each forward; 2 linear1, linear2 of TransformerEncoderLayer by heads or hidden units."
    )
    assert lines[2].startswith("largest replicated: 'table.weight' 0.006 MB, ")
    assert replicated_lines(nn.Linear(4, 4))[0] == "replicated: 2 of 2 parameters, 100.0 % of their bytes."


def test_invalid_verify_raises() -> None:
    with pytest.raises(ValueError, match="got verify='sometimes'; pass 'auto', 'always' or 'never'"):
        WeftModelParallelStrategy(plan="auto", verify="sometimes")
    assert WeftModelParallelStrategy(plan="auto", verify="never").plan.verify == "never"


@on_ranks(2)
def test_missing_verification_is_logged(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    log_lines: list[str] = []
    strategy = WeftModelParallelStrategy(plan="auto", verify="never")
    strategy._engine.console.log = log_lines.append
    trainer(world_size, strategy, tmp_path).fit(Model(), loader())
    [text] = [text for text in log_lines if "layout:" in text]
    assert text.splitlines()[0].endswith("; plan: auto, without verification.")


@on_ranks(2)
def test_layers_of_module_with_several_shardings_are_named(world_size: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(self.table(tokens))))

    model = Net()
    parallelize(model, tensor_parallel(world_size), {"table": "vocab_embedding", "up": "column", "down": "row"})
    assert summary(model)[0] == "sharded: 1 Embedding by rows; 1 up, down of Net by heads or hidden units."
    parallelize(sequence := nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tensor_parallel(world_size), "auto")
    assert "of Sequential" not in summary(sequence)[0]
