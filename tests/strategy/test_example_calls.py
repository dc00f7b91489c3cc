"""Verification calls the model with the given example, and reports if it cannot."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import weft
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class ByDims(Mlp):
    """Its activation depends on the number of dims of x."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(F.gelu(hidden) if x.ndim == 2 else F.relu(hidden))


class Scaled(Mlp):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(scale * F.relu(self.up(x)))


class Storing(Mlp):
    """Stores its hidden units in an attribute, for code outside."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = F.relu(self.up(x))
        return self.down(self.hidden)


class Calling(nn.Module):
    def __init__(self, mlp: nn.Module, *args: float) -> None:
        super().__init__()
        self.mlp, self.args = mlp, args

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, *self.args)


class ReadingHidden(Calling):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.mlp.hidden.mean()


class WithoutForward(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Calling(Mlp())


def test_fused_mlp_is_compared_on_example() -> None:
    model = Calling(ByDims())
    assert Plan("auto").assign(model, 2).styles["mlp"].style == "column_row_mlp"
    styles = Plan("auto", example=torch.randn(3, 8)).assign(model, 2).styles
    assert "mlp" not in styles and (styles["mlp.up"].style, styles["mlp.down"].style) == ("column", "row")


def test_mlp_with_more_arguments_is_not_fused() -> None:
    styles = Plan("auto").assign(Calling(Scaled(), 2.0), 2).styles
    assert "mlp" not in styles and (styles["mlp.up"].style, styles["mlp.down"].style) == ("column", "row")
    assert Plan("auto").assign(Calling(Scaled()), 2).styles["mlp"].style == "column_row_mlp"


def test_example_that_cannot_be_called_raises() -> None:
    with pytest.raises(ValueError, match=r"WithoutForward cannot be called with the example \(NotImplemented.*; give"):
        Plan("auto", example=torch.randn(3, 8)).assign(WithoutForward(), 2)
    with pytest.raises(ValueError, match=r"Calling cannot be called with the example \(ValueError"):
        Plan("auto", example=torch.randn(3, 7)).assign(Calling(Mlp()), 2)


def test_unused_example_input_array_is_named() -> None:
    module = WithoutForward()
    assert not Plan("auto").assign(module, 2).warnings()
    module.example_input_array = torch.randn(3, 8)
    [sentence] = Plan("auto").assign(module, 2).warnings()
    assert sentence.startswith("the example_input_array is not used, because WithoutForward cannot be called with it (")


@on_ranks(2)
@pytest.mark.parametrize("plan", ["auto", {"mlp": "column_row_mlp"}])
def test_attribute_of_mlp_is_full_or_raises(world_size: int, plan: str | dict[str, str]) -> None:
    """A fused operator would not set the attribute, and column and row layers would keep a shard in it."""
    torch.manual_seed(0)
    model = ReadingHidden(Storing()).double()
    reference, x = copy.deepcopy(model), torch.randn(3, 8, dtype=torch.float64)
    mesh = tensor_parallel(world_size)
    if plan != "auto":
        with pytest.raises(ValueError, match="keeps a tensor in the attribute 'hidden'; use column_gather_output"):
            weft.parallelize(model, mesh, plan)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weft.parallelize(model, mesh, plan)
    assert model.mlp.up.weight.to_local().shape == (8, 8)
    torch.testing.assert_close(model(x), reference(x))


class StoringInDict(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.stored["hidden"] = F.relu(self.up(x))
        return self.down(self.stored["hidden"])


class StoringInList(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.stored: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        self.stored.append(hidden.mean())
        return self.down(hidden)


@pytest.mark.parametrize("module", [Storing, StoringInDict, StoringInList])
def test_stored_tensors_are_reported(module: type[nn.Module]) -> None:
    """Code outside of the model may read them, so a plan warns; with verify="always", they are full."""
    model = Calling(module())
    assignments = Plan("auto").assign(model, 2)
    [sentence] = assignments.warnings()
    assert "mlp" not in assignments.styles and "keeps tensors in attributes" in sentence
    assignments = Plan("auto", verify="always").assign(model, 2)
    assert assignments.styles["mlp.up"].style == "column_gather_output"
    assert not any(isinstance(value, Tensor) for value in vars(model.mlp).values()), "the user's module is unchanged"
    assert not getattr(model.mlp, "stored", None)
