"""Uses beyond a plain fit on every kind of mesh: users' own plans, schedulers, compiled blocks, float16."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
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
from weft.lightning import WeftModelParallelStrategy

VOCAB = 37
MESHES = [("tp2", None), ("dp2", 0), ("dp2", 1), ("dp2", 3), ("dp2,tp2", 1), ("dp2,tp2", 2), ("dp2,tp2", 3)]
NUM_RANKS = {"": (1, 1), "tp2": (1, 2), "dp2": (2, 1), "dp2,tp2": (2, 2)}
USER_PLAN = {
    "model.tok_embeddings": "vocab_embedding",
    "model.layers.*.attention": "attention",
    "model.layers.*.feed_forward": "column_row_mlp",
    "model.output": "vocab_head",
}


class Decoder(L.LightningModule):
    """A Llama; optionally, blocks are `compiled`, the learning rate is `scheduled`, or there is an `extra_layer`."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float64,
        compiled: bool = False,
        scheduled: bool = False,
        extra_layer: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Llama(LlamaArgs(dtype=dtype, n_kv_heads=4, hidden_dim=38, vocab_size=VOCAB))
        self.scheduled = scheduled
        # If there is another layer, FSDP2 gathers the Llama separately.
        self.extra_layer = nn.Linear(3, 2, dtype=dtype) if extra_layer else None
        self.losses: list[float] = []
        if compiled:
            for layer in self.model.layers:
                layer.compile(backend="aot_eager")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch[0][0], batch[1][0]
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        if self.extra_layer is not None:
            loss = loss + self.extra_layer(torch.ones(3, dtype=loss.dtype)).square().mean()
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0][0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if not self.scheduled:
            return optimizer
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6)  # schedules the momentum, too
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def data(num_data: int, data_rank: int) -> DataLoader:
    rows = 4 // num_data
    return DataLoader(
        [tuple(each[data_rank * rows : (data_rank + 1) * rows] for each in pair) for pair in token_batches(6, VOCAB)]
    )


