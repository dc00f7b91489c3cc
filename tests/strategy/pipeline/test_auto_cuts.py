"""Automatic cuts of a pipeline: their balance, the memory limit, and the same choice on all ranks."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.pipeline import AutoCuts, Pipeline, Schedule
from weft.strategy.pipeline.auto_cuts import auto_of, num_stages_of
from weft.strategy.pipeline.choose import candidates, choose_cuts

ARGS = LlamaArgs(n_layers=6)


class Net(nn.Module):
    """Registers its norm before the layers, and calls it after them; no stage begins at a layer without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.layers = nn.Sequential()
        for _ in range(4):
            self.layers.extend([nn.Linear(8, 8, dtype=torch.float64), nn.ReLU()])
        self.head = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x)))


def test_stages_begin_at_layers_with_parameters() -> None:
    blocks = [f"layers.{i}" for i in range(6)]
    assert candidates(Llama(ARGS)) == ["tok_embeddings", *blocks, "norm", "output"]
    assert candidates(Net()) == ["norm", *(f"layers.{i}" for i in (0, 2, 4, 6)), "head"]


def test_cuts_balance_parameters_without_embeddings() -> None:
    """If the embedding's parameters counted, the cut would be at layers.1."""
    model = Llama(LlamaArgs(n_layers=6, vocab_size=600))
    model.output = nn.Linear(16, 4)
    choice = choose_cuts(model, 2)
    assert choice.cuts == ("layers.3",) and choice.layer_stages == {}
    assert choice.text == (
        "weft cuts Llama into 2 stages, which begin at its first layer and at 'layers.3': the largest has 50% of the "
        "parameters without embeddings."
    )
    assert choose_cuts(Llama(ARGS), 4).cuts == ("layers.1", "layers.3", "layers.5")
    with deferred_init(0):
        model = Llama(ARGS)
    assert choose_cuts(model, 4).cuts == ("layers.1", "layers.3", "layers.5")


def convolutions() -> nn.Sequential:
    """Return a model whose first layer has few parameters and most of the operations."""
    layers = [nn.Conv2d(3, 8, 3), nn.AvgPool2d(8), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, 16)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_cuts_balance_operations_of_a_forward(device: str) -> None:
    with torch.device(device):
        model = convolutions()
    assert choose_cuts(model, 2).cuts == ("4",)
    state, python_state = torch.get_rng_state(), random.getstate()
    choice = choose_cuts(model, 2, forward=lambda: model(torch.ones(2, 3, 26, 26) * random.random()))
    assert choice.cuts == ("2",) and "of the floating-point operations." in choice.text
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert all(p.grad is None for p in model.parameters())


def test_stages_follow_order_of_calls() -> None:
    model = Net()
    choice = choose_cuts(model, 2, forward=lambda: model(torch.ones(4, 8, dtype=torch.float64)))
    assert choice.cuts == ("layers.4",) and choice.layer_stages == {"norm": 1}


def test_failing_forward_raises_or_is_ignored() -> None:
    model = Llama(ARGS)
    choice = choose_cuts(model, 2, forward=lambda: model(1, 2, 3), forward_may_fail=True)
    assert choice.cuts == choose_cuts(model, 2).cuts
    assert "of the parameters without embeddings (operations were not counted: Llama.forward() takes 2" in choice.text
    with pytest.raises(ValueError, match=r"cannot be run through Llama on fake tensors \(Llama.forward\(\) takes 2 p"):
        choose_cuts(model, 2, forward=lambda: model(1, 2, 3))


def test_stages_stay_within_memory_limit() -> None:
    """The embedding has no operations, but memory for all its rows."""
    model = Llama(LlamaArgs(n_layers=6, vocab_size=1200))
    model.output = nn.Linear(16, 4)
    block = sum(p.nbytes for p in model.layers[0].parameters())
    embedding = model.tok_embeddings.weight.nbytes
    assert choose_cuts(model, 2, state_factor=1, memory_limit=embedding + 2 * block).cuts == ("layers.2",)
    assert choose_cuts(model, 2, state_factor=2, memory_limit=2 * (embedding + block)).cuts == ("layers.1",)
    with pytest.raises(ValueError, match="no cut of 9 layers into 2 stages keeps each within 100 bytes; allow"):
        choose_cuts(model, 2, memory_limit=100)
    choice = choose_cuts(model, 2, memory_limit=100, limit_may_fail=True)
    assert choice.cuts == ("layers.3",) and "; by estimate, no cuts keep each stage within" in choice.text


