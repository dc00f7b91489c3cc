"""plan="auto" on architectures of transformers, timm and torchvision: the sharded model equals the unsharded one."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from strategy.architecture_runs import WORLD_SIZE, Run, all_runs, compare_gradients, compare_outputs, run
from torch import nn

from support.architectures import ARCHITECTURES
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan

DOCS = Path(__file__).resolve().parents[2] / "docs"


@functools.cache
def runs() -> list[Run]:
    return all_runs()


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_verification", DOCS / "generate_verification.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_architecture_matches_unsharded() -> None:
    assert [run.name for run in runs()] == [architecture.name for architecture in ARCHITECTURES]
    failures = [str(run) for run in runs() if run.result != "equal"]
    assert not failures, f"{len(failures)} of {len(runs())}:\n" + "\n".join(failures)


def test_each_architecture_is_sharded() -> None:
    """A small model has more of its bytes in norms, biases and positions, which are replicated, than a large one."""
    failures = [f"{run.name}: {run.share:.2f} of the bytes" for run in runs() if not 0.5 <= run.share <= 0.66]
    assert not failures, "\n".join(failures)


def test_table_is_up_to_date() -> None:
    page = generator()
    written = [row[:-1] for row in page.written_rows(page.PAGE.read_text())]
    assert written == [row[:-1] for row in page.rows(runs())], "run `make docs`"


@on_ranks(WORLD_SIZE)
def test_wrong_shard_is_detected(world_size: int) -> None:
    """Without verification, Bloom computes position biases for all heads; a shard of its attention has half of them."""
    (bloom,) = (each for each in ARCHITECTURES if each.name == "Bloom")
    found = run(bloom, tensor_parallel(world_size), Plan("auto", verify="never"))
    assert found.result == "wrong" and found.details[0].startswith("output 0 differs"), found


def test_difference_is_detected() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    outputs = [model(x) for model in (ours, theirs)]
    for each in outputs:
        each.sum().backward()
    result = Run("a linear layer")
    compare_outputs(outputs[:1], outputs[1:], result)
    compare_gradients(ours, theirs, result)
    assert (result.result, result.difference) == ("equal", 0)
    ours.bias.grad[0] += 1e-7
    compare_gradients(ours, theirs, result)
    assert result.result == "wrong" and "gradient of bias" in result.details[0]
    result = Run("a linear layer")
    compare_outputs([outputs[0] + 1e-7], outputs[1:], result)
    assert result.result == "wrong" and "output 0" in result.details[0]
