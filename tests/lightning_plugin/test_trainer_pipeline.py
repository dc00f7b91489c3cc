"""The Trainer with a model in stages: results, logs, outputs and hooks compared with one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning_plugin.scripts.pipeline_models import ARGS, CUTS, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support.models import Llama
from support.ranks import on_ranks, run_on_ranks


def run_all_loops(
    rank: int,
    world_size: int,
    folder: str,
    layout: str,
    options: dict[str, Any],
    model_options: dict[str, Any],
    **run_options: Any,
) -> dict[str, Any]:
    """Fit with validation, test and predict; return the results. The layout "auto" is one device without weft."""
    set_torchrun_environment(rank, world_size)
    strategy: Any = "auto" if layout == "auto" else pipeline_strategy(layout, **options)
    run = trainer(world_size, strategy, folder, max_epochs=2, **run_options)
    model = Text(**model_options)
    tensor_ranks, data_ranks = (2 if "tp2" in layout else 1), (2 if "dp2" in layout else 1)
    local = {"rank": rank // tensor_ranks % data_ranks, "num_ranks": data_ranks}
    run.fit(model, text_loader(**local), text_loader(7))
    metrics = {name: value.item() for name, value in run.callback_metrics.items() if name != "gradient_norm"}
    result = {"losses": model.losses, "metrics": metrics, "weights": weights(model), "outputs": model.outputs}
    result["test"] = run.test(model, text_loader(), verbose=False)
    result["predicted"] = run.predict(model, text_loader(7))
    result["steps"] = run.global_step
    return result


LAYOUTS = {
    "pp2": (2, "pp2", {}),
    "pp2 interleaved": (2, "pp2", {"pipeline_cuts": CUTS[4], "pipeline_schedule": "interleaved"}),
    "pp2 zero bubble": (
        2,
        "pp2",
        {
            "pipeline_cuts": ["model.layers.2"],
            "pipeline_module": None,
            "pipeline_schedule": "zero_bubble",
            "num_micro_batches": None,
            "micro_batch_shares": [1, 2, 1],
        },
    ),
    "pp2 zbv": (2, "pp2", {"pipeline_cuts": CUTS[4], "pipeline_schedule": "zbv", "num_micro_batches": 4}),
    "pp2 v_half": (
        2,
        "pp2",
        {
            "pipeline_cuts": CUTS[4],
            "pipeline_schedule": "v_half",
            "num_micro_batches": None,
            "micro_batch_shares": [1, 3, 1],
        },
    ),
    "pp2 tp2 v_min": (4, "pp2,tp2", {"pipeline_cuts": CUTS[4], "pipeline_schedule": "v_min"}),
    "pp2 dp2 zero1 dualpipev": (
        4,
        "pp2,dp2",
        {"pipeline_cuts": CUTS[4], "pipeline_schedule": "dualpipev", "zero_stage": 1},
    ),
    "pp4": (4, "pp4", {"num_micro_batches": 4}),
    "pp2 tp2": (4, "pp2,tp2", {}),
    "pp2 dp2 zero3": (4, "pp2,dp2", {"zero_stage": 3}),
    "pp2 dp2 zero1": (4, "pp2,dp2", {"zero_stage": 1}),
    "pp2 dp2 tp2": (8, "pp2,dp2,tp2", {"zero_stage": 0}),
}
MODELS = {
    "sgd": ({}, {"gradient_clip_val": 0.5}),
    "adamw": ({"optimizer": "adamw"}, {}),
    "head, accumulated": ({"has_head": True}, {"accumulate_grad_batches": 2}),
}
# Other models than these have all layouts. With data-parallel ranks, ReduceLROnPlateau follows a rank's own validation.
LAYOUTS_OF_MODELS = {
    "adamw": ["pp2 interleaved", "pp2 zbv", "pp4", "pp2 tp2"],
    "head, accumulated": ["pp2", "pp2 zero bubble", "pp2 v_half", "pp2 tp2 v_min", "pp2 dp2 zero3", "pp2 dp2 tp2"],
}


@pytest.mark.parametrize("model", MODELS)
def test_matches_one_device(tmp_path: Path, model: str) -> None:
    model_options, run_options = MODELS[model]
    options = {"folder": str(tmp_path), "model_options": model_options, **run_options}
    [expected] = run_on_ranks(1, run_all_loops, layout="auto", options={}, **options)
    for name, (world_size, layout, more) in LAYOUTS.items():
        if name not in LAYOUTS_OF_MODELS.get(model, LAYOUTS):
            continue
        results = run_on_ranks(world_size, run_all_loops, keeps_groups=True, layout=layout, options=more, **options)
        for result in results:
            assert_matches_one_device(result, expected, has_all_data="dp2" not in layout)


IN_BACKWARD = {
    "adamw": [(2, "pp2", {"pipeline_cuts": CUTS[4], "pipeline_schedule": "interleaved"})],
    "head, accumulated": [
        (2, "pp2", {}),
        (2, "pp2", {"pipeline_cuts": CUTS[4], "pipeline_schedule": "zbv"}),
        (4, "pp2,dp2", {"zero_stage": 3}),
        (4, "pp2,dp2", {"zero_stage": 0}),
    ],
    "sgd": [(2, "pp2", {}), (4, "pp2,dp2", {"zero_stage": 0})],  # clips by norm: steps after the backward
}


@pytest.mark.parametrize("model", IN_BACKWARD)
def test_steps_in_backward_match_one_device(tmp_path: Path, model: str) -> None:
    model_options, run_options = MODELS[model]
    options: dict[str, Any] = {"folder": str(tmp_path), "model_options": model_options, **run_options}
    [expected] = run_on_ranks(1, run_all_loops, layout="auto", options={}, **options)
    for world_size, layout, more in IN_BACKWARD[model]:
        options["options"] = {**more, "optimizer_in_backward": True}
        for result in run_on_ranks(world_size, run_all_loops, keeps_groups=True, layout=layout, **options):
            assert_matches_one_device(result, expected, has_all_data="dp2" not in layout)


class OwnBackward(Text):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 2, *args, **kwargs)


@on_ranks(2)
def test_steps_in_backward_reject_other_backwards(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(world_size, pipeline_strategy(optimizer_in_backward=True), tmp_path)
    with pytest.raises(ValueError, match="optimizer_in_backward: OwnBackward overrides backward"):
        run.fit(OwnBackward(), text_loader())


SEQUENCE_OPTIONS = [
    {"pipeline_cuts": CUTS[4], "pipeline_schedule": "interleaved"},
    {"pipeline_schedule": "zero_bubble", "optimizer_in_backward": True, "activation_checkpointing": "full"},
]


def test_sequence_shards_match_one_device(tmp_path: Path) -> None:
    """The tensor-parallel ranks have 3 and 2 of the 5 tokens of a sequence."""
    run_options = {"folder": str(tmp_path), "model_options": {}}
    [expected] = run_on_ranks(1, run_all_loops, layout="auto", options={}, **run_options)
    for more in SEQUENCE_OPTIONS:
        options = {"sequence_parallel": True, **more}
        results = run_on_ranks(4, run_all_loops, keeps_groups=True, layout="pp2,tp2", options=options, **run_options)
        for result in results:
            assert_matches_one_device(result, expected, has_all_data=True)


def assert_matches_one_device(result: dict[str, Any], expected: dict[str, Any], has_all_data: bool) -> None:
    assert len(result["weights"]) < len(expected["weights"])
    for name, value in result["weights"].items():
        original = name.replace("output", "tok_embeddings")  # tied: the last stage has a copy
        torch.testing.assert_close(value, expected["weights"][original], rtol=1e-10, atol=1e-12, msg=name)
    assert result["steps"] == expected["steps"]
    for name in ("test", "predicted"):
        torch.testing.assert_close(result[name], expected[name], rtol=1e-10, atol=1e-12)
    if has_all_data:
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-10, atol=0)
        assert result["metrics"].keys() == expected["metrics"].keys()
        for name, value in result["metrics"].items():
            # MeanMetric rounds its inputs to float32.
            assert value == pytest.approx(expected["metrics"][name], rel=1e-6 if name == "mean" else 1e-10), name
        torch.testing.assert_close(result["outputs"], expected["outputs"], rtol=1e-10, atol=1e-12)


class Hooks(Callback):
    """Records the hooks of a run and the values that they see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("batch", batch_idx, trainer.global_step))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [parameter.grad is not None for parameter in module.parameters()]
        self.seen.append(("zero_grad", any(gradients), all(gradients)))

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.seen.append(("backward", loss.item()))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(("after", all(parameter.grad is not None for parameter in module.parameters())))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(("step", module.lr_schedulers().get_last_lr()))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("epoch", trainer.global_step))