def fit(
    rank: int,
    world_size: int,
    folder: str,
    layout: str,
    stage: int | None,
    module_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train six steps and return the losses and weights; layout "": without weft."""
    set_torchrun_environment(rank, world_size)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    strategy: Any = "auto"
    if layout:
        names = ("plan", "sequence_parallel")
        settings = {"plan": "auto", **{name: options.pop(name) for name in names if name in options}}
        strategy = WeftModelParallelStrategy(layout=layout, zero_stage=stage, **settings)
    num_data, num_tensor = NUM_RANKS[layout]
    model = Decoder(**(module_options or {}))
    trainer(world_size, strategy, folder, **options).fit(model, data(num_data, rank // num_tensor))
    is_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert is_compiled == bool(module_options and module_options.get("compiled"))
    return model.losses, weights(model)


@functools.cache
def _weights_of_one_device(folder: str, module_options: frozenset[tuple[str, Any]]) -> dict[str, Tensor]:
    [(_, expected)] = run_on_ranks(1, fit, folder=folder, layout="", stage=None, module_options=dict(module_options))
    return expected


def assert_matches_one_device(folder: Path, layout: str, stage: int | None, **case: Any) -> None:
    """Compare the weights after six steps; `case`: settings of weft that one device does not have."""
    module_options = case.pop("module_options", {})
    expected = _weights_of_one_device(str(folder.parent), frozenset(module_options.items()))
    num_data, num_tensor = NUM_RANKS[layout]
    for _, values in run_on_ranks(
        num_data * num_tensor,
        fit,
        keeps_groups=True,
        folder=str(folder),
        layout=layout,
        stage=stage,
        module_options=module_options,
        **case,
    ):
        assert_same_weights(values, expected)


def _predict(rank: int, world_size: int, folder: str, layout: str) -> Tensor | None:
    set_torchrun_environment(rank, world_size)
    strategy: Any = WeftModelParallelStrategy(plan=USER_PLAN, layout=layout) if layout else "auto"
    num_data, num_tensor = NUM_RANKS[layout]
    [first, *_] = trainer(world_size, strategy, folder).predict(Decoder(), data(num_data, rank // num_tensor))
    # Code that only rank 0 runs must not communicate.
    return first.log_softmax(-1).clone() if rank == 0 else None


@pytest.mark.parametrize("layout", ["tp2", "dp2,tp2"])
def test_predictions_are_unsharded(tmp_path: Path, layout: str) -> None:
    [expected] = run_on_ranks(1, _predict, folder=str(tmp_path), layout="")
    num_data, num_tensor = NUM_RANKS[layout]
    [first, *_] = run_on_ranks(num_data * num_tensor, _predict, folder=str(tmp_path), layout=layout)
    torch.testing.assert_close(first, expected[: 4 // num_data], rtol=1e-10, atol=0)


@pytest.mark.parametrize("extra_layer", [False, True], ids=["only model", "extra layer"])
@pytest.mark.parametrize(("layout", "stage"), MESHES)
def test_plan_with_every_style_matches_one_device(
    tmp_path: Path, layout: str, stage: int | None, extra_layer: bool
) -> None:
    assert_matches_one_device(tmp_path, layout, stage, plan=USER_PLAN, module_options={"extra_layer": extra_layer})


@pytest.mark.parametrize(("layout", "stage"), MESHES)
def test_recompute_rules_match_one_device(tmp_path: Path, layout: str, stage: int | None) -> None:
    plan = {
        **USER_PLAN,
        "model.layers.*": {"style": "replicate", "recompute": True},
        "model.layers.*.ffn_norm": "sequence_parallel",
    }
    assert_matches_one_device(tmp_path, layout, stage, plan=plan)


@pytest.mark.parametrize(("layout", "stage"), MESHES)
def test_schedulers_match_one_device(tmp_path: Path, layout: str, stage: int | None) -> None:
    assert_matches_one_device(tmp_path, layout, stage, module_options={"scheduled": True})


@pytest.mark.parametrize(("layout", "stage"), extended_unless(lambda layout, stage: stage in (None, 3), MESHES))
def test_compiled_blocks_match_one_device(tmp_path: Path, layout: str, stage: int | None) -> None:
    assert_matches_one_device(tmp_path, layout, stage, module_options={"compiled": True})


def test_compiled_blocks_with_sequence_parallel_match_one_device(tmp_path: Path) -> None:
    assert_matches_one_device(tmp_path, "tp2", None, module_options={"compiled": True}, sequence_parallel=True)


@pytest.mark.parametrize(("layout", "stage"), [("tp2", None), ("dp2", 1), ("dp2", 3), ("dp2,tp2", 3)])
def test_float16_matches_float32_of_one_device(tmp_path: Path, layout: str, stage: int | None) -> None:
    """Parameters, gradients and messages are float16."""
    case = {"folder": str(tmp_path), "module_options": {"dtype": torch.float32}}
    [(losses, expected)] = run_on_ranks(1, fit, layout="", stage=None, **case)
    num_data, num_tensor = NUM_RANKS[layout]
    results = run_on_ranks(
        num_data * num_tensor, fit, keeps_groups=True, layout=layout, stage=stage, precision="16-true", **case
    )
    means = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=2e-3, atol=0)
    before, after = dict(Decoder(torch.float32).named_parameters()), results[0][1]
    assert {value.dtype for value in after.values()} == {torch.float16}
    ours, theirs = (
        torch.cat([(values[name].float() - before[name].detach()).flatten() for name in before])
        for values in (after, expected)
    )
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.99, "the update has another direction"


class Named(Decoder):
    """A Decoder with another layer next to the model, named `layer_name`."""

    def __init__(self, layer_name: str, strict: bool = True) -> None:
        super().__init__()
        self.add_module(layer_name, nn.Linear(2, 2, dtype=torch.float64))
        self.strict_loading = strict

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def _save(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    for is_directory in (False, True):
        strategy = WeftModelParallelStrategy(plan=USER_PLAN, layout="dp2,tp2", save_distributed_checkpoint=is_directory)
        run = trainer(world_size, strategy, folder)
        model = Named("old")
        run.fit(model, data(2, rank // 2))
        run.save_checkpoint(Path(folder, str(is_directory)))
    return weights(model)


def _validate(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, is_directory: bool, strict: bool
) -> dict[str, Tensor] | str:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan=USER_PLAN, layout=layout, zero_stage=stage)
    model = Named("new", strict)
    run = trainer(world_size, strategy, folder)
    num_data, num_tensor = NUM_RANKS[layout]
    try:
        run.validate(
            model, data(num_data, rank // num_tensor), ckpt_path=Path(folder, str(is_directory)), verbose=False
        )
    except RuntimeError as error:
        return str(error)
    return weights(model)


@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "directory"])
def test_checkpoint_of_another_model_loads_unless_strict(tmp_path: Path, is_directory: bool) -> None:
    [saved, *_] = run_on_ranks(4, _save, folder=str(tmp_path))
    before = dict(Named("new").named_parameters())
    for layout, stage in [("tp2", None), ("dp2", 0), ("dp2", 3)]:
        case = {"folder": str(tmp_path), "layout": layout, "stage": stage, "is_directory": is_directory}
        for loaded in run_on_ranks(2, _validate, strict=False, **case):
            for name, value in loaded.items():
                assert torch.equal(value, before[name] if name.startswith("new.") else saved[name]), name
        for error_text in run_on_ranks(2, _validate, strict=True, **case):
            assert "new.weight" in error_text and "old.weight" in error_text


@on_ranks(2)
@pytest.mark.parametrize("stages", [(3, 1), (2, 0), (1, 0)])
def test_second_run_below_stage_2_raises_if_fully_sharded(
    rank: int, world_size: int, tmp_path: Path, stages: tuple[int, int]
) -> None:
    set_torchrun_environment(rank, world_size)
    model, raises = Model(), stages[0] >= 2 > stages[1]
    for stage in stages:
        strategy = WeftModelParallelStrategy(plan={}, layout="dp2", zero_stage=stage)
        run = trainer(world_size, strategy, tmp_path)
        if raises and stage == stages[1]:
            with pytest.raises(
                ValueError, match=f"zero_stage={stage} keeps .* and this .*Model is fully sharded already"
            ):
                run.fit(model, loader())
        else:
            run.fit(model, loader())
