"""Dry runs of pipelines predict, for the ranks of all stages, what the counter measures on training ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from strategy.dry_run_models import MODELS, TextModel, measured, text_batch

import weft_command
from support.extended import extended_unless, selected
from support.ranks import on_ranks
from weft.strategy.dry_run import Request, estimate_module
from weft.strategy.dry_run.entry import estimate_all
from weft.strategy.dry_run.messages import SentMessages
from weft.strategy.dry_run.staging import GroupStaging

# How many messages are in flight at a peak depends on the speeds of the ranks.
PEAK_BOUND = 0.02
Phases = dict[str, dict[str, int]]
TEXT, LLAMA, GPT2 = ["layers.2"], ["model.layers.2"], ["transformer.h.2"]
Case = tuple[str, str, dict[str, Any]]
# "more": cases that combine options of the first ones.
CASES: dict[str, dict[int, list[Case]]] = {
    "first": {
        2: [
            ("long text", "pp2", {"pipeline_cuts": ["layers.1"], "num_micro_batches": 8}),
            ("text", "pp2", {"pipeline_cuts": ["layers.1", "layers.2", "norm"], "pipeline_schedule": "zbv"}),
            ("llama", "pp2", {"pipeline_cuts": LLAMA, "pipeline_schedule": "zero_bubble", "precision": "bf16-mixed"}),
            ("gpt2", "pp2", {"pipeline_cuts": GPT2, "precision": "bf16-true", "optimizer_in_backward": True}),
        ],
        4: [
            ("text", "pp2,tp2", {"pipeline_cuts": TEXT, "sequence_parallel": True}),
            ("gpt2", "pp2,dp2", {"pipeline_cuts": GPT2, "zero_stage": 0}),
            ("text", "pp2,cp2", {"pipeline_cuts": TEXT}),
        ],
    },
    "more": {
        2: [
            ("text", "pp2", {"pipeline_cuts": ["layers.1", "layers.2", "norm"], "pipeline_schedule": "interleaved"}),
            (
                "llama",
                "pp2",
                {"pipeline_cuts": LLAMA, "pipeline_schedule": "gpipe", "activation_checkpointing": "full"},
            ),
            ("resnet18", "pp2", {"pipeline_cuts": ["layer3"]}),
        ],
        4: [
            ("text", "pp2,dp2", {"pipeline_cuts": TEXT}),
            ("long text", "pp4", {"pipeline_cuts": ["layers.1", "layers.2", "norm"]}),
        ],
    },
}
Predictions = dict[tuple[str, int], list[dict[int, Phases]]]


@pytest.fixture(scope="module")
def predictions(request: pytest.FixtureRequest) -> Predictions:
    """Return the phases of each selected case by the rank, from dry runs in one process."""
    groups = {(kind, size): cases for kind in selected(request, "kind") for size, cases in CASES[kind].items()}
    requests = [
        Request(MODELS[name][0], layout, MODELS[name][1], **options)
        for cases in groups.values()
        for name, layout, options in cases
    ]
    found = iter(estimate_all(requests))
    return {
        key: [{each.rank: each.phases for each in next(found).ranks} for _ in cases] for key, cases in groups.items()
    }


@on_ranks(2, 4, timeout=400)
@pytest.mark.parametrize("kind", extended_unless("first".__eq__, CASES))
def test_peaks_are_those_of_stages(rank: int, world_size: int, kind: str, predictions: Predictions) -> None:
    cases = CASES[kind][world_size]
    for (name, layout, options), predicted in zip(cases, predictions[kind, world_size], strict=True):
        assert list(predicted) == list(range(0, world_size, 1 if layout == f"pp{world_size}" else 2))
        actual = measured(rank, world_size, name, layout, **options)
        if rank in predicted:
            _check(predicted[rank], actual, f"{name} {layout} {options} rank {rank}")


def _check(predicted: Phases, actual: Phases, case: str) -> None:
    for phase, usage in actual.items():
        for category in ("parameters", "optimizer_state"):
            assert predicted[phase][category] == usage[category], (case, phase, category)
    assert predicted["step"]["gradients"] == actual["step"]["gradients"], case
    peak, expected = (max(sum(usage.values()) for usage in phases.values()) for phases in (actual, predicted))
    assert abs(expected - peak) <= PEAK_BOUND * peak, (case, actual, predicted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_cuts": "layers.9"}, r"got pipeline_cuts=\['layers.9'\], and TextModel has no module 'layers.9'"),
        ({"pipeline_cuts": "layers.1,layers.2"}, "2 cuts make 3 stages for 2 ranks"),
        ({"pipeline_module": "net"}, "got pipeline_module='net', which TextModel does not have"),
    ],
    ids=["unknown-cut", "number-of-stages", "unknown-module"],
)
def test_options_that_do_not_fit_the_model_raise_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_module(TextModel, "pp2", batch=text_batch, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_cuts": "auto", "layout": "tp2"}, "got pipeline_cuts for the layout 'tp2', which has no pipeline"),
        ({"pipeline_schedule": "2f2b"}, "pipeline_schedule is '2f2b'; pass one of naive, gpipe, 1f1b, "),
        ({"optimizer_in_backward": "rows"}, "optimizer_in_backward is 'rows' with the pipeline of the layout 'pp2'"),
        ({"layout": "pp2,tp2", "rank": 4}, "rank is 4 for the 4 ranks of the layout 'pp2,tp2'"),
    ],
)
def test_invalid_options_raise_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^estimate: {message}"):
        Request(TextModel, **{"layout": "pp2", **options})


def test_command_prints_each_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --pipeline-cuts, weft chooses the cuts."""
    module, batch = "strategy.dry_run_models:TextModel", "strategy.dry_run_models:text_batch"
    arguments = ["--module", module, "--batch", batch, "--layout", "pp2,tp2", "--num-micro-batches", "2"]
    monkeypatch.setattr(sys, "argv", ["weft", "estimate", *arguments])
    assert weft_command.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("layout pp2,tp2; MB = 1e6 bytes")
    assert lines[1] == "later stages begin at layers.2"
    assert [line.partition(":")[0] for line in lines if line.startswith("rank")] == [
        "rank 0, stage 0",
        "rank 2, stage 1",
    ]