class Scheduled(Text):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def hooks_of(rank: int, world_size: int, folder: str, strategy: Any) -> list[Any]:
    set_torchrun_environment(rank, world_size)
    hooks = Hooks()
    strategy = pipeline_strategy() if strategy == "staged" else strategy
    run = trainer(world_size, strategy, folder, max_epochs=2, accumulate_grad_batches=2, callbacks=[hooks])
    run.fit(Scheduled(), text_loader())
    return hooks.seen


def test_hooks_match_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, hooks_of, folder=str(tmp_path), strategy="auto")
    assert ("zero_grad", True, True) in expected
    for seen in run_on_ranks(2, hooks_of, folder=str(tmp_path), strategy="staged"):
        assert [each[0] for each in seen] == [each[0] for each in expected]
        for ours, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-10, atol=0)


class Weighted(Text):
    """Masks some targets, like padding, and all targets of one sample."""

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["x"])
        y = batch["y"].masked_fill((batch["y"] % 3 == 0) | (batch["i"][:, None] == 4), -100)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100), logits

    def backward(self, loss: Tensor) -> None:
        (loss * 3).backward()


def numbered_loader() -> Any:
    data = list(text_loader().dataset)
    return DataLoader([{**each, "i": i} for i, each in enumerate(data)], batch_size=6)


