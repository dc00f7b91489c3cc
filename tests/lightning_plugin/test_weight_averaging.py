"""Lightning's callbacks that average weights, on shards: equal to one device, swapped, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning_plugin.scripts.pipeline_models import Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    DIM,
    Model,
    assert_same_weights,
    fixed_data,
    set_torchrun_environment,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from support.ranks import on_ranks, run_on_ranks
from weft import flight
from weft.lightning import WeftModelParallelStrategy, consolidate_checkpoint
from weft.strategy.data_parallel.local_shards import LocalShards

DECAY, STEPS = 0.8, 4
SWA = {"callback": "swa", "epochs": 4}


class Watched(EMAWeightAveraging):
    """Counts its updates, and the calls to groups while it averages and swaps."""

    def __init__(self) -> None:
        super().__init__(decay=DECAY)
        self.num_calls = self.num_updates = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        begin = _last_call()
        super().on_train_batch_end(trainer, *args)
        self.num_calls += _num_calls(begin)
        self.num_updates += self._latest_update_step == trainer.global_step

    def on_validation_epoch_start(self, *args: Any) -> None:
        begin = _last_call()
        super().on_validation_epoch_start(*args)
        self.num_calls += _num_calls(begin)


class Every2(WeightAveraging):
    """An equally weighted average of every second step, by a function of lists of tensors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(use_buffers=False, **options)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 1


CALLBACKS = {
    "ema": Watched,
    "every 2": Every2,
    "lists": lambda: Every2(multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2),
}


def _last_call() -> float:
    """Return when the last call to a group began."""
    return max((each["begin"] for each in flight.calls()), default=0.0)


def _num_calls(begin: float) -> int:
    """Return how many calls to groups began later than `begin`."""
    return sum(each["begin"] > begin for each in flight.calls())


