"""Runs of the Trainer's own features: callbacks, loggers, profilers, loaders and modes, many in each training."""

from __future__ import annotations

import contextlib
import csv
import io
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks, profilers
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning_plugin.drop_in.models import Run, Text, digest
from torch import Tensor
from torch.utils.data import IterableDataset


class Summary(callbacks.ModelSummary):
    """Stores the summary in place of printing it."""

    found: list[Any]

    def summarize(self, summary_data: Any, total: int, trainable: int, *_: Any, **__: Any) -> None:  # type: ignore[override]
        rows = dict(summary_data)
        self.found = [total, trainable, dict(zip(rows["Name"], rows["Params"], strict=True))]


class AtStep(L.Callback):
    """Calls a function after an optimizer step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function, self.exception = step, function, ""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.function(trainer)

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.exception = type(exception).__name__


def monitors(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """Callbacks, loggers and profilers; reports of rank 0 only are None on the other ranks."""
    run = Run(rank, world_size, folder, layout)
    bar, summary, stats = callbacks.TQDMProgressBar(), Summary(max_depth=2), callbacks.DeviceStatsMonitor()
    accumulation = callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    model = Text()
    trainer = run.trainer(
        callbacks=[callbacks.LearningRateMonitor(), stats, accumulation, bar, summary],
        logger=CSVLogger(folder, name="csv"),
        profiler=profilers.SimpleProfiler(folder, "simple"),
        max_epochs=2,
        enable_progress_bar=True,
        enable_model_summary=True,
        log_every_n_steps=1,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(model, run.loader(), run.loader(2))
    trained = digest(model)
    [file] = Path(folder).rglob("metrics.csv") if rank == 0 else [None]
    rows = [] if file is None else list(csv.DictReader(file.open()))
    logged = {key: [float(row[key]) for row in rows if row[key]] for key in rows[0]} if rows else None
    run.found |= {
        "GradientAccumulationScheduler": [trainer.global_step, trained],
        "LearningRateMonitor": logged and logged["lr-SGD"],
        "DeviceStatsMonitor": logged and len(logged["DeviceStatsMonitor.on_train_batch_end/cpu_percent"]),
        "CSVLogger": logged and {name: logged[name] for name in ("loss", "val_loss")},
        "TQDMProgressBar": bar.train_progress_bar.n if rank == 0 else bar.is_enabled or None,
        "ModelSummary": summary.found if rank == 0 else None,
        "SimpleProfiler": _has_report(run, "simple", "run_training_batch"),
    }
    bar, profiler = callbacks.RichProgressBar(), profilers.AdvancedProfiler(folder, "advanced")
    model, timer = Text(), callbacks.Timer(timedelta(days=1))
    trainer = run.trainer(
        callbacks=[bar, callbacks.RichModelSummary(), timer],
        profiler=profiler,
        overfit_batches=2,
        max_epochs=2,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(model, run.loader(), run.loader())
    run.found |= {
        "overfit_batches": [trainer.global_step, digest(model)],
        "RichProgressBar": bar.is_enabled if rank == 0 else bar.is_enabled or None,
        "AdvancedProfiler": _has_report(run, "advanced", "run_training_batch"),
        "Timer": timer.time_elapsed("train") > 0,
    }
    with contextlib.suppress(ImportError):
        from lightning.pytorch.loggers import TensorBoardLogger

        trainer = run.trainer(logger=TensorBoardLogger(folder), fast_dev_run=False, max_steps=1, log_every_n_steps=1)
        trainer.fit(Text(), run.loader())
        run.found["TensorBoardLogger"] = len(list(Path(folder).rglob("events.out.*"))) if rank == 0 else None
    return run.found


def _has_report(run: Run, name: str, text: str) -> bool:
    """Return whether this rank's profiler has written a report; its name has the rank if there are several."""
    files = [Path(run.folder, f"fit-{name}{rank}.txt") for rank in (f"-{run.rank}", "")]
    return any(text in file.read_text() for file in files if file.is_file())


