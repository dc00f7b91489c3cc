"""The callback Report: what it records of a run in stages and shards, its page, and what is left of a failed run."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_plugin.scripts.pipeline_models import CUTS, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import Model, fixed_data, loader, set_torchrun_environment, trainer

import weft
import weft_command
from support.ranks import on_ranks
from weft._plugin.run_curves import Curves
from weft.lightning import Report, ThroughputMonitor, WeftModelParallelStrategy
from weft.strategy.reports.run_data import DATA_FILE, PAGE_FILE

NUM_STEPS = 4


def run(folder: Path, rank: int, world_size: int, strategy: Any, module: Any, data: Any, **options: Any) -> None:
    set_torchrun_environment(rank, world_size)
    reports = [Report(folder / "report", every_n_steps=2, predicted_bytes=1 << 40)]
    callbacks = [ThroughputMonitor(), *reports]
    settings = {"limit_train_batches": NUM_STEPS, "log_every_n_steps": 2, "callbacks": callbacks, **options}
    trainer(world_size, strategy, folder, **settings).fit(module, data)


def data_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "report" / DATA_FILE).read_text())
    return data


@on_ranks(4)
def test_stages_and_shards_are_recorded(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Text()
    strategy = pipeline_strategy(layout="pp2,tp2", pipeline_cuts=CUTS[2])
    run(tmp_path, rank, world_size, strategy, module, text_loader(24))
    if rank != 0:
        return
    data = data_of(tmp_path)
    assert data["run"]["mesh"] == [["pipeline_parallel", 2], ["data_parallel", 1], ["tensor_parallel", 2]]
    assert (data["run"]["module"], data["run"]["status"]) == ("Text", "Training ended.")
    assert any(line.startswith("sharded: ") for line in data["run"]["summary"])
    _check_points(data, module)
    _check_ranks(data)
    _check_pipeline(data["pipeline"], strategy.pipeline.num_micro_batches)
    _check_plan(data["plan"])
    page = (tmp_path / "report" / PAGE_FILE).read_text()
    assert "Planned: " in page and "Measured: " in page and "layers.0.attention" in page
    assert page.count("<section") == 8 + bool(data["warnings"])
    for text in ("<script src", "<link", "http://", "https://", "url(", "@import"):  # needs no other file
        assert text not in page, text


def _check_points(data: dict[str, Any], module: Text) -> None:
    assert [point["step"] for point in data["points"]] == [1, 2, 4]
    for point, losses in zip(data["points"], ([0], [1], [2, 3]), strict=True):
        mean = sum(module.losses[i] for i in losses) / len(losses)
        assert point["values"]["mean loss"] == pytest.approx(mean)
        assert point["values"]["seconds"] > 0
        rate = point["values"]["samples_per_second"]
        samples = rate * len(losses) * point["values"]["seconds"]
        assert samples == pytest.approx(len(losses) * len(next(iter(text_loader(24)))["x"]))
        assert "train_loss_step" in point["values"]
    assert "throughput/samples_per_second" in data["points"][1]["values"]
    assert "train_loss_epoch" in data["points"][2]["values"]


def _check_ranks(data: dict[str, Any]) -> None:
    assert [(each["rank"], each["stages"]) for each in data["ranks"]] == [(0, [0]), (1, [0]), (2, [1]), (3, [1])]
    shards = {rank: plan for plan in data["plan"] for rank in plan["ranks"]}
    for each in data["ranks"]:
        held = sum(row["num_bytes"] for row in shards[each["rank"]]["parameters"] if "tied to" not in row["note"])
        assert sum(each["memory"]["peak"].values()) >= held > 0
        labels, usages = zip(*each["memory"]["phases"], strict=True)
        assert labels[0] == "step begins" and set(labels[1:]) == {
            f"{each['stages'][0]}{kind}{i}" for kind in "FB" for i in (0, 1)
        }
        assert all(usage["total"] >= held for usage in usages)
        assert all(seconds >= 0 for seconds in each["times"].values())
        axes = each["communication"]["axes"]
        assert axes["pipeline_parallel"][1] > 0 and axes["tensor_parallel"][1] > 0
        assert not each["communication"]["is_truncated"]
    assert data["memory"] == {"predicted": 1 << 40}


def _check_pipeline(pipeline: dict[str, Any], num_micro_batches: int) -> None:
    for kind in ("planned", "measured"):
        for stage, spans in enumerate(pipeline[kind]):
            done = [tuple(span[:3]) for span in spans if span[0] in "FB"]
            assert sorted(done) == [(k, stage, i) for k in "BF" for i in range(num_micro_batches)]


def _check_plan(plans: list[dict[str, Any]]) -> None:
    assert sorted(rank for plan in plans for rank in plan["ranks"]) == [0, 1, 2, 3]
    assert len({json.dumps(plan["parameters"]) for plan in plans}) == len(plans)
    rows = {row["parameter"]: row for plan in plans for row in plan["parameters"]}
    assert rows["model.layers.0.attention.wq.weight"]["axes"] == {"tensor_parallel": 0}
    assert rows["model.layers.3.attention.wo.weight"]["axes"] == {"tensor_parallel": 1}


def batched(values: list[float], size: int) -> list[list[float]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


@on_ranks(2)
def test_accumulated_batches_are_one_step(rank: int, world_size: int, tmp_path: Path) -> None:
    """A step's communication is that of its batches: in the forward and the backward of the MLP, a reduction each."""
    calls = []
    for batches in (1, 2):
        folder = tmp_path / str(batches)
        strategy = WeftModelParallelStrategy(plan="auto", tensor_parallel_size=2, data_parallel_size=1)
        options = {"accumulate_grad_batches": batches, "callbacks": [Report(folder / "report", every_n_steps=1)]}
        module = Model(seed=None)
        run(folder, rank, world_size, strategy, module, loader(), **options)
        if rank == 0:
            data = data_of(folder)
            assert [point["step"] for point in data["points"]] == list(range(1, NUM_STEPS // batches + 1))
            phases = ["step begins", "backward begins", "optimizer steps", "step ends"]
            assert [name for name, _ in data["ranks"][0]["memory"]["phases"]] == phases
            assert data["memory"] == {"predicted": None} and data["pipeline"] is None
            calls.append(data["ranks"][0]["communication"]["axes"]["tensor_parallel"])
            loss = [point["values"]["mean loss"] for point in data["points"]]
            assert loss == pytest.approx([statistics.mean(each) for each in batched(module.losses, batches)])
    if rank == 0:
        (num_calls, num_bytes), (more_calls, more_bytes) = calls
        assert num_calls == 2 and 4 <= more_calls <= 5  # with one of weft's checks, of a few bytes
        assert 2 * num_bytes <= more_bytes < 2 * num_bytes + 64


class Unusual(Model):
    """Optimizes by itself; its batches have no tensors, its loss is no scalar, and it logs a NaN."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = self.loss(fixed_data())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("undefined", float("nan"), batch_size=1)
        return loss.detach().expand(2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(fixed_data()), sync_dist=True, batch_size=1)


@on_ranks(2)
def test_unusual_runs_are_recorded(rank: int, world_size: int, tmp_path: Path) -> None:
    """The second run of one callback has validations, whose values are at the step before them."""
    strategy = WeftModelParallelStrategy(plan="auto", tensor_parallel_size=2, data_parallel_size=1, check_batches=0)
    set_torchrun_environment(rank, world_size)
    report = Report(tmp_path / "report", every_n_steps=3)
    fit = trainer(
        world_size, strategy, tmp_path, callbacks=[report], max_epochs=2, num_sanity_val_steps=1, val_check_interval=1
    )
    batches = torch.utils.data.DataLoader(["a", "b"], batch_size=None)
    module = Unusual()
    for num_epochs in (2, 4):
        fit.fit_loop.max_epochs = num_epochs
        fit.fit(module, batches, batches)
        if rank == 0:
            points = {point["step"]: point["values"] for point in data_of(tmp_path)["points"]}
            first = 2 * num_epochs - 3
            assert list(points) == list(range(first, first + 4))  # there is a validation after each step
            assert "seconds" in points[first] and "seconds" in points[first + 3]
            assert points[first]["undefined"] is None
            assert not any("mean loss" in each or "samples_per_second" in each for each in points.values())
            losses = [values["val_loss"] for values in points.values()]
            assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4


class Removed(Model):
    """Replaces the directory of the report by a file."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            shutil.rmtree(self.folder)
            self.folder.touch()


@on_ranks(2)
def test_directory_that_cannot_be_written_to(rank: int, world_size: int, tmp_path: Path) -> None:
    """At the end, it is a warning; at the start, an error on all ranks."""
    module = Removed()
    module.folder = tmp_path / "report"
    strategies = [WeftModelParallelStrategy(plan="auto", tensor_parallel_size=2) for _ in range(2)]
    with pytest.warns(UserWarning, match="Report cannot write to") if rank == 0 else nullcontext():
        run(tmp_path, rank, world_size, strategies[0], module, loader())
    with pytest.raises((OSError, RuntimeError), match=f"{PAGE_FILE}|create the directory"):
        run(
            tmp_path,
            rank,
            world_size,
            strategies[1],
            Model(),
            loader(),
            callbacks=[Report(tmp_path / "report" / PAGE_FILE)],
        )


class Failing(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ArithmeticError("no <more> steps")
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_failed_run_leaves_its_curves(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = WeftModelParallelStrategy(plan="auto", tensor_parallel_size=2, data_parallel_size=1)
    with pytest.raises(Exception, match="no <more> steps"):
        run(tmp_path, rank, world_size, strategy, Failing(), loader())
    if rank == 0:
        data = data_of(tmp_path)
        assert data["run"]["status"] == "Training failed after step 2: ArithmeticError: no <more> steps"
        assert [point["step"] for point in data["points"]] == [1, 2] and data["ranks"] == data["plan"] == []
        page = (tmp_path / "report" / PAGE_FILE).read_text()
        assert "no &lt;more&gt; steps" in page and "Time of a step" in page


class FailsLate(Model):
    def on_fit_end(self) -> None:
        raise ArithmeticError("after training")


@on_ranks(1)
def test_error_after_training_leaves_the_report(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="after training"):
        run(tmp_path, rank, world_size, WeftModelParallelStrategy(plan="auto"), FailsLate(), loader())
    data = data_of(tmp_path)
    assert data["run"]["status"] == "Training ended." and len(data["ranks"]) == 1


@on_ranks(1)
def test_report_is_in_the_folder_of_the_trainer(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", tensor_parallel_size=1, data_parallel_size=1)
    fit = trainer(world_size, strategy, tmp_path, limit_train_batches=2, callbacks=[Report(every_n_steps=1)])
    fit.fit(Model(), loader())
    assert (tmp_path / PAGE_FILE).is_file()
    data = json.loads((tmp_path / DATA_FILE).read_text())
    assert data["run"]["layout"] == "tp1" and data["run"]["num_steps"] == 2
    assert data["run"]["facts"]["weft"] == weft.__version__


def test_long_curves_are_thinned() -> None:
    """Each rank knows the interval; a rank that keeps no points has none."""
    kept, unkept = Curves(2, keeps=True), Curves(2, keeps=False)
    for curves in (kept, unkept):
        step = 0
        while step < 20_000:
            step += curves.interval
            curves.add_loss(torch.tensor(float(step)), 1)
            curves.add_point(step, {"seconds": 0.5})
    assert kept.interval == unkept.interval == 32 and unkept.points == []
    steps = [point["step"] for point in kept.points]
    assert 500 <= len(steps) < 1000 and steps[-1] == step
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {32}
    assert all(point["values"] == {"mean loss": point["step"], "seconds": 0.5} for point in kept.points)


def test_unchanged_values_have_one_point() -> None:
    curves = Curves(1, keeps=True)
    for step, metrics in enumerate([{"a": 1.0}, {"a": 1.0, "b": torch.tensor([1.0, 2.0])}, {"a": float("nan")}] * 2):
        curves.add_logged(step, metrics)
    values = [(point["step"], point["values"]) for point in curves.points]
    assert values == [(0, {"a": 1.0}), (2, {"a": None}), (3, {"a": 1.0}), (5, {"a": None})]


def test_command_writes_the_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", "report", *map(str, arguments)])
        return weft_command.main()

    assert command(tmp_path) == 2
    assert f"has no {DATA_FILE}; pass the directory of a run with the callback Report" in capsys.readouterr().err
    (tmp_path / DATA_FILE).write_text('{"version": 2}')
    assert command(tmp_path) == 2
    assert "is no report of version 1; run the training again" in capsys.readouterr().err
    (tmp_path / DATA_FILE).write_text(json.dumps(EMPTY))
    assert command(tmp_path) == 0
    first = (tmp_path / PAGE_FILE).read_text()
    assert command(tmp_path, "--output", tmp_path / "other.html") == 0
    assert (tmp_path / "other.html").read_text() == first and "Training ended." in first


EMPTY: dict[str, Any] = {
    "version": 1,
    "run": {
        "module": "Model", "status": "Training ended.", "layout": "tp1", "num_ranks": 1, "num_steps": 0,
        "mesh": [], "summary": [], "facts": {},
    },
    "points": [], "ranks": [], "memory": {"predicted": None}, "pipeline": None, "plan": [], "warnings": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Report(every_n_steps=0), "Report got every_n_steps=0"),
        (lambda: Report(predicted_bytes="18GB"), "Report got predicted_bytes='18GB'"),
        (lambda: Report(predicted_bytes=0), "Report got predicted_bytes=0; pass a number of bytes from 1 on"),
    ],
)
def test_invalid_arguments_raise_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_other_strategies_raise_an_error(tmp_path: Path) -> None:
    fit = trainer(1, DDPStrategy(), tmp_path, callbacks=[Report()])
    with pytest.raises(TypeError, match="Report got a Trainer with a DDPStrategy; pass strategy='weft'"):
        Report().setup(fit, Model(), "fit")
