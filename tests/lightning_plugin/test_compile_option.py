"""The option `compile`: training as on one device on every kind of mesh, checkpoints, messages and refusals."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import (
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support.extended import extended_unless
from support.models import Llama, LlamaArgs, token_batches
from support.ranks import on_ranks, run_on_ranks
from weft._plugin.dry_run_options import options_of_training
from weft.lightning import NonFiniteCheck, WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.modules.compiled_blocks import CompiledBlockError
from weft.strategy.pipeline import Schedule

VOCAB, NUM_LAYERS, NUM_STEPS = 37, 4, 3
AOT = {"backend": "aot_eager", "fullgraph": True}
NUM_DATA = {"dp2": 2, "dp2,tp2": 2, "pp2,dp2": 2}
ARGS = LlamaArgs(dtype=torch.float64, n_layers=NUM_LAYERS, n_kv_heads=2, hidden_dim=40, vocab_size=VOCAB)


class Decoder(L.LightningModule):
    def __init__(self, args: LlamaArgs = ARGS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Llama(args)
        self.losses: list[float] = []

    def _loss(self, batch: Any) -> Tensor:
        logits = self.model(batch[0][0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1][0].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0][0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Samples(Decoder):
    """A Decoder whose batches have rows that a pipeline splits into micro-batches."""

    def _loss(self, batch: Any) -> Tensor:
        logits = self.model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


def _data(layout: str, rank: int, stacked: bool) -> DataLoader:
    num_data = NUM_DATA.get(layout, 1)
    rows = 4 // num_data
    data_rank = 0 if num_data == 1 else rank % 2 if layout in ("dp2", "pp2,dp2") else rank // 2
    batches = [tuple(each[data_rank * rows : (data_rank + 1) * rows] for each in pair) for pair in _batches()]
    if not stacked:
        return DataLoader(batches)
    samples = [(batch[0][i], batch[1][i]) for batch in batches for i in range(rows)]
    return DataLoader(samples, batch_size=rows)


def _batches() -> list[tuple[Tensor, Tensor]]:
    return token_batches(NUM_STEPS, VOCAB)


def _strategy(layout: str, **options: Any) -> Any:
    if not layout:
        return "auto"
    if "pp2" in layout:
        options |= {"pipeline_cuts": [f"layers.{NUM_LAYERS // 2}"], "pipeline_module": "model", "num_micro_batches": 2}
    return WeftModelParallelStrategy(**{"plan": "auto", "layout": layout, **options})


def _fit(
    rank: int, world_size: int, folder: str, layout: str, settings: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, Tensor], float, Tensor | None, int, list[str]]:
    """Train, validate and predict; return weights, the loss, rank 0's prediction, the number of graphs, and breaks."""
    set_torchrun_environment(rank, world_size)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = (Samples if "pp2" in layout else Decoder)()
    run = trainer(world_size, _strategy(layout, **options), folder, **(settings or {}))
    data = _data(layout, rank, "pp2" in layout)
    run.fit(module, data)
    counters = torch._dynamo.utils.counters
    num_graphs, breaks = counters["stats"]["unique_graphs"], list(counters["graph_break"])
    validated = run.validate(module, data, verbose=False)[0]["val_loss"]
    predicted = run.predict(module, data)[0].clone()
    return weights(module), validated, predicted if rank == 0 else None, num_graphs, breaks


@functools.cache
def _expected(folder: str) -> tuple[dict[str, Tensor], float, Tensor]:
    [(values, validated, predicted, _, _)] = run_on_ranks(1, _fit, folder=folder, layout="")
    assert predicted is not None
    return values, validated, predicted


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("tp2", {}),
    "tp2, sequence": ("tp2", {"sequence_parallel": True, "activation_checkpointing": "full"}),
    "zero0": ("dp2", {"zero_stage": 0}),
    "zero1": ("dp2", {"zero_stage": 1}),
    "zero2": ("dp2", {"zero_stage": 2}),
    "zero3": ("dp2", {"zero_stage": 3, "activation_checkpointing": "selective"}),
    "pp2": ("pp2", {}),
    "dp2,tp2": ("dp2,tp2", {}),
}