def test_one_rank_of_a_stage_can_be_asked_for() -> None:
    found = estimate_module(TextModel, "pp2,tp2", batch=text_batch, pipeline_cuts=TEXT, rank=3, num_steps=1)
    assert [(each.rank, each.stages) for each in found.ranks] == [(3, (1,))]
    assert found.cuts == ("layers.2",)


def test_messages_pass_through_a_ring_of_each_peer() -> None:
    """In a group of two, a ring has 256 KiB, besides its header."""
    staging = GroupStaging(2)
    staging.receive(100, peer=1)
    assert staging.num_bytes == 0
    staging.receive(1 << 20, peer=1)
    assert staging.num_bytes == 4096
    staging.send(3000, peer=1)
    assert staging.num_bytes == 4096
    staging.send(1 << 20, peer=1)
    assert staging.num_bytes == (256 << 10) + 4096


def test_messages_are_in_flight_until_the_next_on_their_channel() -> None:
    sent = SentMessages()
    header, first, second, other = (torch.empty(size) for size in (1, 2, 3, 4))
    channel, other_channel = 1 << 18, 2 << 18
    sent.add("group", 1, channel, [header])
    sent.add("group", 1, channel, [first])
    sent.add("group", 1, other_channel, [other])
    assert list(map(len, sent.in_flight())) == [1, 2, 4]
    sent.add("group", 1, channel + 1, [second])
    assert list(map(len, sent.in_flight())) == [3, 4]
    sent.complete()
    assert sent.in_flight() == []
