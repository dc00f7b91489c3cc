"""Dry runs (`weft estimate --module`) predict what the counter measures on training ranks."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from strategy.dry_run_models import MODELS, TextModel, measured, text_batch
from torch import Tensor, nn

import weft_command
from support.example_modules import EXAMPLES
from support.ranks import on_ranks
from support.warm_starts import SPAWN
from weft.strategy.comparison import launch
from weft.strategy.dry_run import Request, estimate_module
from weft.strategy.dry_run.entry import estimate_all
from weft.strategy.dry_run.staging import GroupStaging

# Predictions equal the counted bytes here, but for a few bytes of step counts; other versions of torch may differ.
PEAK_BOUND = 0.005
Phases = dict[str, dict[str, int]]
CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    1: [
        ("llama", "tp1", {}),
        ("gpt2", "tp1", {"precision": "bf16-true"}),
        ("resnet50", "tp1", {}),
        ("text", "tp1", {"precision": "bf16-mixed", "optimizer_state": "int8", "optimizer_in_backward": True}),
    ],
    2: [
        ("text", "tp2", {}),
        ("text", "dp2", {"precision": "bf16-mixed"}),
        ("llama", "tp2", {"activation_checkpointing": "full", "precision": "bf16-mixed"}),
        ("text", "tp2", {"activation_checkpointing": "selective", "sequence_parallel": True}),
        ("gpt2", "dp2", {"precision": "bf16-mixed", "optimizer_state": "bfloat16", "master_weights": "split"}),
        ("resnet18", "dp2", {"zero_stage": 1}),
        ("ring", "dp2", {}),
        ("ring_masked", "dp2", {}),
        ("moe", "dp2", {}),
        ("text", "tp2", {"optimizer_in_backward": "rows"}),
        ("text", "tp2", {"accumulate_grad_batches": 2}),
        ("text", "dp2", {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        ("text", "cp2", {}),
        ("gpt2", "cp2", {"context_attention": "ulysses", "activation_checkpointing": "full", "zero_stage": 1}),
    ],
    4: [
        ("llama", "dp2,tp2", {"precision": "bf16-mixed", "activation_checkpointing": "full"}),
        ("gpt2", "dp2,tp2", {"activation_checkpointing": "selective"}),
        ("text", "rep2,dp2", {}),
        ("text", "dp2,tp2", {"precision": "bf16-true", "optimizer_in_backward": True}),
        ("llama", "cp2,tp2", {"precision": "bf16-mixed"}),
        ("llama_of_two_heads", "cp4", {"context_attention": "ring_ulysses", "precision": "bf16-mixed"}),
    ],
    8: [("llama", "rep2,dp2,tp2", {"precision": "bf16-mixed", "activation_checkpointing": "full"})],
}


@pytest.fixture(scope="module")
def predictions() -> dict[int, list[Phases]]:
    """Return the phases of each case, from dry runs in one process."""
    cases = [case for group in CASES.values() for case in group]
    found = iter(
        estimate_all([Request(MODELS[name][0], layout, MODELS[name][1], **options) for name, layout, options in cases])
    )
    return {num_ranks: [next(found).phases for _ in group] for num_ranks, group in CASES.items()}


def _check(predicted: Phases, actual: Phases, case: str) -> None:
    for phase, usage in actual.items():
        for category in ("parameters", "optimizer_state"):
            assert predicted[phase][category] == usage[category], (case, phase, category)
    peak, expected = (max(sum(usage.values()) for usage in phases.values()) for phases in (actual, predicted))
    assert abs(expected - peak) <= PEAK_BOUND * peak, (case, actual, predicted)


@on_ranks(1, 2, 4, 8, timeout=400)
def test_peaks_are_those_of_ranks(rank: int, world_size: int, predictions: dict[int, list[Phases]]) -> None:
    for (name, layout, options), predicted in zip(CASES[world_size], predictions[world_size], strict=True):
        actual = measured(rank, world_size, name, layout, **options)
        if rank == 0:
            _check(predicted, actual, f"{name} {layout} {options}")


class TwoOptimizers(TextModel):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters()), torch.optim.SGD(self.parameters())]


class ReadsValues(nn.Module):
    """The shape of its output depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[torch.relu(x).nonzero()[:, 0]].sum()


def rows() -> Tensor:
    return torch.ones(3, 4)


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).sum()


def many_ids() -> Tensor:
    return torch.zeros(1 << 18, dtype=torch.int64)


