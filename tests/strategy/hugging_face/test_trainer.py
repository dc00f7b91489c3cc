"""transformers' Trainer and Accelerate train a sharded model as one process does."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy.hugging_face.training import accelerate, join, model_on, train, trainer_on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.ranks import on_ranks, run_on_ranks
from weft.strategy.hugging_face import prepare_accelerator, prepare_trainer

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.0")

# All evaluations are equally good: the first one, of step 2, is the best, and its weights are loaded at the end.
BEST: dict[str, Any] = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": 2,
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "rows",
}
NUM_RANKS = {"": 1, "tp2": 2, "dp2": 2, "ddp2": 2, "dp2,tp2": 4}


def run(layout: str, folder: str, function: Any = train, **options: Any) -> list[dict[str, Any]]:
    return run_on_ranks(NUM_RANKS[layout], function, keeps_groups=True, folder=folder, layout=layout, **options)


@functools.cache
def on_one_process(**options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run("", folder, **options)[0]


def assert_same(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-10)


EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2", BEST),
        ("dp2,tp2", {"gradient_accumulation_steps": 2}),
        pytest.param("dp2", {}, marks=EXTENDED),
        ("ddp2", {}),
        pytest.param("dp2,tp2", {"is_stream": True}, marks=EXTENDED),
    ],
)
def test_trainer_is_as_on_one_process(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    """Losses, norms, rates and metrics too; the rows of a batch have different numbers of labels."""
    expected = on_one_process(**options)
    assert expected["evaluated"][0] == 7  # the last batch of the evaluation is not full
    for found in run(layout, str(tmp_path), **options):
        assert_same(found["weights"], expected["weights"])
        assert_same(found["logged"], expected["logged"], rtol=1e-6)  # the Trainer sums losses in float32
        assert_same(found["evaluated"][:2], expected["evaluated"][:2], rtol=1e-6)
        if layout == "tp2":  # with data-parallel ranks, the Trainer counts a repeated row for the missing one
            assert_same(found["evaluated"], expected["evaluated"], rtol=1e-6)
        assert found["samples"] == expected["samples"]


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("saves", "resumes", "changes"),
    [
        ("tp2", "", TIED),
        pytest.param("", "tp2", TIED, marks=EXTENDED),
        pytest.param("dp2,tp2", "tp2", TIED, marks=EXTENDED),
        ("tp2", "dp2,tp2", {"has_adapters": True}),
    ],
)
def test_checkpoints_resume_with_any_mesh(tmp_path: Path, saves: str, resumes: str, changes: dict[str, Any]) -> None:
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2, **changes}
    run(saves, str(tmp_path), **options)
    expected = on_one_process(**options)
    for found in run(resumes, str(tmp_path / "resumed"), resume=str(tmp_path / "checkpoint-2"), **options):
        assert_same(found["weights"], expected["weights"])


@pytest.mark.parametrize(("saves", "resumes"), [("dp2,tp2", "tp2"), pytest.param("tp2", "", marks=EXTENDED)])
def test_accelerate_is_as_on_one_process(tmp_path: Path, saves: str, resumes: str) -> None:
    """Clips by the norm, gathers each row once, saves the unsharded model, and resumes with any mesh."""
    first, second = _accelerated_on_one_process()
    for found in run(saves, str(tmp_path), accelerate, saves=True):
        assert_same(found, first)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model/model.safetensors")
    assert_same(saved, first["weights"])
    for found in run(resumes, str(tmp_path), accelerate, saves=False):
        assert_same(found, second)


@functools.cache
def _accelerated_on_one_process() -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        [first] = run("", folder, accelerate, saves=True)
        [second] = run("", folder, accelerate, saves=False)
    assert len(first["seen"]) == 2 and first["norms"][0] > 0.5
    return first, second


@on_ranks(2)
def test_what_does_not_fit_raises_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = join(rank, "tp2")
    assert mesh is not None
    with pytest.raises(ValueError, match=r"without parameters on the axis 'tp' of the mesh; call weft\.parallelize"):
        prepare_trainer(trainer_on(None, model_on(None), str(tmp_path)), mesh)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
    with pytest.raises(ValueError, match=r"has the axes \('tensor_parallel',\); name them as Accelerate does"):
        prepare_trainer(trainer_on(None, model_on(mesh), str(tmp_path)), other)
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is not sharded over the axes \('dp_shard',\)"):
        prepare_trainer(trainer_on(None, model_on(None), str(tmp_path)), data)
    with pytest.raises(ValueError, match=r"has the ranks \[1, 0\], and Accelerate distributes batches over all ranks"):
        prepare_accelerator(None, DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",)))