def modes(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """Modes of the Trainer, and the ways in which a run ends."""
    run = Run(rank, world_size, folder, layout)
    model = Text()
    trainer = run.trainer(
        fast_dev_run=2,
        detect_anomaly=True,
        profiler=profilers.PyTorchProfiler(folder, "pytorch", export_to_chrome=False),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(model, run.loader(), run.loader())
    trained = [trainer.global_step, digest(model)]
    run.found |= {"fast_dev_run": trained, "detect_anomaly": trained}
    run.found["PyTorchProfiler"] = _has_report(run, "pytorch", "training_step")

    model, trainer = Text(), run.trainer(callbacks=[AtStep(2, lambda trainer: setattr(trainer, "should_stop", True))])
    trainer.fit(model, run.loader())
    run.found["trainer.should_stop"] = [trainer.global_step, digest(model)]

    handler, stop = signal.getsignal(signal.SIGINT), AtStep(1, _interrupt)
    trainer = run.trainer(callbacks=[stop])
    try:
        trainer.fit(model, run.loader())
        status: Any = "returned"
    except SystemExit as exit_:
        status = exit_.code
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores further signals
    run.found["KeyboardInterrupt"] = [status, stop.exception, str(trainer.state.status), trainer.global_step]

    trainer = run.trainer(inference_mode=True)
    [validated] = trainer.validate(model, run.loader(2), verbose=False)
    predicted = trainer.predict(model, run.loader(2))
    first_rows = predicted[0][:2].clone() if rank == 0 else None  # those of the first data-parallel rank
    run.found["inference_mode"] = [validated["val_loss"], digest(model), len(predicted), first_rows]
    return run.found


def _interrupt(_: L.Trainer) -> None:
    raise KeyboardInterrupt


class Stream(IterableDataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.rows


class TwoLoaders(Text):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(torch.cat([batch["one"], batch["other"]]))


class Sequences(Text):
    """Records the batches."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.setdefault("batches", []).append(int(batch.sum()))


def loaders(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """Kinds of loaders, and the search for a learning rate."""
    run = Run(rank, world_size, folder, layout)
    model = Text()
    stream = run.loader(dataset=Stream)
    run.trainer().fit(model, stream, stream)
    run.found["IterableDataset"] = digest(model)

    model = TwoLoaders()
    loaders = CombinedLoader({"one": run.loader(4), "other": run.loader(2)}, "max_size_cycle")
    run.trainer().fit(model, loaders)
    run.found["CombinedLoader"] = digest(model)

    search = {"min_lr": 1e-2, "max_lr": 5.0}
    model, finder = Text(), callbacks.LearningRateFinder(num_training_steps=13, **search)
    trainer = run.trainer(callbacks=[finder])
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(model, run.loader(14))
        run.found["LearningRateFinder"] = [len(finder.optimal_lr.results["loss"]), model.lr, digest(model)]
        model = Text()
        trainer = run.trainer()
        found = Tuner(trainer).lr_find(model, run.loader(14), num_training=13, **search)
    run.found["Tuner.lr_find"] = [found.suggestion(), model.lr, digest(model)]

    with contextlib.suppress(ImportError):
        from torchdata.stateful_dataloader import StatefulDataLoader

        run.found["StatefulDataLoader"] = _resumed(run, "stateful", lambda: run.loader(5, StatefulDataLoader))
        run.found["StatefulDataLoader of an IterableDataset"] = _resumed(
            run, "stream", lambda: run.loader(5, StatefulDataLoader, Stream)
        )
    return run.found


def _resumed(run: Run, name: str, loader: Callable[[], Any]) -> list[Any]:
    """Train two epochs, stopped and resumed after three steps; return whether the batches are those without the stop.

    On one device, do not stop: Lightning leaves out a batch of a stream when it resumes.
    """
    path = Path(run.folder, name)
    save = AtStep(3, lambda trainer: trainer.save_checkpoint(path))
    first, second, uninterrupted = Sequences(), Sequences(), Sequences()
    run.trainer(max_epochs=2).fit(uninterrupted, loader())
    if not run.layout:
        return [True, digest(uninterrupted)]
    run.trainer(callbacks=[save], max_steps=3).fit(first, loader())
    run.trainer(max_epochs=2).fit(second, loader(), ckpt_path=path)
    batches = first.seen["batches"] + second.seen["batches"]
    return [batches == uninterrupted.seen["batches"], digest(second)]
