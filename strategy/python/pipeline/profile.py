"""What each layer of a model takes, and cuts that balance stages by it."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.strategy._plan import Schedule, partition
from weft.strategy.activation_checkpointing import repeated_blocks
from weft.strategy.assignments import join

OPENED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """One layer, for one micro-batch: seconds, and bytes that autograd keeps of it; bytes of its parameters."""

    name: str
    forward: float
    backward: float
    activation_bytes: int
    parameter_bytes: int


def layer_names(model: nn.Module) -> list[str]:
    """Where stages may begin: the model's children, with lists and sequences opened, and what leads to its blocks."""
    opened = set()
    for block in repeated_blocks(model):
        parts = block.split(".")[:-1]
        opened |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return list(_names(model, "", opened))


def _names(module: nn.Module, prefix: str, opened: set[str]) -> Iterator[str]:
    for child_name, child in module.named_children():
        name = join(prefix, child_name)
        if name in opened or isinstance(child, OPENED):
            yield from _names(child, name, opened)
        else:
            yield name


def profile_layers(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor], *, repeats: int = 3
) -> list[LayerProfile]:
    """Measure a whole model's layers on one micro-batch, in the order in which they are called.

    A layer's backward is the time from the gradient of its output to that of the layer before it, so that the model is
    to be a chain of layers; those without gradients count with the next. Gradients and buffers stay what they were.

    Args:
        model: whole, on its device.
        batch: one micro-batch.
        loss_fn: as for `Pipeline.step`.
        repeats: passes after a first one; medians are given.

    Raises:
        ValueError: the step calls none of the layers, or one of them twice.
    """
    names = layer_names(model)
    state = {name: value.clone() for name, value in model.named_buffers()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    passes = []
    for _ in range(repeats + 1):
        for parameter in gradients:
            parameter.grad = None
        passes.append(_Pass(model, names).run(batch, loss_fn))
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(state[name])
    order = [name for name, *_ in passes[0]]
    if not order or len(set(order)) != len(order):
        raise ValueError(
            f"pipeline: a step called {order or 'none'} of the layers {names}, which is no chain of them; pass cuts by "
            "name."
        )
    return [
        LayerProfile(
            name,
            statistics.median(result[i][1] for result in passes[1:]),
            statistics.median(result[i][2] for result in passes[1:]),
            passes[-1][i][3],
            sum(parameter.nbytes for parameter in model.get_submodule(name).parameters()),
        )
        for i, name in enumerate(order)
    ]


class _Pass:
    """One forward and backward with times noted at the layers' ends."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        self._names = names
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._begun: dict[str, float] = {}
        self._rows: list[list[Any]] = []  # name, forward, backward, bytes
        self._arrivals: list[tuple[float, int]] = []  # when the gradient of a row's output was there
        self._kept: dict[int, int] = {}  # bytes by storage, of the layer that runs
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def run(self, batch: Any, loss_fn: Callable[[Any], Tensor]) -> list[list[Any]]:
        handles = []
        for name in self._names:
            module = self._model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._begin(name)))
            handles.append(module.register_forward_hook(lambda _m, _i, output, name=name: self._end(name, output)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
                loss = loss_fn(batch)
            self._arrivals.append((self._now(), len(self._rows)))
            loss.backward()
            end = self._now()
        finally:
            for handle in handles:
                handle.remove()
        arrivals = [*sorted(self._arrivals), (end, -1)]
        for (start, row), (following, _) in itertools.pairwise(arrivals):
            if row < len(self._rows):  # what comes before is the loss's own
                self._rows[row][2] += following - start
        return self._rows

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _begin(self, name: str) -> None:
        self._kept = {}
        self._begun[name] = self._now()

    def _end(self, name: str, output: Any) -> None:
        row = len(self._rows)
        self._rows.append([name, self._now() - self._begun[name], 0.0, sum(self._kept.values())])
        self._kept = {}
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if outputs:
            outputs[0].register_hook(lambda _gradient: self._arrivals.append((self._now(), row)))

    def _keep(self, tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._parameters:
            self._kept[pointer] = tensor.untyped_storage().nbytes()
        return tensor


def balanced_cuts(
    profiles: Sequence[LayerProfile],
    num_stages: int,
    *,
    schedule: Schedule | None = None,
    memory_limit: int | None = None,
    state_factor: float = 4.0,
    memory_weight: float = 0.0,
) -> list[str]:
    """The names at which stages begin such that the slowest is as fast as can be.

    Args:
        profiles: of `profile_layers`.
        num_stages: how many stages there are to be.
        schedule: that will be run, for how many micro-batches each stage keeps. Default: one.
        memory_limit: the most bytes of a stage, parameters with all that goes with them and activations.
        state_factor: bytes of parameters, gradients and optimizer states for each of parameters; 4 is Adam's.
        memory_weight: 0 balances time, 1 bytes, between them both.

    Raises:
        ValueError: see `weft.strategy.pipeline.partition`.
    """
    cut = partition(
        [layer.forward + layer.backward for layer in profiles],
        num_stages,
        activation_bytes=[layer.activation_bytes for layer in profiles],
        parameter_bytes=[round(state_factor * layer.parameter_bytes) for layer in profiles],
        in_flight=[] if schedule is None else schedule.simulate().in_flight,
        memory_limit=memory_limit,
        memory_weight=memory_weight,
    )
    return [profiles[begin].name for begin in cut.begins[1:]]
