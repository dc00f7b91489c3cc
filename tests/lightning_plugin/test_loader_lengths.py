"""Loaders of different lengths raise one error on all ranks, in every loop; equal lengths cost one collective."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.utilities import CombinedLoader
from lightning_plugin.scripts.pipeline_models import Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import (
    BATCH,
    FeedForward,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from support.ranks import on_ranks
from weft._plugin import loaders
from weft._plugin.loader_check import UNKNOWN, LoaderState, LockstepLoader, check_equal_states, describe_length, gather
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy

TENSOR = "the ranks of a tensor-parallel group must get the same batches"
STAGES = "the stages of a pipeline must get the same batches"
ENDED = "has ended on rank 0 and has another batch on rank 1"
COUNTED = "has 3 batches on rank 0 and has 5 batches on rank 1"


class Stream(IterableDataset):
    """A data set of unknown length."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Claiming(Stream):
    """A data set that claims 5 batches, which may be wrong."""

    def __len__(self) -> int:
        return 5 * BATCH


def sized(num_batches: int) -> DataLoader:
    return loader(fixed_data()[: BATCH * num_batches])


def stream(num_batches: int, kind: type[Stream] = Stream) -> DataLoader:
    return loader(kind(fixed_data()[: BATCH * num_batches]))


def tensor_parallel(**options: Any) -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(plan="auto", **options)


def data_parallel(stage: int) -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(plan="auto", layout="dp2", zero_stage=stage)


@on_ranks(2)
def test_unequal_lengths_of_tensor_parallel_ranks_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    uneven = sized(5 if rank else 3)
    run = trainer(world_size, tensor_parallel(), tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=rf"^the training loader {COUNTED}, but {TENSOR}; .*limit_train_batches"):
        run.fit(model := Model(), uneven)
    assert not model.losses
    with pytest.raises(ValueError, match=rf"^the validation loader {COUNTED}, but {TENSOR}; .*limit_val_batches"):
        run.fit(model, sized(3), uneven)
    assert not model.losses
    with pytest.raises(ValueError, match=rf"^the test loader {COUNTED}, but {TENSOR}; .*limit_test_batches"):
        run.test(model, [sized(2), uneven], verbose=False)
    with pytest.raises(ValueError, match=rf"^the prediction loader {COUNTED}, but {TENSOR}"):
        run.predict(model, uneven)
    with pytest.raises(ValueError, match="has 0 batches on rank 0 and has 1 batch on rank 1"):
        run.fit(Model(), sized(rank))
    with pytest.raises(ValueError, match="has no length on rank 0 and has 5 batches on rank 1"):
        run.fit(Model(), uneven if rank else stream(5))


@on_ranks(2)
@pytest.mark.parametrize("kind", [Stream, Claiming])
def test_unequal_streams_of_tensor_parallel_ranks_raise(
    rank: int, world_size: int, tmp_path: Path, kind: type[Stream]
) -> None:
    set_torchrun_environment(rank, world_size)
    uneven = stream(5 if rank else 3, kind)
    run = trainer(world_size, tensor_parallel(), tmp_path, max_epochs=2)
    with pytest.raises(
        ValueError, match=rf"^the training loader {ENDED}, but {TENSOR}; .*limit_train_batches"
    ) as caught:
        run.fit(model := Model(), uneven)
    assert 2 <= len(model.losses) <= 3
    frames = [
        (frame.name, frame.lineno) for frame in traceback.extract_tb(caught.tb) if "loader_check" in frame.filename
    ]
    frames_of_ranks: list[Any] = [None, None]
    dist.all_gather_object(frames_of_ranks, frames)
    assert frames and frames_of_ranks[0] == frames_of_ranks[1], "equal tracebacks are printed once"
    for method, name in (("validate", "validation"), ("test", "test"), ("predict", "prediction")):
        with pytest.raises(ValueError, match=rf"^the {name} loader {ENDED}, but {TENSOR}"):
            getattr(run, method)(model, uneven)
    limited = trainer(world_size, tensor_parallel(), tmp_path, limit_train_batches=4)
    with pytest.raises(ValueError, match=rf"^the training loader {ENDED}"):
        limited.fit(Model(), uneven)
    even = trainer(world_size, tensor_parallel(), tmp_path, max_epochs=2)
    even.fit(model := Model(), stream(5, kind), stream(2, kind) if kind is Stream else None)
    assert len(model.losses) == 10


