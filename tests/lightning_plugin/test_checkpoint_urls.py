"""The Trainer and Fabric with checkpoints at URLs, tried with a server of S3 in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_plugin.scripts.plugin_models import (
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)

from support.object_store import BUCKET, ObjectStore, use
from support.ranks import on_ranks
from weft.lightning import WeftModelParallelStrategy, newest_checkpoint


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    store = ObjectStore()
    use(store.endpoint).mkdir(BUCKET)
    yield store.endpoint
    store.close()


@on_ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_trainer_saves_and_resumes(rank: int, world_size: int, tmp_path: Path, endpoint: str, is_async: bool) -> None:
    """A ModelCheckpoint keeps the newest and the last; a run that resumes from a URL ends as from a path."""
    set_torchrun_environment(rank, world_size)
    files = use(endpoint)
    found = []
    for folder in (str(tmp_path / "checkpoints"), f"s3://{BUCKET}/trainer/{is_async}"):
        strategy = WeftModelParallelStrategy(plan="auto", async_save=is_async)
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=True)
        run = trainer(world_size, strategy, tmp_path, enable_checkpointing=True, callbacks=[keep])
        model = Model()
        run.fit(model, loader())
        dist.barrier()
        path = newest_checkpoint(folder, verify=True)
        assert path is not None and path.startswith(folder)
        run = trainer(world_size, "weft", tmp_path, max_epochs=2)
        resumed = Model(seed=99)
        run.fit(resumed, loader(), ckpt_path=keep.best_model_path)
        found.append((weights(model), weights(resumed)))
    for one, other in zip(*found, strict=True):
        assert_same_weights(one, other)
    names = sorted({path.split("/")[3] for path in files.find(folder)})
    assert names == ["epoch=0-step=6.ckpt", "last.ckpt"]
    for name in names:  # one file of each rank, other entries, and the manifest
        assert len(files.ls(f"{folder}/{name}")) == world_size + 2
    assert not (Path.cwd() / "s3:").exists()
    dist.barrier()
