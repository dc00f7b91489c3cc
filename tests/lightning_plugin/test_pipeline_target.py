"""find_target returns the module to divide into stages and its cuts, with or without a prefix or pipeline_module."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from weft.strategy.pipeline.target import PipelineTarget, find_target


class Net(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Module(L.LightningModule):
    """A LightningModule with these children, and without a forward of its own."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class Network(Module):
    """A LightningModule with these children, which its own forward calls in order."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


AUTO = None
# Case -> (LightningModule, pipeline_module, pipeline_cuts, name of the target, cuts relative to the target).
# A holder is a child that contains all cuts, or layers for all stages; "itself" is the LightningModule.
EXPECTED: dict[str, tuple[L.LightningModule, str | None, Any, str, Any]] = {
    "given": (Module(model=Net(), head=linear()), "model", ["layers.2"], "model", ["layers.2"]),
    "given, prefix": (Module(model=Net()), "model", ["model.layers.1", "layers.2"], "model", ["layers.1", "layers.2"]),
    "given, deeper": (Module(a=nn.Sequential(Net())), "a.0", ["a.0.layers.2"], "a.0", ["layers.2"]),
    "given, a name like the prefix": (
        Module(model=nn.Sequential(linear(), nn.ModuleDict({"model": Net()}))),
        "model",
        ["1.model"],
        "model",
        ["1.model"],
    ),
    "itself, given": (Network(embed=linear(), blocks=blocks()), "", ["blocks.2"], "", ["blocks.2"]),
    "itself, auto": (Network(embed=linear(), blocks=blocks()), "", AUTO, "", AUTO),
    "the only holder": (
        Module(model=Net(), head=linear(), loss=nn.MSELoss()),
        None,
        ["layers.2"],
        "model",
        ["layers.2"],
    ),
    "the only holder, prefix": (Module(model=Net(), head=linear()), None, ["model.layers.2"], "model", ["layers.2"]),
    "a holder that a forward wraps": (
        Network(model=Net(), head=linear()),
        None,
        ["model.layers.2"],
        "model",
        ["layers.2"],
    ),
    "no holder, so itself": (Network(a=blocks(), b=blocks()), None, ["a.2", "b", "b.2"], "", ["a.2", "b", "b.2"]),
    "layers before the holder, so itself": (
        Network(embed=linear(), blocks=blocks(), head=linear()),
        None,
        ["blocks.2"],
        "",
        ["blocks.2"],
    ),
    "layers before the holder and no forward": (
        Module(embed=linear(), blocks=blocks()),
        None,
        ["blocks.2"],
        "blocks",
        ["2"],
    ),
    "lists call nothing, so itself": (
        Network(layers=nn.ModuleList([linear(), linear()])),
        None,
        ["layers.1"],
        "",
        ["layers.1"],
    ),
    "auto": (Module(model=Net(), head=linear()), None, AUTO, "model", AUTO),
    "auto, wrapped": (Network(model=Net(), loss=nn.MSELoss()), None, AUTO, "model", AUTO),
    "auto, itself": (Network(embed=linear(), blocks=blocks(), head=linear()), None, AUTO, "", AUTO),
    "auto, itself of two": (Network(a=blocks(), b=blocks()), None, AUTO, "", AUTO),
    "auto, with too few layers, for which choose_cuts raises": (Module(model=Net(1)), None, AUTO, "model", AUTO),
    "one stage": (Module(model=Net(), loss=nn.MSELoss()), None, [], "model", []),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_module_and_cuts_are_found(case: str) -> None:
    module, given, cuts, name, relative = EXPECTED[case]
    expected = PipelineTarget(name, None if relative is None else tuple(relative))
    assert find_target("S", module, given, cuts, num_stages=2) == expected


ERRORS: dict[str, tuple[L.LightningModule, str | None, Any, str]] = {
    "two holders": (
        Module(student=Net(), teacher=Net()),
        None,
        ["layers.2"],
        "S got pipeline_cuts=['layers.2'], which may be in 'student' and in 'teacher'; pass one of these as ",
    ),
    "itself or a holder": (
        Network(layers=nn.ModuleList([linear(), linear()]), teacher=Net()),
        None,
        ["layers.1"],
        "may be in Network itself (pipeline_module='') and in 'teacher'; pass one of these",
    ),
    "auto, two holders": (
        Module(a=Net(), b=Net()),
        None,
        AUTO,
        "S got pipeline_cuts='auto', which may be in 'a' and in 'b'; pass one of these as pipeline_module.",
    ),
    "auto, none": (
        Module(a=linear(), b=linear()),
        None,
        AUTO,
        "no module of Module has a forward of its own and as many",
    ),
    "unknown": (
        Module(model=Net()),
        None,
        ["layers.1", "model.layer.2"],
        "and Module has no module 'model.layer.2'; the nearest name is 'model.layers.2'.",
    ),
    "known, but of two": (
        Module(a=Net(1), b=Net()),
        None,
        ["a.layers.0", "b.layers.2"],
        "neither a forward of Module itself nor that of one of its modules calls all of these; pass the name",
    ),
    "given, unknown cut": (Module(model=Net()), "model", ["model.layer.2"], "the nearest name is 'layers.2'"),
    "given, unknown module": (Module(model=Net()), "net", ["layers.2"], "='net', which Module does not have; name one"),
    "no forward": (
        Module(model=Net()),
        "",
        ["model.layers.2"],
        "S is to divide Module itself, which has no forward of its",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_ambiguous_and_unknown_modules_raise(case: str) -> None:
    module, given, cuts, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        find_target("S", module, given, cuts, num_stages=2)


def test_second_run_finds_staged_module() -> None:
    module = Module(model=Net(), other=Net())
    module.other.__dict__["_weft_staged"] = object()
    assert find_target("S", module, None, ["layers.2"], num_stages=2) == PipelineTarget("other", ("layers.2",))