def test_many_token_ids_have_no_values() -> None:
    """The kernel of a sharded embedding reads their smallest and largest."""
    found = estimate_module(Embeds, "tp2", batch=many_ids, plan={"embed": "vocab_embedding"}, num_steps=1)
    assert found.phases["forward"]["saved_activations"] >= 8 * (1 << 18)


def test_new_interpreters_estimate_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch": text_batch, "num_steps": 1}
    expected = estimate_module(TextModel, "dp2,tp2", **options)
    monkeypatch.setattr(launch, "START_METHOD", SPAWN)
    assert estimate_module(TextModel, "dp2,tp2", **options) == expected


def one_long_row() -> Tensor:
    return many_ids()[None]


def test_many_token_ids_are_sharded() -> None:
    """So many ids have no values."""
    options = {"batch": one_long_row, "num_steps": 1}
    one, half = (estimate_module(Embeds, layout, **options).phases["forward"] for layout in ("tp1", "cp2"))
    assert half["scratch"] <= 0.51 * one["scratch"]  # the embeddings


@pytest.mark.parametrize(
    ("module", "batch", "message"),
    [
        (TwoOptimizers, text_batch, r"TwoOptimizers.configure_optimizers returns a list without exactly one optimizer"),
        (ReadsValues, rows, r"calls aten.nonzero.default, and the shape of its result depends on values"),
    ],
    ids=["two-optimizers", "nonzero"],
)
def test_unsupported_trainings_raise_errors(module: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_module(module, batch=batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "dpauto"}, "the layout 'dpauto' leaves a size to the number of devices"),
        ({"precision": "16-mixed"}, "precision is '16-mixed'; pass one of 32-true, bf16-mixed, bf16-true, 16-true"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing is 'some'; pass one of none, selective, full"),
        ({"master_weights": "split"}, "master_weights is 'split' with precision '32-true', which does not compute"),
        ({"optimizer_in_backward": "all"}, "optimizer_in_backward is 'all'; pass False, True or 'rows'"),
        ({"zero_stage": 4}, "zero_stage is 4; pass 0, 1, 2 or 3"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0; pass a number from 1"),
        (
            {"accumulate_grad_batches": 2, "optimizer_in_backward": "rows"},
            "got accumulate_grad_batches=2 with a pipeline or steps by rows",
        ),
        ({"context_attention": "all"}, "context_attention is 'all'; pass 'ring', 'ulysses' or 'ring_ulysses'"),
        ({"layout": "cp2,tp2", "sequence_parallel": True}, "got sequence_parallel=True for the layout 'cp2,tp2'"),
        ({"rank": 2, "layout": "tp2"}, "rank is 2 for the 2 ranks of the layout 'tp2'; pass a rank of the layout"),
    ],
)
def test_invalid_options_raise_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^estimate: {message}"):
        Request(TextModel, **options)


def _run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", "estimate", *arguments])
    return weft_command.main()


def test_command_estimates_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --batch, the batch is the first of the example's train_dataloader."""
    monkeypatch.chdir(EXAMPLES)
    status = _run_command(monkeypatch, "--module", "02_tensor_parallel_mlp:LitFeedForward", "--layout", "tp2", "--json")
    found = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (found["num_parameters"], found["layout"], found["rank"]) == (3 * 256 * 256, "tp2", 0)
    assert found["unmeasured"] == []
    assert list(found["phases"]) == ["init", "forward", "backward", "step"]
    usage = found["phases"]["step"]
    assert usage["parameters"] == usage["gradients"] == 3 * 256 * 256 * 4 // 2
    assert usage["optimizer_state"] == 2 * usage["parameters"] + 3 * 4
    assert found["peak_bytes"] == max(sum(usage.values()) for usage in found["phases"].values())


def test_command_rejects_options_of_modules_for_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_command(monkeypatch, "--config", "training.yaml", "--zero-stage", "2") == 2
    error = capsys.readouterr().err
    assert error == "weft estimate: --zero-stage is for --module, and --config was given; write it into the file.\n"


def test_staging_alternates_between_buffers() -> None:
    """In a group of two, buffers have 1 MiB; an all-reduce of more uses three of the four halves in turn."""
    staging = GroupStaging(2)
    staging.all_reduce(100)
    assert staging.num_bytes == 4096
    staging.all_reduce(100)
    assert staging.num_bytes == 2 * 4096
    staging.all_reduce(2 << 20)
    assert staging.num_bytes == 3 << 19
    staging.all_reduce(2 << 20)
    assert staging.num_bytes == 2 << 20
