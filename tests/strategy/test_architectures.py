"""plan="auto" on architectures of transformers, timm and torchvision: the sharded model equals the unsharded one."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from strategy.architecture_runs import Run, all_runs, compare_gradients, compare_outputs
from torch import nn

from support.architectures import ARCHITECTURES

DOCS = Path(__file__).resolve().parents[2] / "docs"


@functools.cache
def runs() -> list[Run]:
    return all_runs()


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_verification", DOCS / "generate_verification.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_architecture_equals_its_unsharded_self() -> None:
    assert [run.name for run in runs()] == [architecture.name for architecture in ARCHITECTURES]
    bad = [str(run) for run in runs() if run.result != "equal"]
    assert not bad, f"{len(bad)} of {len(runs())}:\n" + "\n".join(bad)


def test_each_architecture_is_sharded() -> None:
    """A small model has more of its bytes in norms, biases and positions, which are replicated, than a large one."""
    bad = [f"{run.name}: {run.share:.2f} of the bytes" for run in runs() if not 0.5 <= run.share <= 0.66]
    assert not bad, "\n".join(bad)


def test_the_table_of_the_page_is_current() -> None:
    page = generator()
    written = [row[:-1] for row in page.written_rows(page.PAGE.read_text())]
    assert written == [row[:-1] for row in page.rows(runs())], "run `make docs`"


def test_a_difference_is_found() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    outputs = [model(x) for model in (ours, theirs)]
    for each in outputs:
        each.sum().backward()
    run = Run("a linear layer")
    compare_outputs(outputs[:1], outputs[1:], run)
    compare_gradients(ours, theirs, run)
    assert (run.result, run.difference) == ("equal", 0)
    ours.bias.grad[0] += 1e-7
    compare_gradients(ours, theirs, run)
    assert run.result == "wrong" and "gradient of bias" in run.details[0]
    run = Run("a linear layer")
    compare_outputs([outputs[0] + 1e-7], outputs[1:], run)
    assert run.result == "wrong" and "output 0" in run.details[0]