@on_ranks(2)
@pytest.mark.parametrize("make", [sized, stream])
def test_loops_that_end_before_shorter_loader_run(rank: int, world_size: int, tmp_path: Path, make: Any) -> None:
    set_torchrun_environment(rank, world_size)
    uneven = make(5 if rank else 3)

    def num_steps(loader: Any = uneven, validated: Any = None, **options: Any) -> int:
        run = trainer(world_size, tensor_parallel(), tmp_path, **{"max_epochs": 2, **options})
        run.fit(model := Model(), loader, validated)
        return len(model.losses)

    assert num_steps(limit_train_batches=2) == 4
    assert num_steps(limit_train_batches=3) == 6
    assert num_steps(overfit_batches=2) == 4
    assert num_steps(max_epochs=-1, max_steps=2) == 2
    assert num_steps(max_epochs=-1, max_steps=1, accumulate_grad_batches=2) == 2
    assert num_steps(sized(2), uneven, limit_val_batches=3) == 4
    if make is sized:
        assert num_steps(max_epochs=-1, max_steps=3) == 3
        with pytest.raises(ValueError, match=COUNTED):
            num_steps(max_epochs=-1, max_steps=4)
        with pytest.raises(ValueError, match=COUNTED):
            num_steps(max_epochs=-1, max_steps=2, accumulate_grad_batches=2)
        with pytest.raises(ValueError, match=COUNTED):  # rank 0 would validate after its third batch, rank 1 would not
            num_steps(validated=sized(1), max_epochs=-1, max_steps=3)


