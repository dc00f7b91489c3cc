"""Models with blocks of MLPs, and functions that train them, for the tests of row-wise optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import weft
from support.models import Conv1D
from weft.strategy import StepInBackward

DIM, HIDDEN = 12, 37  # the shards of 37 features are uneven
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "sgd": lambda p: SGD(p, lr=0.05),
}
FUSED = {"blocks.*.mlp": "column_row_mlp"}


class Mlp(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "transposed":
            self.c_fc, self.c_proj = Conv1D(HIDDEN, DIM), Conv1D(DIM, HIDDEN)
        else:
            has_bias = kind != "gated"
            self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN, has_bias), nn.Linear(HIDDEN, DIM, has_bias)
            if kind == "gated":
                self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "c_fc"):
            return self.c_proj(nn.functional.gelu(self.c_fc(x)))
        if hasattr(self, "gate_proj"):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp(kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """An embedding, which belongs to no MLP, and blocks that run in the given `order`."""

    def __init__(self, kind: str = "gated", order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.words = nn.Embedding(31, DIM)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.order = order

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return x


def make_row_stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, block_bytes: int = 5 * DIM * 8
) -> StepInBackward:
    """Return a stepper with blocks of `block_bytes`: by default five rows of most weights at a time."""
    stepper = StepInBackward(model, optimizer, by_rows=True)
    stepper._rows.rows_per_block = lambda weight: max(1, block_bytes // (weight.shape[1] * weight.element_size()))
    return stepper


def record_row_steps(stepper: StepInBackward) -> list[Tensor]:
    """Return a list to which each parameter that is stepped by rows is appended."""
    stepped: list[Tensor] = []
    step = stepper._rows.step
    stepper._rows.step = lambda parameter, *factors: (stepped.append(parameter), step(parameter, *factors))
    return stepped


def blocks_model(mesh: Any = None, plan: Any = None, **options: Any) -> Model:
    torch.manual_seed(7)
    model = Model(**options).double()
    return model if mesh is None else weft.parallelize(model, mesh, plan or FUSED)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(31, (5, 9), generator=torch.Generator().manual_seed(step))
    return (model(tokens) - 1).square().mean()


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_state(model: nn.Module, optimizer: Any, expected: nn.Module, expected_optimizer: Any) -> None:
    for (name, got), value in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(got), value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    states, expected_states = optimizer.state_dict(), expected_optimizer.state_dict()
    assert states["param_groups"] == expected_states["param_groups"]
    assert states["state"].keys() == expected_states["state"].keys()
    for index, state in expected_states["state"].items():
        assert states["state"][index].keys() == state.keys()
        for name, value in state.items():
            got = full(states["state"][index][name])
            torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-12, check_dtype=False)
