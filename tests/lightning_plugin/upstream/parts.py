"""Models, parallelize_fns and mocks of the tests of stock behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_plugin.scripts.plugin_models import FeedForward
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Environment(LightningEnvironment):
    """An environment whose process does not react to signals, because pytest runs in it."""


class JoinedError(Exception):
    pass


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


class PartlyReset(nn.Module):
    """Has one module that cannot reset its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(NoReset(), nn.Linear(2, 2))
        self.register_buffer("buffer", torch.rand(2))

    def reset_parameters(self) -> None:
        self.buffer.fill_(3.0)


def record_joining(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Raise JoinedError when a process group is about to be created; return its future arguments."""
    seen: dict[str, Any] = {}

    def join(backend: str, **options: Any) -> None:
        seen.update(options, backend=backend)
        raise JoinedError

    monkeypatch.setattr("torch.distributed.init_process_group", join)
    return seen


def shard_features(model: FeedForward, mesh: Any) -> FeedForward:
    """Shard over the axis tensor_parallel; does nothing to a sharded model."""
    if not isinstance(model.w1.weight, DTensor):
        plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor_parallel"], plan)
    return model


def shard_data(model: FeedForward, mesh: Any) -> FeedForward:
    """Shard each layer over the axis data_parallel; does nothing to a sharded model."""
    for layer in (model.w1, model.w3, model.w2):
        if not hasattr(layer, "unshard"):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def shard_both(model: FeedForward, mesh: Any) -> FeedForward:
    return shard_data(shard_features(model, mesh), mesh)


def compiled(function: Callable[..., FeedForward]) -> Callable[..., Any]:
    """Return a parallelize_fn that also compiles."""
    return lambda model, mesh: torch.compile(function(model, mesh), backend="eager")


def full_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters as full plain tensors, by their names without those of wrappers; collective."""
    values = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        full = value.full_tensor() if isinstance(value, DTensor) else value
        values[name.replace("_orig_mod.", "").replace("_forward_module.", "")] = full.clone()
    return values