@pytest.mark.parametrize("case", extended_unless(lambda case: case not in ("zero0", "zero2"), CASES))
def test_fit_matches_one_device(tmp_path: Path, case: str) -> None:
    layout, options = CASES[case]
    world_size = 4 if layout == "dp2,tp2" else 2
    expected, validated, predicted = _expected(str(tmp_path.parent))
    found = run_on_ranks(
        world_size, _fit, keeps_groups=True, folder=str(tmp_path), layout=layout, compile=AOT, **options
    )
    for values, loss, prediction, num_graphs, breaks in found:
        assert_same_weights(values, {name: expected[name] for name in values})
        assert loss == pytest.approx(validated, rel=1e-6)  # logged in float32
        assert (num_graphs, breaks) == (1, [])  # fullgraph raises for a break
        if prediction is not None:
            rows = prediction.shape[0]
            torch.testing.assert_close(prediction, predicted[:rows], rtol=1e-10, atol=1e-12)


def _mixed_losses(rank: int, world_size: int, folder: str, layout: str, compiles: bool) -> list[float]:
    set_torchrun_environment(rank, world_size)
    module = Decoder(LlamaArgs(n_layers=2, hidden_dim=40, vocab_size=VOCAB))
    strategy = _strategy(layout, compile=AOT if compiles else None, activation_checkpointing="full")
    trainer(world_size, strategy, folder, precision="bf16-mixed").fit(module, _data(layout, rank, stacked=False))
    return module.losses


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_mixed_precision_is_that_of_eager_blocks(tmp_path: Path, layout: str) -> None:
    cases = [
        run_on_ranks(2, _mixed_losses, keeps_groups=True, folder=str(tmp_path), layout=layout, compiles=compiles)
        for compiles in (False, True)
    ]
    for ours, theirs in zip(*cases, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3) and ours[0] != ours[-1]


def _save_or_load(
    rank: int, world_size: int, folder: str, layout: str, compiles: bool, path: str, saves: bool
) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    module = Decoder()
    steps = {"max_steps": 1 if saves else 3, "max_epochs": 2}
    run = trainer(world_size, _strategy(layout, compile=AOT if compiles else None), folder, **steps)
    run.fit(module, _data(layout, rank, stacked=False), ckpt_path=None if saves else path)
    if saves:
        run.save_checkpoint(path)
    return weights(module)


def test_checkpoints_load_with_and_without_compile(tmp_path: Path) -> None:
    results = []
    for saves_compiled in (True, False):
        case = {"folder": str(tmp_path), "path": str(tmp_path / f"saved-{saves_compiled}")}
        run_on_ranks(2, _save_or_load, layout="tp2", compiles=saves_compiled, saves=True, **case)
        [found, _] = run_on_ranks(2, _save_or_load, layout="dp2", compiles=not saves_compiled, saves=False, **case)
        results.append(found)
    assert_same_weights(*results)


@on_ranks(2)
def test_fabric_trains_compiled_blocks(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    results = []
    for compiles in (False, True):
        torch._dynamo.utils.counters.clear()
        strategy = FabricStrategy(plan="auto", layout="tp2", compile=AOT if compiles else None)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        torch.manual_seed(3)
        model = Llama(ARGS)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for tokens, targets in _batches():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if compiles else 0)
    assert_same_weights(*results)


@on_ranks(2)
def test_messages(rank: int, world_size: int, tmp_path: Path) -> None:
    """The start of a run, clipping by norm in the backward, an error of the compiler, and another run's arguments."""
    set_torchrun_environment(rank, world_size)
    module = Decoder()
    module.model.config = types.SimpleNamespace(use_cache=True)
    logged: list[str] = []

    def run(**options: Any) -> L.Trainer:
        strategy = _strategy("tp2", **options)
        strategy._engine.console.log = logged.append
        return trainer(world_size, strategy, tmp_path, gradient_clip_val=0.5, max_steps=1)

    data = _data("tp2", rank, stacked=False)
    run(compile=AOT, optimizer_in_backward=True).fit(module, data)
    text = "\n".join(logged)
    assert "weft compiles 4 blocks, each at its first call: model.layers.0, model.layers.1, model.layers.2" in text
    assert "use_cache=True, with which each block gets keys and values of its own" in text
    assert "after the backward, because the Trainer clips by norm: compiled blocks support one backward." in text
    with pytest.raises(ValueError, match=r"'model\.layers\.0' is compiled with .*aot_eager.*, and not with \{\}; pass"):
        run(compile="blocks").fit(module, data)
    with pytest.raises(ValueError, match=r"'model\.layers\.0' is compiled already, and a checkpoint belongs inside"):
        run(compile=AOT, activation_checkpointing="full").fit(module, data)
    logged.clear()
    run(compile=AOT).fit(module, data)  # compiled by the first run
    assert "weft compiles 4 blocks" in "\n".join(logged)
    with pytest.raises(
        CompiledBlockError, match=r"^torch\.compile failed in the block 'model\.layers\.0', a LlamaBlock"
    ):
        run(compile={"backend": _failing}).fit(Decoder(), data)