@on_ranks(2)
def test_unequal_data_parallel_ranks_raise_if_they_exchange(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for stage in (0, 3):
        run = trainer(world_size, data_parallel(stage), tmp_path)
        gradients = "but data-parallel ranks exchange gradients in every batch"
        with pytest.raises(ValueError, match=rf"^the training loader {COUNTED}, {gradients}"):
            run.fit(Model(), sized(5 if rank else 3))
        with pytest.raises(ValueError, match=rf"^the training loader {ENDED}, {gradients}"):
            run.fit(Model(), stream(5 if rank else 3))
        several = {"long": sized(6), "short": stream(5 if rank else 3)}  # the short one restarts
        run.fit(model := _PairModel(), CombinedLoader(several, "max_size_cycle"))
        assert len(model.losses) == 6
    for make, reason in ((sized, COUNTED), (stream, ENDED)):
        uneven = make(5 if rank else 3)
        run = trainer(world_size, data_parallel(0), tmp_path)
        assert len(run.predict(Model(), uneven)) == (5 if rank else 3)
        run = trainer(world_size, data_parallel(3), tmp_path)
        with pytest.raises(ValueError, match=rf"{reason}, but data-parallel ranks exchange parameters in every batch"):
            run.predict(Model(), uneven)


class _PairModel(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch["long"], batch_idx)


@on_ranks(4)
def test_lengths_are_compared_in_the_groups_of_a_mesh(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan="auto", layout="dp2,tp2", zero_stage=0)
    run = trainer(world_size, strategy, tmp_path)
    expected = "has 3 batches on rank 2 and has 5 batches on rank 3, but the ranks of a tensor"
    with pytest.raises(ValueError, match=expected):
        run.validate(Model(), sized(5 if rank == 3 else 3), verbose=False)
    run.validate(Model(), stream(5 if rank > 1 else 3), verbose=False)
    with pytest.raises(ValueError, match="has ended on ranks 0, 1 and has another batch on ranks 2, 3, but data-par"):
        run.fit(Model(), stream(5 if rank > 1 else 3))


@on_ranks(2)
def test_unequal_lengths_of_stages_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    uneven, model = text_loader(30 if rank else 18), Text()
    run = trainer(world_size, pipeline_strategy(), tmp_path)
    for data, reason in ((uneven, COUNTED), (DataLoader(Stream(uneven.dataset), batch_size=6), ENDED)):
        with pytest.raises(ValueError, match=rf"^the training loader {reason}, but {STAGES}"):
            run.fit(model, data)
        with pytest.raises(ValueError, match=rf"^the validation loader {reason}, but {STAGES}"):
            run.validate(model, data, verbose=False)


@on_ranks(2)
def test_unequal_lengths_in_fabric_raise(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto"))
    fabric.launch()
    model = fabric.setup(FeedForward())
    for make in (sized, stream):
        uneven = fabric.setup_dataloaders(make(5 if rank else 3))
        assert uneven.batch_size == BATCH
        seen = 0
        with pytest.raises(ValueError, match=rf"^a data loader {ENDED}, but {TENSOR}; .*leave the loop"):
            for batch in uneven:
                model(batch)
                seen += 1
        assert seen == 3
        for idx, batch in enumerate(uneven):
            model(batch)
            if idx == 2:
                break
        assert sum(len(model(batch)) for batch in fabric.setup_dataloaders(make(4))) == 4 * BATCH


@on_ranks(2)
def test_equal_lengths_cost_one_collective(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_torchrun_environment(rank, world_size)
    events: list[str] = []
    monkeypatch.setattr(loaders, "gather", lambda *a: (events.append("gathered"), gather(*a))[1])
    monkeypatch.setattr(
        dist, "all_gather", lambda *a, own=dist.all_gather, **k: (events.append("compared"), own(*a, **k))
    )
    model = Model()
    model.on_train_batch_start = lambda *_: events.append("batch")
    run = trainer(world_size, tensor_parallel(), tmp_path, max_epochs=2)
    run.fit(model, sized(3))
    assert events == ["gathered", *["batch", "compared"] * 2, "batch", "batch", "compared", "batch", "batch"]
    assert not isinstance(run.train_dataloader, LockstepLoader)
    events.clear()
    unchecked = tensor_parallel(check_batches=0)
    trainer(world_size, unchecked, tmp_path).fit(model, stream(2))
    assert events == ["batch"] * 2


def test_long_rank_lists_are_abbreviated() -> None:
    states = [LoaderState(rank, rank, 0, (3 if rank < 12 else UNKNOWN,)) for rank in range(13)]
    parties = "has 3 batches on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more and has no length on rank 12"
    with pytest.raises(ValueError, match=f"^a loader {parties}, but data-parallel ranks exchange gradients"):
        check_equal_states(states, "gradients", describe_length, "a loader", "do something")
    check_equal_states(states, None, describe_length, "a loader", "do something")  # no two ranks get the same batches


class Stateful(DataLoader):
    """A loader whose state is the number of batches that it has yielded."""

    num_given = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.num_given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["num_given"]


@on_ranks(2)
def test_wrapped_stream_keeps_state_of_loader(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    mine = Stateful(Stream(fixed_data()), batch_size=BATCH)
    run = trainer(world_size, tensor_parallel(), tmp_path, max_epochs=-1, max_steps=3)
    run.fit(model := Model(), mine)
    run.save_checkpoint(tmp_path / "stream.ckpt")
    used = run.train_dataloader
    assert used.dataset is mine.dataset
    used.num_given += 10
    assert mine.num_given == 14  # 10, three trained batches and one prefetched batch
    run = trainer(world_size, tensor_parallel(), tmp_path, max_epochs=-1, max_steps=5)
    run.fit(model, used, ckpt_path=tmp_path / "stream.ckpt")
    assert mine.num_given == 4 + 3
    assert run.train_dataloader is not used, "each run wraps the loader anew"
