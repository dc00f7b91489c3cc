"""Typical LightningModules in two stages, compared with one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning_plugin.scripts.pipeline_models import LENGTH, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from support.parity import full
from support.ranks import on_ranks, run_on_ranks


class Small(L.LightningModule):
    """Two linear layers, of any precision."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.options = options
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.model(batch).square().mean()
        self.log("large", 70000)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def test_step(self, batch: Tensor) -> None:
        self.log("loss", self.model(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small_strategy(**options: Any) -> Any:
    return pipeline_strategy(**{"plan": {}, "pipeline_cuts": ["1"], **options})


def ones_loader(num: int = 8) -> DataLoader:
    return DataLoader(torch.arange(4.0 * num).view(num, 4) / num, batch_size=4)


@on_ranks(2)
def test_precision_sets_dtype_of_parameters(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for precision in ("bf16-true", "bf16-mixed", "32-true"):
        model = Small()
        run = trainer(world_size, small_strategy(), tmp_path, precision=precision)
        run.fit(model, ones_loader())
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert run.callback_metrics["large"] == 70000 and run.callback_metrics["large"].dtype == torch.float32
        assert all(torch.isfinite(torch.tensor(model.losses)))


class DeferredSmall(Small):
    """Builds its model in configure_model, with parameters of the given dtype, by default of the precision's."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype_of_parameters = dtype
        del self.model

    def configure_model(self) -> None:
        torch.manual_seed(0)
        dtype = self.dtype_of_parameters
        self.model = nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype))


@on_ranks(2)
def test_deferred_parameters_train_in_bfloat16(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    built, *deferred = models = Small(), DeferredSmall(), DeferredSmall(torch.float32)
    for each in models:
        run = trainer(world_size, small_strategy(), tmp_path, precision="bf16-true")
        run.fit(each, ones_loader())
    for model in deferred:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.losses[0] == pytest.approx(built.losses[0], rel=0.1)


@on_ranks(2)
def test_forward_is_recorded_once_per_precision(rank: int, world_size: int, tmp_path: Path) -> None:
    """A forward recorded under one precision is not reused under another."""
    set_torchrun_environment(rank, world_size)
    model, found = Small(), []
    for precision in ("bf16-mixed", "32-true", "bf16-mixed"):
        [result] = trainer(world_size, small_strategy(), tmp_path, precision=precision).test(
            model, ones_loader(), verbose=False
        )
        found.append(result["loss"])
    assert found[0] == found[2] == pytest.approx(found[1], rel=0.05)


class Changing(Text):
    """Calls its model differently in each kind of step, and from batch to batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        length = LENGTH - batch_idx  # the same for all micro-batches of a batch
        loss, _ = self.loss({name: value[:, :length] for name, value in batch.items()})
        self.log("constant", 1.0 + batch_idx, batch_size=1, on_epoch=True)
        self.log("samples", float(batch_idx), batch_size=len(batch["x"]), on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0])

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["x"][:, :-2])

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().log(f"my_{name}", *args, **kwargs)


def train_changing(rank: int, world_size: int, folder: str, strategy: Any) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    strategy = (
        pipeline_strategy(micro_batch_weight=lambda micro_batch: micro_batch["y"].numel())
        if strategy == "staged"
        else strategy
    )
    run, model = trainer(world_size, strategy, folder, max_epochs=2), Changing()
    run.fit(model, text_loader(16), text_loader(7))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    unlabelled = DataLoader([{"x": sample["x"]} for sample in text_loader(7).dataset], batch_size=6)
    predicted = run.predict(model, unlabelled)
    return {"losses": model.losses, "metrics": metrics, "predicted": predicted}


def test_steps_with_different_calls_match_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_changing, folder=str(tmp_path), strategy="auto")
    for result in run_on_ranks(2, train_changing, folder=str(tmp_path), strategy="staged"):
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-10, atol=0)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-10, nan_ok=True)
        torch.testing.assert_close(result["predicted"], expected["predicted"], rtol=1e-10, atol=1e-12)


class Frozen(Text):
    """Trains only the second half, and counts samples in a buffer at the end of a step."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        for module in (self.model.tok_embeddings, *self.model.layers[:2]):
            module.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self.loss(batch)
        self.seen += len(batch["x"])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def train_frozen(rank: int, world_size: int, folder: str, strategy: Any) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)

    def run_for(epochs: int, **options: Any) -> Any:
        run = trainer(world_size, pipeline_strategy() if strategy == "staged" else strategy, folder, max_epochs=epochs)
        model = Frozen()
        run.fit(model, text_loader(), **options)
        return run, model

    path = Path(folder) / f"{world_size}.ckpt"
    run, first = run_for(1)
    run.save_checkpoint(path)
    _, second = run_for(2, ckpt_path=path)
    return {"losses": first.losses + second.losses, "seen": second.seen.item(), "weights": weights(second)}


def test_frozen_stage_resumes(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_frozen, folder=str(tmp_path), strategy="auto")
    found = run_on_ranks(2, train_frozen, folder=str(tmp_path), strategy="staged")
    assert expected["seen"] == found[-1]["seen"] == 36
    for result in found:
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-10, atol=0)


class Named(Text):
    """Predicts from batches that include strings; has an example input for the model summary."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 4, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str]:
        logits = self(batch["x"])
        return [f"{name}: {guess}" for name, guess in zip(batch["name"], logits[:, -1].argmax(-1), strict=True)]


