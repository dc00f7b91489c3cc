"""Profiles of layers and stages, the cuts that balance them, and tuning with them."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from support.hugging_face import language_model
from support.models import Llama, LlamaArgs
from weft.strategy.pipeline import (
    LayerProfile,
    LinearTime,
    MeasuredTime,
    Schedule,
    StageProfile,
    balanced_cuts,
    draw_tuning,
    profile_layers,
    profile_stages,
    tune,
    tuning_table,
)
from weft.strategy.pipeline.profile import layer_names


class Slow(nn.Module):
    """A layer whose forward takes `milliseconds`, and whose backward twice as long; it saves its input."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return Sleep.apply(x, self.milliseconds / 1000) * self.scale


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Slow(10)
        self.blocks = nn.Sequential(Slow(10), Slow(40))
        self.last = Slow(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def test_profiling_layers_leaves_model_unchanged():
    model = Model()
    model.first.scale.grad = torch.tensor(7.0)
    profiles = profile_layers(model, torch.ones(2, 3), lambda x: model(x).sum(), repeats=2)
    assert [layer.name for layer in profiles] == ["first", "blocks.0", "blocks.1", "last"]
    for layer, milliseconds in zip(profiles, (10, 10, 40, 10), strict=True):
        assert layer.forward >= milliseconds / 1000
        # The gradient of the model's input belongs to no layer.
        assert layer.backward >= (0 if layer.name == "first" else 2 * milliseconds / 1000)
        assert layer.parameter_bytes == 4 and layer.activation_bytes == 2 * 3 * 4  # the product saves its input
    assert model.first.scale.grad == 7 and model.last.scale.grad is None and model.last.num_calls == 0
    exact = [dataclasses.replace(layer, forward=1.0, backward=2.0) for layer in profiles]
    exact[2] = dataclasses.replace(exact[2], forward=4.0, backward=8.0)
    assert balanced_cuts(exact, 2) == ["blocks.1"]


def test_flops_of_layers_are_counted():
    """A multiply-add counts as two operations; a backward computes the gradients of input and weight."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    profiles = profile_layers(model, torch.ones(16, 8), lambda x: model(x).sum(), measure="flops")
    small, large = 2 * 16 * 32 * 4, 2 * 16 * 8 * 32
    assert [(layer.name, layer.forward, layer.backward) for layer in profiles] == [
        ("0", large, large),  # the gradient of the model's input belongs to no layer
        ("1", 0, 0),
        ("2", small, 2 * small),
    ]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [layer.activation_bytes for layer in profiles] == [16 * 8 * 4, 16 * 32 * 4, 16 * 32 * 4]
    with pytest.raises(ValueError, match="got measure='bytes'; pass 'time' or 'flops'"):
        profile_layers(model, torch.ones(16, 8), lambda x: model(x).sum(), measure="bytes")


def test_balanced_cuts_respect_memory():
    layers = [LayerProfile(name, 1.0, 2.0, 100, 10) for name in "abcdef"]
    assert balanced_cuts(layers, 3) == ["c", "e"]
    schedule = Schedule.generate("1f1b", 3, 8)  # 3, 2 and 1 in flight
    assert balanced_cuts(layers, 3, schedule=schedule, memory_weight=1.0) == ["b", "d"]
    assert balanced_cuts(layers, 3, schedule=schedule, memory_limit=500) == ["b", "d"]
    with pytest.raises(ValueError, match="no cut of 6 layers into 3 stages keeps each within 100 bytes"):
        balanced_cuts(layers, 3, schedule=schedule, memory_limit=100)


def test_layer_names_of_models():
    assert layer_names(Llama(LlamaArgs())) == ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    pytest.importorskip("transformers")
    names = layer_names(language_model("llama"))
    assert names == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]


def test_models_without_layer_chain_raise():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="which do not form a chain"):
        profile_layers(model, torch.ones(2, 2), lambda x: model(model(x)).sum())
    with pytest.raises(ValueError, match="a step called none of the layers"):
        profile_layers(model, torch.ones(2, 2), lambda x: (model[0].weight * x).sum())


def test_stages_are_measured_at_several_sizes():
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 1))
    stages = profile_stages(model, torch.ones(16, 8), lambda x: model(x).sum(), ["1"], repeats=1)
    assert len(stages) == 2 and all(stage.forward.at(16) > 0 for stage in stages)
    for stage in stages:
        for time_of in (stage.forward, stage.backward_input, stage.backward_weight):
            assert isinstance(time_of, MeasuredTime)
            assert time_of.at(1) == time_of.at(2)  # the smallest measured size is an eighth of the batch
    assert stages[0].parameter_bytes == 4 * 4 * (8 * 64 + 64)
    assert stages[0].activation_bytes_per_sample == 8 * 4  # the input
    with pytest.raises(ValueError, match="the cut '9' is not a measured layer"):
        profile_stages(model, torch.ones(16, 8), lambda x: model(x).sum(), ["9"], repeats=1)
    assert tune(stages, batch_size=16, num_ranks=2)[0].makespan > 0


def test_tuning_table_and_curve_show_all_points(tmp_path, monkeypatch):
    line = LinearTime(0.5, 1)
    stage = StageProfile(forward=line, backward_input=line, backward_weight=line, activation_bytes_per_sample=10)
    points = tune([stage] * 2, batch_size=8, num_ranks=2, memory_limit=50)
    table = tuning_table(points).splitlines()
    even = tune([stage] * 2, batch_size=8, num_ranks=2, tapers=False)
    assert len(table) == 1 + len(points) > 1 + len(even) == 1 + 6 * 4
    assert table[1].split()[:2] == [points[0].kind, str(points[0].num_micro_batches)] and "too many" in table[-1]
    svg = draw_tuning(points, path=tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text() == svg == draw_tuning(points)
    texts = {element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")}
    assert {"gpipe", "zero_bubble", "zero_bubble, tapered", "micro-batches", "8"} <= texts
    assert table[0].split()[-1] == "samples" and any("2 x 4" in line for line in table)
    with pytest.raises(ValueError, match="there are no points"):
        draw_tuning([])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="draw_tuning needs matplotlib"):
        draw_tuning(points)