def num_targets(micro_batch: dict[str, Tensor]) -> int:
    return int(((micro_batch["y"] % 3 != 0) & (micro_batch["i"][:, None] != 4)).sum())


def split_by_stride(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [{name: value[i::count] for name, value in batch.items()} for i in range(count)]


def train_weighted(rank: int, world_size: int, folder: str, options: dict[str, Any] | None) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    strategy: Any = "auto" if options is None else pipeline_strategy(micro_batch_weight=num_targets, **options)
    run = trainer(world_size, strategy, folder, accumulate_grad_batches=2)
    model = Weighted()
    run.fit(model, numbered_loader())
    return {"weights": weights(model), "losses": model.losses, "logged": run.callback_metrics["train_loss_epoch"]}


def test_custom_weight_split_and_backward_match_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_weighted, folder=str(tmp_path), options=None)
    for options in ({"num_micro_batches": 6}, {"split_batch": split_by_stride, "num_micro_batches": 4}):
        for result in run_on_ranks(2, train_weighted, folder=str(tmp_path), options=options):
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-10, atol=0)
            torch.testing.assert_close(result["logged"], expected["logged"], rtol=1e-10, atol=0)
            for name, value in result["weights"].items():
                original = expected["weights"][name.replace("output", "tok_embeddings")]
                torch.testing.assert_close(value, original, rtol=1e-10, atol=1e-12, msg=name)


@on_ranks(2)
def test_later_runs_reuse_stages(rank: int, world_size: int, tmp_path: Path) -> None:
    """A second fit and another Trainer's test reuse them; metrics still return the last stage's value afterwards."""
    set_torchrun_environment(rank, world_size)
    strategy, model = pipeline_strategy(), Text()
    run = trainer(world_size, strategy, tmp_path)
    run.fit(model, text_loader())
    weight = next(model.parameters())
    run.fit_loop.max_epochs = 2
    run.fit(model, text_loader())
    assert len(model.losses) == 6 and next(model.parameters()) is weight
    other = trainer(world_size, pipeline_strategy(num_micro_batches=None, micro_batch_shares=[3, 1]), tmp_path)
    [result] = other.test(model, text_loader(), verbose=False)
    assert other.strategy.pipeline is strategy.pipeline and strategy.pipeline.micro_batch_shares == (3, 1)
    assert result["test_loss"] < model.losses[0] and next(model.parameters()) is weight
    model.accuracy.reset()
    model.accuracy.update(torch.tensor([rank]), torch.tensor([0]))
    assert model.accuracy.compute() == 0
    with pytest.raises(ValueError, match="in stages already; build the model anew"):
        trainer(world_size, pipeline_strategy(pipeline_cuts=["layers.1"]), tmp_path).test(
            model, text_loader(), verbose=False
        )


class Built(Text):
    """Builds its model in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = Llama(ARGS)


@on_ranks(2)
def test_each_rank_materializes_its_stage(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    built, reference = Built(), Text()
    original = {name: value.detach().clone() for name, value in reference.named_parameters(remove_duplicate=False)}
    run = trainer(world_size, pipeline_strategy(), tmp_path, max_steps=0, max_epochs=None)
    run.fit(built, text_loader())
    found = weights(built)
    assert found and all(torch.equal(value, original[name]) for name, value in found.items())
    assert {name.split(".")[2] for name in found if "layers" in name} == ({"0", "1"} if rank == 0 else {"2", "3"})


@on_ranks(2)
def test_stages_exchange_bfloat16_under_autocast(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy, model = pipeline_strategy(plan={}, pipeline_cuts=["1"]), Small()
    trainer(world_size, strategy, tmp_path, precision="bf16-mixed").fit(
        model, DataLoader(torch.ones(8, 4), batch_size=4)
    )
    [recordings] = strategy.pipeline._recordings.values()
    boundary_dtypes = {recording.values[number].dtype for recording in recordings for number in recording.crossings[0]}
    assert boundary_dtypes == {torch.bfloat16} and {parameter.dtype for parameter in model.parameters()} == {
        torch.float32
    }
    assert set(model.seen) == ({torch.bfloat16} if rank == 1 else set())


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: Tensor) -> Tensor:
        output = self.model(batch)
        self.seen.append(output.dtype)
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
