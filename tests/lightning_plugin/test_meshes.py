"""Every mesh and ZeRO stage in the Trainer gives the losses, gradients and weights of one device, also when resumed."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning_plugin.scripts.meshes import CASES, MESHES, Tokens, assert_matches_one_device, batches, mesh_settings
from lightning_plugin.scripts.plugin_models import FeedForward, set_torchrun_environment, trainer, weights
from torch import Tensor

from support.extended import extended_unless
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy

ACCUMULATE, CLIP = 2, 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("layout", "stage"), CASES)
def test_every_mesh_and_stage_matches_one_device(folder: str, layout: str, stage: int | None) -> None:
    assert_matches_one_device(folder, layout, stage, "SGD", ACCUMULATE, CLIP)


# With the test above, they cover each mesh and each stage with each value of optimizer, accumulate and clip, and each
# pair of these values; `make soak` runs all combinations. Most other meshes and stages resume with AdamW below.
WITH_ADAMW = [
    *(("tp1", None), ("tp2", None), ("dp2", 0), ("dp4", 1), ("tp4", None), ("dp2,tp2", 2), ("dp2,tp2 by tokens", 1)),
    *(("rep2,dp2", 3), ("rep2,tp2", None), ("rep2,dp2,tp2", 0), ("rep2,dp2,tp2", 2)),
]
OTHER_CASES = [
    *extended_unless(
        lambda layout, stage, *_: (layout, stage) in WITH_ADAMW,
        ((layout, stage, "AdamW", 1, None) for layout, stage in CASES),
    ),
    ("dp2,tp2", 3, "AdamW", 2, CLIP),
    ("dp2", 1, "SGD", 1, CLIP),
    ("dp4", 2, "SGD", 2, None),
]


@pytest.mark.parametrize(("layout", "stage", "optimizer", "accumulate", "clip"), OTHER_CASES)
def test_other_optimizers_and_steps_match_one_device(
    folder: str, layout: str, stage: int | None, optimizer: str, accumulate: int, clip: float | None
) -> None:
    assert_matches_one_device(folder, layout, stage, optimizer, accumulate, clip)


# Each mesh once or twice, with another stage each time.
CHECKPOINTS = [
    ("tp1", None),
    ("tp2", None),
    ("dp2", 0),
    ("dp2", 1),
    ("tp4", None),
    ("dp4", 3),
    ("dp2,tp2", 1),
    ("dp2,tp2", 2),
    ("dp2,tp2 by tokens", 3),
    ("rep2,dp2", 3),
    ("rep2,tp2", None),
    ("rep2,dp2,tp2", 1),
    ("rep2,dp2,tp2", 3),
]


def _name(layout: str, stage: int | None, is_directory: bool) -> str:
    return f"{layout}-{stage}-{'directory' if is_directory else 'file'}.ckpt"


def _run_epochs(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, num_epochs: int, ckpt_path: str | None
) -> tuple[Tokens, L.Trainer, WeftModelParallelStrategy]:
    tp_size = MESHES[layout][2]
    strategy = WeftModelParallelStrategy(**mesh_settings(layout, stage))
    model, run = Tokens("AdamW"), trainer(world_size, strategy, folder, max_epochs=num_epochs)
    data = batches(world_size // tp_size, rank // tp_size, 1)[:3]
    run.fit(model, torch.utils.data.DataLoader(data), ckpt_path=ckpt_path)
    return model, run, strategy


def _save(rank: int, world_size: int, folder: str, layout: str, stage: int | None) -> None:
    set_torchrun_environment(rank, world_size)
    _, run, strategy = _run_epochs(rank, world_size, folder, layout, stage, 1, None)
    for is_directory in (True, False):
        strategy._save_distributed_checkpoint = is_directory
        run.save_checkpoint(f"{folder}/{_name(layout, stage, is_directory)}")


def _resume(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, names: list[str]
) -> dict[str, dict[str, Tensor]]:
    set_torchrun_environment(rank, world_size)
    resumed = {}
    for name in names:
        model, run, _ = _run_epochs(rank, world_size, folder, layout, stage, 2, f"{folder}/{name}")
        assert run.global_step == 6
        resumed[name] = weights(model)
    return resumed


def _train_uninterrupted(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    model, _, _ = _run_epochs(rank, world_size, folder, "tp1", None, 2, None)
    return weights(model)


def save_all(folder: str) -> dict[str, Tensor]:
    """Save a directory and a file for each of CHECKPOINTS; return the weights that a resumed run must have."""
    for layout, stage in CHECKPOINTS:
        world_size = torch.Size(MESHES[layout]).numel()
        run_on_ranks(world_size, _save, keeps_groups=True, folder=folder, layout=layout, stage=stage)
    return run_on_ranks(1, _train_uninterrupted, folder=folder)[0]


def assert_resumes(
    folder: str, expected: dict[str, Tensor], layout: str, stage: int | None, sources: list[tuple[str, int | None]]
) -> None:
    """Resume from each source, alternately a directory and a file, and compare the weights."""
    names = [_name(*saved, is_directory=bool((CHECKPOINTS.index(saved) + len(layout)) % 2)) for saved in sources]
    world_size = torch.Size(MESHES[layout]).numel()
    case = {"folder": folder, "layout": layout, "stage": stage, "names": names}
    for resumed in run_on_ranks(world_size, _resume, keeps_groups=True, **case):
        for name in names:
            for parameter, value in expected.items():
                difference = (resumed[name][parameter] - value).norm().item()
                assert difference <= 1e-9 * value.norm().item(), f"from {name}: {parameter} is {difference:.3g} apart"


@pytest.fixture(scope="module")
def checkpoints(folder: str) -> dict[str, Tensor]:
    return save_all(folder)


@pytest.mark.parametrize(("layout", "stage"), CHECKPOINTS)
def test_checkpoints_resume_on_every_mesh(
    folder: str, checkpoints: dict[str, Tensor], layout: str, stage: int | None
) -> None:
    """Each target resumes from a fifth of the sources, which differ; `make soak` resumes each source at each stage.

    So each source is resumed on two or three meshes, and each target reads directories and files.
    """
    first = -CHECKPOINTS.index((layout, stage)) % 5
    assert_resumes(folder, checkpoints, layout, stage, CHECKPOINTS[first::5])


@on_ranks(2)
@pytest.mark.parametrize(("stage", "axis"), [(3, "data_parallel"), (2, "data_parallel"), (0, "tensor_parallel")])
def test_one_tensor_parallel_rank_adds_no_mesh_axis(rank: int, world_size: int, stage: int, axis: str) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = FabricStrategy(plan="auto", layout="dp2", zero_stage=stage)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup(FeedForward())
    assert {parameter.device_mesh.mesh_dim_names for parameter in model.parameters()} == {(axis,)}
