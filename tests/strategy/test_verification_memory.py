"""Verification leaves no tensor in memory, and no object that only the garbage collector frees."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ops.memory.counting import counted
from torch import Tensor, nn

from support.hugging_face import CONFIGS
from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft.strategy.plan import Plan
from weft.strategy.planning.auto import assign_auto
from weft.strategy.recognition.assignments import Assignments


class _Replaced(nn.Module):
    """Its forward cannot run on a copy: a forward that is an instance attribute may reference any object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.forward = self.inner.forward


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"{self.second(self.first(x)).shape}")


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model("gpt2", **CONFIGS["gpt2"])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@contextmanager
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


MODELS = {
    "llama": lambda: Llama(LlamaArgs()),
    "gpt2": _gpt2,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2, enable_nested_tensor=False),
    "replaced forward": lambda: nn.Sequential(_Replaced(), nn.Linear(64, 64)),
    "a forward that fails": lambda: nn.Sequential(_Fails(), Llama(LlamaArgs())),
}


@on_ranks(1)
@pytest.mark.parametrize("name", MODELS)
def test_assignment_leaves_no_tensor(rank: int, world_size: int, name: str) -> None:
    with counted() as count:
        model = MODELS[name]()
        before = count.now()
        with _without_collections():
            result = assign_auto(model, 2)
            assert isinstance(result, Assignments) and count.peak() > before
            assert count.now() == before


@on_ranks(1)
def test_rule_verification_leaves_no_tensor(rank: int, world_size: int) -> None:
    styles = {"w1": "column", "w3": "column", "w2": "row"}
    rules = {f"layers.*.feed_forward.{name}": style for name, style in styles.items()}
    with counted() as count:
        model = Llama(LlamaArgs())
        before = count.now()
        with _without_collections():
            Plan(rules, verify="always").assign(model, 2)
            assert count.peak() > before
            assert count.now() == before
