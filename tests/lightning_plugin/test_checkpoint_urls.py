"""The Trainer and Fabric with checkpoints at URLs, tried with a server of S3 in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_plugin.scripts.plugin_models import (
    FeedForward,
    Model,
    assert_same_weights,
    loader,
    set_torchrun_environment,
    trainer,
    weights,
)

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from support.object_store import BUCKET, ObjectStore, use
from support.ranks import on_ranks
from weft.lightning import Preemption, WeftModelParallelStrategy, consolidate_checkpoint, newest_checkpoint
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy


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


@on_ranks(2)
def test_stopped_training_goes_on(rank: int, world_size: int, tmp_path: Path, endpoint: str) -> None:
    """`Preemption` saves at a URL, and finds what it has saved; one process makes a file of it."""
    set_torchrun_environment(rank, world_size)
    files = use(endpoint)
    folder = f"s3://{BUCKET}/stopped"
    for _ in range(2):
        preemption = Preemption(folder, signals=[], should_stop=lambda: True, every_n_steps=3)
        found = preemption.last_checkpoint()
        run = trainer(world_size, "weft", tmp_path, max_epochs=1, callbacks=[preemption])
        model = Model(seed=99 if found else 0)
        with pytest.raises(SystemExit):
            run.fit(model, loader(), ckpt_path=found)
    assert run.global_step == 6 and found == f"{folder}/preempted.ckpt"
    dist.barrier()
    undisturbed = Model()
    trainer(world_size, "weft", tmp_path).fit(undisturbed, loader())
    trained = weights(model)
    assert_same_weights(trained, weights(undisturbed))
    if rank == 0:
        with pytest.raises(ValueError, match=r"got the URL 's3://.*' and no file; pass the path of the file"):
            consolidate_checkpoint(found)
        consolidate_checkpoint(found, tmp_path / "full.ckpt")
        state = torch.load(tmp_path / "full.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(state["scale"], trained["scale"])
        files.rm_file(f"{folder}/preempted.ckpt/manifest.json")
        assert Preemption(folder).last_checkpoint() is None and newest_checkpoint(folder) is None
    dist.barrier()


@on_ranks(2)
def test_files_at_urls(rank: int, world_size: int, tmp_path: Path, endpoint: str) -> None:
    """Lightning writes the files of the Trainer; a directory takes the place of a file, and a file that of one."""
    set_torchrun_environment(rank, world_size)
    files = use(endpoint)
    url = f"s3://{BUCKET}/files/last.ckpt"
    model = Model()
    for is_directory in (False, True, False):
        strategy = WeftModelParallelStrategy(plan="auto", save_distributed_checkpoint=is_directory)
        run = trainer(world_size, strategy, tmp_path)
        model = Model()
        run.fit(model, loader())
        run.save_checkpoint(url)
        for _ in range(2):
            assert files.isfile(url) == (not is_directory) and files.exists(f"{url}/manifest.json") == is_directory
            with pytest.raises(TypeError if is_directory or rank == 0 else RuntimeError, match="storage_options"):
                run.save_checkpoint(url, storage_options={"x": 1})  # removes nothing
    run = trainer(world_size, "weft", tmp_path, max_epochs=2)
    resumed, expected = Model(seed=99), Model()
    run.fit(resumed, loader(), ckpt_path=url)
    trainer(world_size, "weft", tmp_path, max_epochs=2).fit(expected, loader())
    assert_same_weights(weights(resumed), weights(expected))
    with pytest.raises(FileNotFoundError, match=r"got 's3://bucket/none', which has no manifest.json") as error:
        trainer(world_size, "weft", tmp_path).fit(Model(), loader(), ckpt_path=f"s3://{BUCKET}/none")
    assert not isinstance(error.value, RuntimeError)
    assert not (Path.cwd() / "s3:").exists()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["directory", "background", "file"])
def test_fabric_saves_and_loads(rank: int, world_size: int, tmp_path: Path, endpoint: str, kind: str) -> None:
    set_torchrun_environment(rank, world_size)
    use(endpoint)
    url = f"s3://{BUCKET}/fabric/{kind}"
    options = {"async_save": kind == "background", "save_distributed_checkpoint": kind != "file"}
    strategy = FabricStrategy(plan="auto", **options)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    network = FeedForward()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=0.01))
    fabric.backward(model(torch.ones(4, 8, dtype=torch.float64)).sum())
    optimizer.step()
    before = weights(model)
    if kind == "file":  # takes the place of a directory
        on_directories = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(plan="auto"))
        on_directories.launch()
        on_directories.save(url, {"model": on_directories.setup(FeedForward()), "step": 0})
    for step in (1, 2):
        fabric.save(url, {"model": model, "optimizer": optimizer, "step": step})
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    saved = moment.full_tensor().clone()
    with torch.no_grad():
        moment.zero_()
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(url, state)
    assert state["step"] == 2
    assert_same_weights(weights(model), before)
    assert torch.equal(next(iter(optimizer.state.values()))["exp_avg"].full_tensor(), saved)
    if kind == "file":  # written by Lightning
        fabric.save(f"file://{tmp_path}/last.ckpt", state, filter={"model": lambda name, _: "w1" in name})
        assert torch.load(tmp_path / "last.ckpt")["model"].keys() == {"w1.weight"}
    if kind == "directory":
        with pytest.raises(IsADirectoryError, match="is a directory of shards; pass a state to load"):
            fabric.load(url)
    with pytest.raises(ValueError, match=r"got the checkpoint 'memory://a', which is in the memory of one process"):
        fabric.save("memory://a", state)
    with pytest.raises(ValueError, match=r"got the checkpoint 's3://.*' with storage_options, a filter, or not"):
        fabric.save(url, state, filter={"model": lambda *_: True})


@on_ranks(1)
def test_memory_of_the_process(tmp_path: Path) -> None:
    set_torchrun_environment(0, 1)
    run = trainer(1, "weft", tmp_path)
    model = Model()
    run.fit(model, loader())
    run.save_checkpoint("memory://one/last.ckpt")
    resumed = Model(seed=99)
    trainer(1, "weft", tmp_path).test(resumed, loader(), ckpt_path="memory://one/last.ckpt", verbose=False)
    assert_same_weights(weights(resumed), weights(model))