def _failing(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise ArithmeticError("no code for this graph")


class Nan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


@on_ranks(2)
def test_block_with_nan_is_found(rank: int, world_size: int, tmp_path: Path) -> None:
    """Hooks of a block run outside of its compiled code, and find the block; modules inside it are not watched."""
    set_torchrun_environment(rank, world_size)
    module = Decoder()
    module.model.layers[1].ffn_norm = Nan()
    run = trainer(world_size, _strategy("tp2", compile=AOT), tmp_path, callbacks=[NonFiniteCheck(find_module=True)])
    with pytest.raises(RuntimeError, match=r"the output of 'model\.layers\.1' \(LlamaBlock\) was the first"):
        run.fit(module, _data("tp2", rank, stacked=False))


@on_ranks(2)
def test_models_without_blocks_raise_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    module = Model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"got compile='blocks', and 'Model' has no repeated blocks.*; leave it out"):
        trainer(world_size, _strategy("tp2", compile="blocks"), tmp_path).fit(module, loader())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    plan = {"model.layers.*.feed_forward": {"style": "column_row_mlp", "offload": True}}
    with pytest.raises(ValueError, match=r"and a rule of its plan with offload, whose copies torch\.compile"):
        trainer(world_size, _strategy("tp2", plan=plan, compile="blocks"), tmp_path).fit(Decoder(), [])


@pytest.mark.parametrize("cls", [WeftModelParallelStrategy, FabricStrategy])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"compile": True}, TypeError, r"got compile=True; pass 'blocks', or a dict of arguments of torch\.compile"),
        ({"compile": "layers"}, TypeError, "got compile='layers'; pass 'blocks'"),
        (
            {"compile": {"modus": "x"}},
            ValueError,
            "got 'modus' among the arguments of torch.compile; pass backend, mode",
        ),
        ({"compile": {"mode": "fastest"}}, ValueError, r"got \{'mode': 'fastest'\} for torch\.compile, which does not"),
        ({"compile": {"backend": "none"}}, ValueError, r"'none'.* for torch\.compile, which does not accept it: "),
        (
            {"compile": {"mode": "default", "options": {"max_autotune": True}}},
            ValueError,
            "which does not accept it: Either mode or options",
        ),
        (
            {"compile": "blocks", "layout": "cp2"},
            ValueError,
            "got compile='blocks' and 2 context-parallel ranks, whose sharded sequences break the graph at each "
            "function; leave one of them out",
        ),
        (
            {"compile": "blocks", "activation_offload": True, "activation_checkpointing": "full"},
            ValueError,
            "got compile='blocks' and activation_offload=True, whose copies",
        ),
        (
            {"compile": "blocks", "optimizer_in_backward": "rows"},
            ValueError,
            "got compile='blocks' and optimizer_in_backward='rows', which needs the backward of each MLP by itself",
        ),
        (
            {"compile": "blocks", "layout": "pp2", "pipeline_cuts": ["a"], "pipeline_schedule": "zero_bubble"},
            ValueError,
            "got compile='blocks' and a pipeline_schedule with split backwards, and the backward of compiled code",
        ),
        (
            {
                "compile": "blocks",
                "layout": "pp2",
                "pipeline_cuts": ["a"],
                "pipeline_schedule": Schedule.generate("zero_bubble", 2, 4),
            },
            ValueError,
            "a pipeline_schedule with split backwards",
        ),
    ],
)
def test_wrong_values_and_combinations_raise(
    cls: type, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        cls(**{"plan": "auto", **options})


def test_options_that_compile_does_not_change() -> None:
    """A dry run leaves compile out; schedules without split backwards are accepted."""
    settings = {"plan": "auto", "layout": "pp2", "pipeline_cuts": ["a"], "pipeline_schedule": "interleaved"}
    cases = [
        WeftModelParallelStrategy(**{**settings, "pipeline_cuts": ["a", "b", "c"], "compile": c}) for c in (None, AOT)
    ]
    assert options_of_training(cases[0]._engine) == options_of_training(cases[1]._engine)
    schedule = Schedule.generate("1f1b", 2, 4)
    WeftModelParallelStrategy(**{**settings, "pipeline_schedule": schedule, "compile": "blocks"})