class Recording:
    """Records the weights' validation losses and the learning rates by epoch; saves to `path` in the epoch `saves`."""

    def __init__(self, *args: Any, path: str | None = None, saves: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path, self.saves = path, saves
        self.validation: list[float] = []
        self.rates: list[float] = []
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen += 1

    def on_validation_end(self) -> None:
        self.validation.append(self.trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_end(self) -> None:
        if self.path is not None and self.trainer.current_epoch == self.saves:
            self.trainer.save_checkpoint(self.path)


class Averaged(Recording, Model):
    pass


class AveragedText(Recording, Text):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0], sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass


class Normed(Averaged):
    """With batch norm before the model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batch_norm = nn.BatchNorm1d(DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


def _data(num_data: int, data_rank: int, num_batches: int = STEPS) -> DataLoader:
    """Return the rows of one data-parallel rank in each batch of one device."""
    rows = fixed_data()[: BATCH * num_batches].unflatten(0, (num_batches, num_data, BATCH // num_data))
    return DataLoader(rows[:, data_rank].flatten(0, 1), batch_size=BATCH // num_data)


def train(rank: int, world_size: int, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train in each case; return the results.

    A case has the `layout` ("": one device, without weft), the `callback`, the `model`, `epochs`, `saves`: the name of
    the checkpoint to save and the epoch, `resumes`: the name of the one to load; and options of the strategy.
    """
    set_torchrun_environment(rank, world_size)
    results = []
    for case in cases:
        settings = {"callback": "ema", "model": "", "epochs": 2, "saves": (None, 0), "resumes": None, **case}
        layout, callback, kind, epochs, (saves, epoch), resumes = (
            settings.pop(name) for name in ("layout", "callback", "model", "epochs", "saves", "resumes")
        )
        num_data = 2 if "dp2" in layout else 1
        strategy: Any = "auto"
        if layout:
            make = pipeline_strategy if "pp" in layout else WeftModelParallelStrategy
            strategy = make(**{"plan": "auto", "layout": layout, **settings})
        options = {"path": saves and str(Path(folder, saves)), "saves": epoch}
        model: Any
        if kind == "text":
            model = AveragedText(**options)
            loaders = [text_loader(num_samples, rank=rank % num_data, num_ranks=num_data) for num_samples in (12, 6)]
        else:
            model = (Normed if kind == "batch norm" else Averaged)(optimizer="sgd", **options)
            loaders = [_data(num_data, rank // (world_size // num_data), num_batches) for num_batches in (STEPS, 2)]
        if resumes:
            model.apply(_disturb)
        run = trainer(world_size, strategy, folder, max_epochs=epochs, callbacks=[CALLBACKS[callback]()])
        begin = _last_call()
        run.fit(model, *loaders, ckpt_path=resumes and Path(folder, resumes))
        assert not layout or _num_calls(begin) > 0
        buffers = {name: buffer for name, buffer in model.named_buffers() if name.startswith(("seen", "batch"))}
        counts = [getattr(run.callbacks[0], name, None) for name in ("num_updates", "num_calls")]
        results.append(
            {
                "validation": model.validation,
                "weights": weights(model),
                "buffers": buffers,
                "rates": model.rates,
                "counts": counts,
            }
        )
    return results


@torch.no_grad()
def _disturb(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.add_(1)


def _assert_same(found: dict[str, Any], expected: dict[str, Any], epochs: int | None = None) -> None:
    """Compare the results of a run, or those of its last `epochs`, with those of one device."""
    last = slice(None) if epochs is None else slice(-epochs, None)
    for name in ("validation", "rates"):
        known = expected[name][last]
        torch.testing.assert_close(found[name], known, rtol=1e-10, atol=0, msg=lambda m, n=name: f"{n} {m}")
    assert found["weights"]
    assert found["buffers"].keys() == expected["buffers"].keys()
    for kind in ("weights", "buffers"):  # a stage has some of the weights, and the tied one under another name
        named = {name.replace("output", "tok_embeddings"): value for name, value in found[kind].items()}
        assert_same_weights(named, {name: value for name, value in expected[kind].items() if name in named})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of the checkpoints."""
    return str(tmp_path_factory.mktemp("averages"))


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[str, Any]:
    """Return the results of one device, by callback and by model; "ema" and "swa" save checkpoints."""
    cases = [{"layout": "", "callback": name} for name in ("ema", "every 2", "lists")]
    cases[0]["saves"] = ("one.ckpt", 0)
    cases += [{**SWA, "layout": "", "saves": ("swa-one.ckpt", 2)}, {**SWA, "layout": "", "model": "batch norm"}]
    cases.append({"layout": "", "model": "text"})
    names = ("ema", "every 2", "lists", "swa", "batch norm", "text")
    return dict(zip(names, run_on_ranks(1, train, folder=folder, cases=cases)[0], strict=True))


def test_averages_equal_those_of_one_device(folder: str, expected: dict[str, Any]) -> None:
    """Validation computes with the average, the next step does not, and training ends with the average.

    Checkpoints, directories and files, resume on the same and on other layouts, and without weft.
    """
    ema = expected["ema"]
    assert ema["counts"] == [2 * STEPS, 0]
    assert ema["validation"] != expected["every 2"]["validation"] != expected["lists"]["validation"]
    on_four = [{"layout": "dp2,tp2", "zero_stage": stage} for stage in range(4)]
    on_four[3]["saves"] = ("directory.ckpt", 0)
    on_four[2] |= {"saves": ("file.ckpt", 0), "save_distributed_checkpoint": False}
    resuming = {"layout": "dp2,tp2", "zero_stage": 3, "resumes": "directory.ckpt"}
    for results in run_on_ranks(4, train, folder=folder, cases=[*on_four, resuming]):
        for found in results[:4]:
            _assert_same(found, ema)
            assert found["counts"] == ema["counts"], "an average of shards needs no communication"
        _assert_same(results[4], ema, epochs=1)
    on_two = [{"layout": "tp2", "callback": "every 2"}, {"layout": "dp2", "callback": "lists"}]
    on_two += [{"layout": "pp2", "model": "text", "saves": ("text.ckpt", 0)}]
    on_two += [{"layout": "tp2", "resumes": f"{name}.ckpt"} for name in ("directory", "file", "one")]
    on_two += [{"layout": "tp2", "model": "text", "resumes": "text.ckpt"}]
    for results in run_on_ranks(2, train, folder=folder, cases=on_two):
        for found, name in zip(results[:3], ("every 2", "lists", "text"), strict=True):
            _assert_same(found, expected[name])
        for found in results[3:6]:
            _assert_same(found, ema, epochs=1)
        _assert_same(results[6], expected["text"], epochs=1)
    consolidate_checkpoint(Path(folder, "directory.ckpt"))
    alone = [{"layout": "", "resumes": name} for name in ("file.ckpt", "directory.ckpt.consolidated")]
    for found in run_on_ranks(1, train, folder=folder, cases=alone)[0]:
        _assert_same(found, ema, epochs=1)


def test_stochastic_averages_equal_those_of_one_device(folder: str, expected: dict[str, Any]) -> None:
    """The learning rate is annealed; with batch norm, one more epoch updates the statistics of the average."""
    swa = expected["swa"]
    assert len(set(swa["rates"])) > 2 and len(expected["batch norm"]["rates"]) == 5
    saving = {**SWA, "layout": "dp2,tp2", "zero_stage": 3, "saves": ("swa.ckpt", 2)}
    for [found] in run_on_ranks(4, train, folder=folder, cases=[saving]):
        _assert_same(found, swa)
    on_two = [{"layout": "dp2", "zero_stage": 1, "saves": ("swa-file.ckpt", 2), "save_distributed_checkpoint": False}]
    on_two += [{"layout": "tp2", "model": "batch norm"}, {"layout": "dp2", "zero_stage": 2, "resumes": "swa.ckpt"}]
    on_two += [{"layout": "tp2", "resumes": name} for name in ("swa-file.ckpt", "swa-one.ckpt")]
    for results in run_on_ranks(2, train, folder=folder, cases=[{**SWA, **case} for case in on_two]):
        _assert_same(results[0], swa)
        _assert_same(results[1], expected["batch norm"])
        for found in results[2:]:
            _assert_same(found, swa, epochs=1)
    consolidate_checkpoint(Path(folder, "swa.ckpt"))
    alone = [{**SWA, "layout": "", "resumes": name} for name in ("swa-file.ckpt", "swa.ckpt.consolidated")]
    for found in run_on_ranks(1, train, folder=folder, cases=alone)[0]:
        _assert_same(found, swa, epochs=1)


@pytest.mark.extended
def test_averages_of_sharded_stages_equal_those_of_one_device(folder: str, expected: dict[str, Any]) -> None:
    [[swa]] = run_on_ranks(1, train, folder=folder, cases=[{**SWA, "layout": "", "model": "text"}])
    case = {"layout": "pp2,dp2", "model": "text"}
    cases = [{**case, "saves": ("stages.ckpt", 0)}, {**case, "resumes": "stages.ckpt"}, {**case, **SWA}]
    for results in run_on_ranks(4, train, folder=folder, cases=cases):
        _assert_same(results[0], expected["text"])
        _assert_same(results[1], expected["text"], epochs=1)
        _assert_same(results[2], swa)


class Saving(Averaged):
    """Saves during the first validation, in which the model has the values of the average, and after it."""

    def on_validation_epoch_start(self) -> None:
        if self.trainer.current_epoch == 0 and self.trainer.state.fn == "fit":
            self.trainer.save_checkpoint(f"{self.path}/during.ckpt")

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.trainer.current_epoch == 0 and self.trainer.state.fn == "fit":
            self.trainer.save_checkpoint(f"{self.path}/after.ckpt")


@on_ranks(2)
@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_have_the_average_as_weights(
    rank: int, world_size: int, tmp_path: Path, in_background: bool
) -> None:
    """Tests and validation load it, also in a Trainer that has trained."""
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2", zero_stage=3, async_save=in_background)
    run = trainer(world_size, strategy, tmp_path, max_epochs=2, callbacks=[Watched()])
    model, data = Saving(optimizer="sgd", path=str(tmp_path), saves=-1), _data(2, rank)
    run.fit(model, data, data)
    losses = [run.validate(model, data, ckpt_path=tmp_path / "after.ckpt", verbose=False)[0]["val_loss"]]
    losses.append(run.test(model, data, ckpt_path=tmp_path / "during.ckpt", verbose=False)[0]["test_loss"])
    strategy = WeftModelParallelStrategy(plan="auto", layout="tp2")
    other = trainer(world_size, strategy, tmp_path, callbacks=[Watched()])
    losses.append(
        other.test(Averaged(), _data(1, 0), ckpt_path=tmp_path / "during.ckpt", verbose=False)[0]["test_loss"]
    )
    torch.testing.assert_close(losses, model.validation[:1] * 3, rtol=1e-10, atol=0)
    assert model.validation[0] != model.validation[1]
    if rank == 0:
        during, after = (
            torch.load(consolidate_checkpoint(tmp_path / f"{name}.ckpt"), weights_only=True)
            for name in ("during", "after")
        )
        assert_same_weights(during["state_dict"], after["state_dict"])
        assert_same_weights(during["current_model_state"], after["current_model_state"])
        assert during["averaging_state"] == {"n_averaged": torch.tensor(STEPS)}
        name = "feed_forward.w1.weight"
        assert not torch.equal(after["state_dict"][name], after["current_model_state"][name])


@on_ranks(2)
def test_unsupported_averages_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    cases: list[tuple[list[str], Any, dict[str, Any], str]] = [
        (
            ["ema", "swa"],
            Averaged(),
            {},
            "the callbacks Watched and StochasticWeightAveraging, and expected at most one",
        ),
        (["ema"], Averaged(), {"master_weights": "split"}, "master_weights='split' with the callback Watched, which"),
        (["swa"], NormedText(), {"layout": "pp2"}, "pipeline_cuts and a model with batch norm with the callback"),
    ]
    for names, model, options, text in cases:
        strategy = (pipeline_strategy if "layout" in options else WeftModelParallelStrategy)(
            **{"plan": "auto", **options}
        )
        run = trainer(world_size, strategy, tmp_path, callbacks=[CALLBACKS[name]() for name in names])
        with pytest.raises(ValueError, match=text):
            run.fit(model, _data(1, 0))


class NormedText(AveragedText):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].norm = nn.BatchNorm1d(4)


class Configured(Averaged):
    """Builds a layer in `configure_model`, which may run once."""

    def configure_model(self) -> None:
        assert not hasattr(self, "late")
        self.late = nn.Linear(DIM, DIM, dtype=torch.float64)


@on_ranks(1)
def test_callbacks_and_averages_outlive_a_run(world_size: int, tmp_path: Path) -> None:
    """A callback is used again without weft; a model that is not the averaged one is validated as it is."""
    set_torchrun_environment(0, world_size)
    callback, model = EMAWeightAveraging(decay=DECAY), Configured(optimizer="sgd")
    run = trainer(1, WeftModelParallelStrategy(plan="auto"), tmp_path, callbacks=[callback])
    key = callback.state_key
    run.fit(model, _data(1, 0))
    assert isinstance(callback, EMAWeightAveraging) and type(callback) is not EMAWeightAveraging
    assert callback.state_key == key
    other = Averaged(seed=3)
    before = weights(other)
    run.validate(other, _data(1, 0), verbose=False)
    assert_same_weights(weights(other), before)
    assert callback._average_model is None, "it is the average of a model that may no longer exist"
    callback.setup(SimpleNamespace(strategy=None), other, "fit")
    assert type(callback) is EMAWeightAveraging and isinstance(callback._average_model.module, Averaged)
    with pytest.raises(ValueError, match="a model with 2 parameters and buffers on this rank, and expected the 4 of"):
        LocalShards(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).swap_with(LocalShards(nn.Linear(2, 2)))