def train_named(rank: int, world_size: int, folder: str, strategy: Any) -> Any:
    set_torchrun_environment(rank, world_size)
    strategy = pipeline_strategy() if strategy == "staged" else strategy
    run, model = trainer(world_size, strategy, folder, enable_model_summary=True), Named()
    run.fit(model, text_loader())
    samples = [{**sample, "name": f"sample {i}"} for i, sample in enumerate(text_loader(7).dataset)]
    predicted = run.predict(model, DataLoader(samples, batch_size=5))
    if world_size > 1:
        assert len(run.strategy.pipeline._recordings) <= 4  # training, and predictions of 3, 2 and 1 samples
    assert model.example_input_array is not None
    return predicted


def test_string_batches_match_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, train_named, folder=str(tmp_path), strategy="auto")
    assert run_on_ranks(2, train_named, folder=str(tmp_path), strategy="staged") == [expected, expected]


class Wrapper(L.LightningModule):
    """Another module around a model that is in stages already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.net = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]).flatten(0, 1), batch["y"].flatten()) + self.bias

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@on_ranks(2)
def test_module_around_staged_model_trains(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    model = Text()
    trainer(world_size, pipeline_strategy(), tmp_path).fit(model, text_loader())
    other, strategy = Wrapper(model.model), pipeline_strategy(pipeline_module="net")
    run = trainer(world_size, strategy, tmp_path)
    run.fit(other, text_loader())
    assert strategy._stages.full_model.parameter_names[:2] == ("bias", "net.tok_embeddings.weight")
    assert [name for name, _ in other.named_parameters() if "." not in name] == ["bias"] * rank


class WithLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class CustomReduction(Small):
    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        self.log("a", loss, reduce_fx=lambda values: values[0])
        return loss


class Unsendable(Small):
    def training_step(self, batch: Tensor) -> Any:
        return {"loss": super().training_step(batch), "f": lambda: None}


class Uncopyable(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.head.generator = (i for i in range(3))


@on_ranks(2)
@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (WithLBFGS, ValueError, "LBFGS searches along the gradient of all parameters"),
        (
            CustomReduction,
            ValueError,
            r"self.log\('a'\) got reduce_fx=<function .*; pass 'mean', 'sum', 'min' or 'max'",
        ),
        (Unsendable, TypeError, "cannot be joined|cannot be sent to other stages"),
        (Uncopyable, ValueError, "Linear cannot be copied .*, and every stage needs a copy of it without"),
    ],
)
def test_unsupported_modules_raise_on_all_ranks(
    rank: int, world_size: int, tmp_path: Path, cls: type, error: type[Exception], message: str
) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.raises(error, match=message):
        trainer(world_size, small_strategy(), tmp_path).fit(cls(), ones_loader())


@on_ranks(2)
def test_fake_parameters_have_final_device(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from weft.strategy.pipeline import Pipeline, staged_model_of

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    Pipeline(model, init_device_mesh("cpu", (world_size,)), ["2"], device=torch.device("cuda", 0))
    skeleton = staged_model_of(model)._skeleton
    assert {tensor.device.type for tensor in (*skeleton.parameters(), *skeleton.buffers())} == {"cuda"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


class Counting(Text):
    """Counts samples before the model's call, in a metric, a number, a list and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.count, self.sizes = 0, []
        self.total = SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        size = len(batch["x"])
        self.count += size
        self.sizes.append(size)
        self.seen += size
        self.log("total", self.total(size))
        return self.loss(batch)[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_code_before_model_call_runs_once_per_stage(rank: int, world_size: int, tmp_path: Path, kind: str) -> None:
    set_torchrun_environment(rank, world_size)
    cuts = ["layers.1", "layers.2", "layers.3"] if kind == "interleaved" else ["layers.2"]
    model = Counting()
    trainer(world_size, pipeline_strategy(pipeline_cuts=cuts, pipeline_schedule=kind), tmp_path).fit(
        model, text_loader(16)
    )
    assert model.total.compute() == 16
    times = len(cuts) // 2 + 1  # a rank runs the code of a step once per stage
    assert (model.count, sum(model.sizes), model.seen.item()) == (16 * times,) * 3


class Grouped(Small):
    """Its optimizer has the first layer's parameters only, in one group per number of dims, and an empty group."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [parameter for name, parameter in self.model.named_parameters() if name.startswith("0.")]
        assert [parameter.dim() for parameter in parameters] == [2, 1]
        groups = [{"params": [p for p in parameters if p.dim() == dims], "lr": 0.1 * dims} for dims in (1, 2)]
        return torch.optim.Adagrad([*groups, {"params": parameters[:0]}], lr=0.1)


class FirstLayerOnly(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model[0].parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Grouped, FirstLayerOnly])
def test_optimizer_groups_empty_on_other_stages(rank: int, world_size: int, tmp_path: Path, kind: type[Small]) -> None:
    """The second stage's optimizer has the same groups as the first stage's, without parameters."""
    set_torchrun_environment(rank, world_size)
    model = kind()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(world_size, small_strategy(), tmp_path)
    run.fit(model, ones_loader())
    groups = run.optimizers[0].param_groups
    expected = ([1, 1, 0] if kind is Grouped else [2]) if rank == 0 else [0] * len(groups)
    assert [len(group["params"]) for group in groups] == expected
    assert all(parameter.numel() for parameter in run.optimizers[0].state)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), before[name]) == ("1." in name), name
    assert all(not module._parameters for module in model.modules() if type(module).__name__ == "RemoteLayer")
