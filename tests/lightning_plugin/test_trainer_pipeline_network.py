"""A LightningModule that is itself divided into stages, and cuts that the strategy chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_plugin.scripts.pipeline_models import FlatText, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn

from support.rank_pool import RankFailure
from support.ranks import on_ranks, run_on_ranks
from weft.strategy.pipeline import AutoCuts, staged_model_of


class Counting(FlatText):
    """Counts samples at the end of a step, reads its Trainer's epoch in its forward, and has an attribute `data`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.accuracy.persistent(True)
        self.data = text_loader()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits if self.current_epoch == 0 else logits.sin()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.seen += len(batch["x"])
        return result


def train_cases(rank: int, world_size: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Fit, save, resume from the checkpoint, test and predict; return the results of each case by its layout."""
    set_torchrun_environment(rank, world_size)
    return {layout: train_case(world_size, Path(folder), layout, options) for layout, options in cases.items()}


def train_case(world_size: int, folder: Path, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    def fit(epochs: int, **run_options: Any) -> tuple[Any, Any]:
        strategy: Any = (
            "auto" if layout == "one" else pipeline_strategy(layout[:3], **{"pipeline_module": None, **options})
        )
        run, model = trainer(world_size, strategy, folder, max_epochs=epochs), Counting()
        run.fit(model, model.data, text_loader(7), **run_options)
        return run, model

    run, first = fit(1)
    run.save_checkpoint(folder / f"{layout}.ckpt")
    run, model = fit(2, ckpt_path=folder / f"{layout}.ckpt")
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    result = {"losses": first.losses + model.losses, "outputs": model.outputs, "metrics": metrics}
    result |= {"seen": model.seen.item(), "weights": weights(model)}
    result["test"] = run.test(model, text_loader(), verbose=False)
    result["predicted"] = run.predict(model, text_loader(7))
    if layout != "one":
        result["cuts"] = run.strategy.pipeline.cuts
        assert staged_model_of(model).skeleton.data is model.data
        saved = run.strategy.lightning_module_state_dict()
        assert ("seen" in saved) == ("accuracy.tp" in saved) == run.strategy.pipeline.has_last_stage
    return result


CASES = {
    "pp2": {"pipeline_cuts": ["layers.2"], "pipeline_module": ""},
    "pp2 interleaved": {"pipeline_cuts": "auto", "pipeline_schedule": "interleaved"},
}


def test_lightning_module_as_pipeline_matches_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_cases, folder=str(tmp_path), cases={"one": {}})
    expected = expected["one"]
    for results in run_on_ranks(2, train_cases, folder=str(tmp_path), cases=CASES):
        assert results["pp2"]["cuts"] == ("layers.2",)
        assert results["pp2 interleaved"]["cuts"] == ("layers.1", "layers.2", "layers.3")
        for result in results.values():
            assert len(result["weights"]) < len(expected["weights"])
            for name, value in result["weights"].items():
                original = name.replace("output", "tok_embeddings")  # tied: the last stage has a copy
                torch.testing.assert_close(value, expected["weights"][original], rtol=1e-10, atol=1e-12, msg=name)
            for name in ("losses", "outputs", "test", "predicted"):
                torch.testing.assert_close(result[name], expected[name], rtol=1e-10, atol=1e-12)
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)  # MeanMetric computes in float32


class Wrapped(Text):
    """Counts the calls of its forward, which its steps do not call."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 4, dtype=torch.long)
        self.num_calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        return self.model(tokens)


@on_ranks(2)
def test_auto_cuts_are_logged_once_and_reused(rank: int, world_size: int, tmp_path: Path) -> None:
    """The cuts balance floating-point operations; the module's only child is divided into stages."""
    set_torchrun_environment(rank, world_size)
    model, log_lines = Wrapped(), []
    for _ in range(2):
        strategy = pipeline_strategy(pipeline_cuts="auto", pipeline_module=None)
        strategy._engine.console.log = log_lines.append
        trainer(world_size, strategy, tmp_path).test(model, text_loader(), verbose=False)
        assert strategy.pipeline.cuts == ("layers.2",) and strategy.pipeline.model is model.model
    [text] = [text for text in log_lines if text.startswith("weft cuts")]
    assert "begin at its first layer and at 'layers.2': " in text and "of the floating-point operations." in text
    assert model.num_calls == 0 and model.example_input_array is not None
    cuts = {"pipeline_cuts": AutoCuts(stages_per_rank=4), "pipeline_schedule": "looped_bfs"}
    with pytest.raises(ValueError, match=r"finds 7 layers with parameters in a Llama \(.* for 8 stages; use fewer st"):
        trainer(world_size, pipeline_strategy(pipeline_module=None, **cuts), tmp_path).test(Wrapped(), text_loader())


class Logging(FlatText):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        self.log("largest", logits.max())
        return logits


class Scaled(FlatText):
    """Its step uses a parameter of the first stage after the model's call."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)[0] * self.factor


class WithoutForward(FlatText):
    forward = L.LightningModule.forward


def fit(rank: int, world_size: int, folder: str, cls: type) -> None:
    set_torchrun_environment(rank, world_size)
    trainer(world_size, pipeline_strategy(pipeline_module=""), folder).fit(cls(), text_loader())


@on_ranks(2)
def test_unsupported_forwards_raise_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the forward of Logging logs 'largest', .* log it in a step, after the call"):
        fit(rank, world_size, str(tmp_path), Logging)
    with pytest.raises(ValueError, match=r"is to divide WithoutForward itself, which has no forward of its own; write"):
        fit(rank, world_size, str(tmp_path), WithoutForward)


def test_first_stage_parameter_after_call_raises(tmp_path: Path) -> None:
    """Only the last stage can detect the error."""
    with pytest.raises(
        RankFailure, match=r"after the call of the model, with a parameter or a value that is on an earlier"
    ):
        run_on_ranks(2, fit, folder=str(tmp_path), cls=Scaled)
