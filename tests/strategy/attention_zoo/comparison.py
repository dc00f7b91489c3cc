"""Trains the unsharded and the sharded model of a case side by side and compares every tensor.

Outcomes of a case on one rank, from best to worst:
    equal        outputs, gradients, weights after a step and buffers agree to a relative TOLERANCE
    unsupported  weft itself raised, before the first optimizer step, an error that names a module of the model
    wrong        a tensor differs
    error        any other exception
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from strategy.attention_zoo.zoo import FLOAT_FEATURES, VOCAB, Case, Sharding
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import weft
import weft.strategy
from support.parity import assert_gradients_agree, assert_weights_agree

TOLERANCE = 1e-9
LENGTHS = (5, 8)
LEARNING_RATE = 0.05
OUTCOMES = ("equal", "unsupported", "wrong", "error")
_ATTENTIONS = ("attn", "self_attn", "cross_attn", "multihead_attn")
_WEFT_FOLDERS = tuple(Path(module.__file__).resolve().parent for module in (weft, weft.strategy))


@dataclass
class Outcome:
    """Result of a case on one rank. `sharding`: how the attention's weights are sharded; None after an early error."""

    name: str
    result: str = "equal"
    sharding: Sharding | None = None
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name}: {self.result}: {'; '.join(self.details) or 'no details'}"


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome of one case among its ranks."""
    return max(outcomes, key=lambda outcome: OUTCOMES.index(outcome.result))


def compare(case: Case, mesh: DeviceMesh, plan: Any) -> Outcome:
    """Run a case with `plan` on this rank: training, a step, evaluation.

    The run continues after a difference, because another rank may find none and would hang in the next collective.
    """
    outcome = Outcome(case.name)
    reference = case.build()
    model = copy.deepcopy(reference)
    names = {name for name, _ in model.named_modules() if name}
    has_stepped = False
    try:
        model = weft.parallelize(model, mesh, plan)
        pair = _Pair(model, reference, outcome, getattr(reference, "takes_floats", False))
        pair.run("training", LENGTHS[0], seed=0)
        outcome.sharding = sharding(model, reference)
        has_stepped = True
        pair.step()
        pair.train(False)
        pair.run("evaluation", LENGTHS[1], seed=1)
    except Exception as error:
        is_before_step = outcome.result == "equal" and not has_stepped
        outcome.result = "unsupported" if is_before_step and is_clear_error(error, names) else "error"
        outcome.details.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return outcome


def is_clear_error(error: Exception, module_names: Iterable[str]) -> bool:
    """Return whether weft's own Python code raised the error and its text names, in quotes, one of the modules."""
    if type(error) not in (ValueError, TypeError, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = Path(frames[-1].filename).resolve() if frames else Path()
    if not any(folder in raised_in.parents for folder in _WEFT_FOLDERS):
        return False
    return any(f"'{name}'" in str(error) for name in module_names)


def sharding(model: nn.Module, reference: nn.Module) -> Sharding:
    """Return how the attention weights of a parallelized model are sharded on this rank."""
    full = {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}
    rows = [row for row in weft.strategy.report(model).rows if set(_ATTENTIONS) & set(row.parameter.split("."))]
    sharded = [row for row in rows if row.local_shape != full.get(row.parameter, row.local_shape)]
    if not sharded:
        return Sharding.ANY
    return Sharding.HEADS if {"column", "row"} <= {row.style for row in sharded} else Sharding.SHARDS


@dataclass
class _Pair:
    model: nn.Module
    reference: nn.Module
    outcome: Outcome
    takes_floats: bool

    def train(self, mode: bool) -> None:
        self.model.train(mode)
        self.reference.train(mode)

    def run(self, when: str, length: int, seed: int) -> None:
        """Run one forward and backward of both models from the same random state; gradients accumulate until `step`."""
        ours, theirs = (_forward(each, self._input(length, seed), seed) for each in (self.model, self.reference))
        with self._recorded(when):
            assert len(ours) == len(theirs)
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert a.shape == b.shape, f"output {i} is {tuple(a.shape)}, not {tuple(b.shape)}"
                error = (a - b).norm() / b.norm()
                assert error <= TOLERANCE, f"output {i} differs by {error:.1e}"
        for outputs in (ours, theirs):
            sum(each.square().mean() for each in outputs).backward()
        with self._recorded(when):
            assert_gradients_agree(self.model, self.reference, TOLERANCE)
        with self._recorded(when):
            self._assert_buffers_agree()

    def step(self) -> None:
        for each in (self.model, self.reference):
            torch.optim.SGD(each.parameters(), lr=LEARNING_RATE).step()
            each.zero_grad()
        with self._recorded("after a step"):
            assert_weights_agree(self.model, self.reference, lambda weight: TOLERANCE * weight.norm().item())

    def _input(self, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.takes_floats:
            return torch.randn(2, length, FLOAT_FEATURES, dtype=torch.float64, generator=generator)
        return torch.randint(0, VOCAB, (2, length), generator=generator)

    def _assert_buffers_agree(self) -> None:
        theirs = dict(self.reference.named_buffers())
        ours = {name: b.to_local() if isinstance(b, DTensor) else b for name, b in self.model.named_buffers()}
        assert ours.keys() == theirs.keys()
        for name, buffer in ours.items():
            assert buffer.shape == theirs[name].shape, f"buffer {name} is {tuple(buffer.shape)}"
            error = (buffer - theirs[name]).abs().sum()
            assert error <= TOLERANCE * theirs[name].abs().sum(), f"buffer {name} differs by {error:.1e}"

    @contextlib.contextmanager
    def _recorded(self, when: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.outcome.result = "wrong"
            self.outcome.details.append(f"{when}: {error}")


def _forward(model: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    outputs = model(x)
    return outputs if isinstance(outputs, tuple) else (outputs,)
