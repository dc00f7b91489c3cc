"""When column_row_mlp becomes one operator, when it becomes column and row layers, and when it raises ValueError."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from support.models import FeedForward, Gpt2Mlp
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy import report
from weft.strategy.recognition import mlp_layers, probe


class Mlp(nn.Module):
    def __init__(self, activation=F.relu, names: tuple[str, str] = ("fc1", "fc2"), bias: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.names = names
        self.add_module(names[0], nn.Linear(8, 12, bias=bias))
        self.add_module(names[1], nn.Linear(12, 8, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self._modules[name] for name in self.names)
        return second(self.activation(first(x)))


class Gated(FeedForward):
    def __init__(self, activation=F.silu, swapped: bool = False) -> None:
        super().__init__(8, 12)
        self.activation, self.swapped = activation, swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        return self.w2(gate * self.activation(up) if self.swapped else self.activation(gate) * up)


class Dropping(Mlp):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class NormBetween(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.normalize(F.relu(self.fc1(x)), dim=-1))


class ClampBetween(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)).clamp(max=7.0))


class DifferentInTraining(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(F.relu(self.fc1(x)))
        return y + 0.1 if self.training else y


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (Mlp(F.relu), "relu"),
        (Mlp(F.gelu, bias=False), "gelu"),
        (Mlp(tanh_gelu, ("c_fc", "c_proj")), "gelu_tanh"),
        (Mlp(F.silu, ("one", "two")), "silu"),
        (Gated(), "silu"),
        (Gated(F.gelu), "gelu"),
        (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.0), nn.Linear(12, 4)), "gelu"),
    ],
    ids=["relu", "gelu", "gelu_tanh", "by shape", "swiglu", "geglu", "sequential"],
)
def test_activation_is_detected(module: nn.Module, activation: str) -> None:
    parts = mlp_layers.find(module)
    assert probe.why_not_fused(module, parts) is None
    assert probe.find_activation(module, parts) == (parts, activation)


def test_missing_child_of_a_sequential_is_skipped() -> None:
    module = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    module.register_module("3", None)
    parts = mlp_layers.find(module)
    assert (parts.gate, parts.up, parts.down) == (None, "0", "2")


def test_gate_and_up_are_distinguished() -> None:
    module = Gated(swapped=True)
    parts, activation = probe.find_activation(module, mlp_layers.find(module))
    assert (parts.gate, parts.up, activation) == ("w3", "w1", "silu")


def test_probe_has_no_side_effects() -> None:
    module = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    calls = []
    module.register_forward_hook(lambda *args: calls.append(args))
    module.register_buffer("seen", torch.ones(3))
    module.train()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert probe.find_activation(module, mlp_layers.find(module))[1] == "relu"
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls and module.training and all(p.grad is None for p in module.parameters())
    assert type(module._modules["0"]) is nn.Linear


def lora_like() -> nn.Module:
    module = Mlp()
    module.fc1 = nn.Sequential(module.fc1)
    return module


def hooked() -> nn.Module:
    module = Mlp()
    module.fc1.register_forward_hook(lambda module, args, output: output * 2)
    return module


def backward_hooked() -> nn.Module:
    module = Mlp()
    module.fc2.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    return module


NOT_FUSED = {
    "dropout": (lambda: Dropping(0.1), "'dropout' is a Dropout with p=0.1"),
    "hook": (hooked, "'fc1' cannot be fused: it has hooks"),
    "backward hook": (backward_hooked, "'fc2' cannot be fused: it has hooks"),
    "clamp": (ClampBetween, "agrees with none of the activations"),
    "tanh": (lambda: Mlp(torch.tanh), "agrees with none of the activations"),
    "training": (DifferentInTraining, "agrees with none of the activations"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", list(NOT_FUSED))
def test_unfused_mlps_get_column_and_row_with_reason(world_size: int, case: str) -> None:
    make, reason = NOT_FUSED[case]
    model = make()
    model.eval() if case == "dropout" else model.train()
    x = torch.randn(3, 8)
    expected = model(x).detach()
    weft.parallelize(model, tensor_parallel(world_size), {"": "column_row_mlp"})
    rows = {row.parameter: row for row in report(model).rows}
    assert rows["fc1.weight"].style == "column" and rows["fc2.weight"].style == "row"
    assert reason in rows["fc1.weight"].note
    torch.testing.assert_close(model(x), expected)


ERRORS = {
    "norm": (NormBetween, "does not compute each hidden unit from that unit alone"),
    "parametrized": (
        lambda: (m := Mlp(), nn.utils.parametrizations.weight_norm(m.fc1))[0],
        "finds no MLP",
    ),
    "adapter": (lora_like, "finds no MLP"),
    "own forward": (lambda: (m := Mlp(), setattr(m, "fc1", Doubling(8, 12)))[0], "finds no MLP"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", list(ERRORS))
def test_unsplittable_mlps_raise(world_size: int, case: str) -> None:
    make, reason = ERRORS[case]
    with pytest.raises(ValueError, match=reason):
        weft.parallelize(make(), tensor_parallel(world_size), {"": "column_row_mlp"})


@on_ranks(2)
def test_auto_gathers_unsplittable_mlps_with_reason(world_size: int) -> None:
    model = nn.ModuleDict({"good": Mlp(), "norm": NormBetween(), "doubling": Mlp()})
    model["doubling"].fc1 = Doubling(8, 12)
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    notes = "\n".join(report(model).notes)
    assert "'norm': its weights are sharded and its activations gathered: " in notes
    styles = {row.parameter: row.style for row in report(model).rows}
    assert styles["good.fc1.weight"] == "column_row_mlp"
    assert styles["norm.fc1.weight"] == "column_gather_output" and styles["norm.fc2.weight"] == "row_split_input"
    assert styles["doubling.fc1.weight"] == "replicate"


@on_ranks(2)
def test_hook_added_later_is_called(world_size: int) -> None:
    model = Mlp()
    x = torch.randn(3, 8)
    weft.parallelize(model, tensor_parallel(world_size), {"": "column_row_mlp"})
    expected = model(x)
    seen = []
    model.fc1.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(model(x), expected)
    assert seen == [(3, 6)]


@on_ranks(2)
def test_input_may_be_a_keyword_argument(world_size: int) -> None:
    model = weft.parallelize(Mlp(), tensor_parallel(world_size), {"": "column_row_mlp"})
    x = torch.randn(3, 8)
    assert torch.equal(model(x=x), model(x))
    with pytest.raises(TypeError, match="takes one tensor"):
        model(x, x)


@on_ranks(2)
def test_zero_dropout_inside_gpt2_is_fused(world_size: int) -> None:
    model = Gpt2Mlp(8, nn.Linear, torch.float32, dropout=0.0)
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    assert {row.style for row in report(model).rows} == {"column_row_mlp"}


class Configured(Mlp):
    """Its forward reads a number, a flag that hides code, and the attributes of an activation module."""

    scale, normalizes = 1.0, False

    def __init__(self) -> None:
        super().__init__()
        self.act, self.mask, self.offsets = nn.ReLU(), None, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        if self.normalizes:
            hidden = F.normalize(hidden, dim=-1)
        if self.mask is not None:
            hidden = hidden * self.mask
        return self.fc2(hidden) * self.scale * getattr(self, "factor", 1.0) + self.offsets[0]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("scale", 2.0, "attribute 'scale' is 2.0, but was 1.0"),
        ("normalizes", True, "attribute 'normalizes' is True, but was False"),
        ("factor", 3.0, "attribute 'factor' is 3.0, but was 'no value'"),
        ("act", nn.GELU(), "attribute 'act' is <class 'torch.nn.modules.activation.GELU'>, but was"),
        ("mask", torch.zeros(6), "attribute 'mask' is <class 'torch.Tensor'>, but was None"),
        ("offsets", [1.0], r"attribute 'offsets' is \[1.0\], but was \[0.0\]"),
    ],
)
def test_changed_attribute_of_fused_mlp_raises(world_size: int, name: str, value: object, text: str) -> None:
    model, x = nn.Sequential(Configured()), torch.randn(3, 8)
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    assert report(model).rows[0].style == "column_row_mlp"
    y, before = model(x), dict(vars(model[0]))
    setattr(model[0], name, value)
    with pytest.raises(ValueError, match=f"'0', a Configured, is a fused MLP and its {text}"):
        model(x)
    vars(model[0]).pop(name, None)
    vars(model[0]).update(before)
    if name == "act":
        model[0].act = nn.ReLU()
    torch.testing.assert_close(copy.deepcopy(model)(x), y)


@on_ranks(2)
def test_changed_list_of_fused_mlp_raises(world_size: int) -> None:
    model = nn.Sequential(Configured())
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    model[0].offsets[0] = 1.0
    with pytest.raises(ValueError, match=r"attribute 'offsets' is \[1.0\], but was \[0.0\]"):
        model(torch.randn(3, 8))


class ReadingBuffer(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Counting(Mlp):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ReadingBuffer, "reads the buffer 'scale', whose values may change"),
        (Counting, "changes the attribute 'num_calls'"),
    ],
)
def test_forwards_with_state_are_not_fused(module: type[nn.Module], reason: str) -> None:
    assignment = weft.strategy.Plan("auto").assign(nn.Sequential(module()), 2).styles["0.fc1"]
    assert assignment.style == "column" and reason in assignment.note


class DroppingFunction(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.2, self.training))


class DifferentInTrainMode(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(x))
        return self.fc2(hidden * hidden.shape[-1] if self.training else hidden)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (DroppingFunction, "it draws random numbers in train mode; for all heads, as F.dropout does"),
        (DifferentInTrainMode, "the input of 'fc2' differs by .* of its norm in train mode"),
    ],
)
def test_code_of_train_mode_is_compared(module: type[nn.Module], reason: str) -> None:
    found = weft.strategy.Plan("auto").assign(nn.Sequential(module()), 2)
    assert found.styles["0.fc1"].style == "column_gather_output"
    [sentence] = found.warnings()
    assert re.search(reason, sentence)


@on_ranks(2)
def test_dropout_between_layers_takes_any_number_of_dims(world_size: int) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.GELU(), nn.Linear(12, 8)).double()
    reference = copy.deepcopy(model)
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    assert [row.style for row in report(model).rows] == ["column", "column", "row", "row"]
    for shape in ((4, 8), (2, 3, 8), (8,)):
        x = torch.randn(shape, dtype=torch.float64)
        state = torch.get_rng_state()
        y = model(x)
        torch.set_rng_state(state)
        torch.testing.assert_close(y, reference(x))


@on_ranks(2)
def test_slice_of_fused_sequential_matches_unsharded(world_size: int) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    reference, x = copy.deepcopy(model), torch.randn(3, 8, dtype=torch.float64)
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    assert report(model).rows[0].rule == "auto" and type(model[0]).__name__ == "WeftLinear"
    torch.testing.assert_close(model[:2](x), reference[:2](x))
    torch.testing.assert_close(model(x), reference(x))