def test_memory_limit_includes_activations_in_flight() -> None:
    """The first of two stages has two micro-batches in flight; there are few parameters."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    rows, options = 1000, {"state_factor": 1.0, "in_flight": [2, 1]}
    forward = lambda: model(torch.ones(rows, 4))  # noqa: E731
    assert choose_cuts(model, 2, forward=forward, **options).cuts == ("3",)
    limit = 4 * (4 * rows + 16) * 4  # one micro-batch on four layers, or two on two
    assert choose_cuts(model, 2, forward=forward, memory_limit=limit, **options).cuts == ("2",)


def test_too_few_layers_raise() -> None:
    with pytest.raises(ValueError, match="finds no layers with parameters among the modules of a Linear; name the fir"):
        choose_cuts(nn.Linear(2, 2), 2)
    with pytest.raises(
        ValueError, match=r"finds 3 layers with parameters in a Sequential \('0', '2', '4'\) for 4 stages; use fewer st"
    ):
        choose_cuts(convolutions(), 4)


def test_number_of_stages_follows_schedule() -> None:
    assert auto_of("auto") == AutoCuts() and auto_of(["auto"]) is None and auto_of("layers.2") is None
    assert [num_stages_of(AutoCuts(), kind, 4) for kind in ("1f1b", "interleaved", "looped_bfs")] == [4, 8, 8]
    assert num_stages_of(AutoCuts(stages_per_rank=3), "interleaved", 4) == 12
    assert num_stages_of(AutoCuts(), Schedule.generate("looped_bfs", 2, 4, 3), 2) == 6
    with pytest.raises(ValueError, match="stages_per_rank=2 makes 4 stages on 2 ranks, and the schedule has 6; leave"):
        num_stages_of(AutoCuts(stages_per_rank=2), Schedule.generate("looped_bfs", 2, 4, 3), 2)
    with pytest.raises(ValueError, match="1f1b"):
        num_stages_of(AutoCuts(stages_per_rank=2), "1f1b", 2)
    for invalid in ({"stages_per_rank": 0}, {"memory_limit": 1.5}, {"state_factor": 0}):
        with pytest.raises(ValueError, match=f"AutoCuts got {next(iter(invalid))}=.*; pass a .*number from 1 on"):
            AutoCuts(**invalid)


class LogRecorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@on_ranks(2)
def test_pipeline_with_auto_cuts_trains(rank: int, world_size: int) -> None:
    """The example shows that the norm, registered first, is called last; only rank 0 chooses and logs the cuts."""
    mesh = init_device_mesh("cpu", (world_size,))
    recorder, logger = LogRecorder(), logging.getLogger("weft.strategy.pipeline")
    logger.addHandler(recorder)
    level, logger.level = logger.level, logging.INFO
    model, reference = Net(), Net()
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pipeline = Pipeline(model, mesh, AutoCuts(example=x[:3], memory_limit=10**9), num_micro_batches=2)
    logger.removeHandler(recorder)
    logger.setLevel(level)
    assert pipeline.cuts == ("layers.4",) and len(recorder.texts) == (rank == 0)
    loss = pipeline.step(x, lambda micro_batch: model(micro_batch).square().mean())
    expected_loss = reference(x).square().mean()
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
    expected = dict(reference.named_parameters())
    assert {name for name, _ in model.named_parameters()} < set(expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-12)

    several = Pipeline(Llama(ARGS), mesh, "auto", schedule="interleaved")
    assert several.cuts == ("layers.1", "layers.3", "layers.5") and several.stages == (rank, rank + 2)

    by_operations = AutoCuts(example=torch.ones(2, 3, 26, 26))  # only on rank 1, which would choose "2"
    assert Pipeline(convolutions(), mesh, by_operations if rank == 1 else "auto").cuts == ("4",)

    with pytest.raises(ValueError, match="finds 1 layers with parameters in a Sequential"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), mesh, "auto")
    with pytest.raises(ValueError, match="cannot be run through Sequential on fake tensors"):  # rank 0's error
        Pipeline(convolutions(), mesh, AutoCuts(example=torch.ones(2, 3 + rank)))
