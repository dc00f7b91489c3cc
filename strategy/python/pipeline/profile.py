"""Measures the cost of each layer of a model, and balances stages by it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from weft.strategy._plan import Schedule, partition
from weft.strategy.modules.activation_checkpointing import repeated_blocks
from weft.strategy.pipeline.fake_mode import FakeMode
from weft.strategy.pipeline.staged_model import fake_like
from weft.strategy.recognition.assignments import join

TIME, FLOPS = "time", "flops"
OPENED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # containers, whose children are listed in their place


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """The cost of one layer for one micro-batch.

    forward, backward: seconds, or floating-point operations.
    activation_bytes: saved for the backward, without parameters.
    """

    name: str
    forward: float
    backward: float
    activation_bytes: int
    parameter_bytes: int


def layer_names(model: nn.Module) -> list[str]:
    """Return the names at which stages may begin: the model's children.

    A list, dict or Sequential of modules, and an ancestor of repeated blocks, is replaced by its children.
    """
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
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor], *, measure: str = TIME, repeats: int = 3
) -> list[LayerProfile]:
    """Measure an unsharded model's layers on one micro-batch, in the order in which they are called.

    A layer's backward is the time from the gradient of its output to that of the previous layer's output, so the model
    should be a chain of layers; a layer without gradients counts with the layer called next. Gradients and buffers do
    not change.

    Args:
        model: unsharded, on its device.
        batch: one micro-batch.
        loss_fn: as for `Pipeline.step`.
        measure: "time", or "flops": the floating-point operations of matrix products and convolutions in place of
            seconds, counted on fake tensors, without arithmetic.
        repeats: for "time", passes after a warm-up pass; the result has their medians.

    Raises:
        ValueError: the step calls none of the layers, or calls one of them twice; an unknown `measure`.
    """
    if measure not in (TIME, FLOPS):
        raise ValueError(f"profile_layers got measure={measure!r}; pass {TIME!r} or {FLOPS!r}.")
    names = layer_names(model)
    if measure == FLOPS:
        fake_mode, counter = FakeMode(), FlopCounterMode(display=False)
        with _fake_state(model, fake_mode), fake_mode, counter:
            # Counts do not vary: one pass is also the warm-up pass.
            passes = 2 * [_Pass(model, names, counter.get_total_flops).run(batch, loss_fn)]
    else:
        state = {name: value.clone() for name, value in model.named_buffers()}
        passes = [_Pass(model, names, _clock_of(model)).run(batch, loss_fn) for _ in range(repeats + 1)]
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(state[name])
    order = [row.name for row in passes[0]]
    if not order or len(set(order)) != len(order):
        raise ValueError(
            f"pipeline: a step called {order or 'none'} of the layers {names}, which do not form a chain in which each "
            "is called once; pass cuts by name."
        )
    return [
        LayerProfile(
            name,
            statistics.median(rows[i].forward for rows in passes[1:]),
            statistics.median(rows[i].backward for rows in passes[1:]),
            passes[-1][i].activation_bytes,
            sum(parameter.nbytes for parameter in model.get_submodule(name).parameters()),
        )
        for i, name in enumerate(order)
    ]


@contextlib.contextmanager
def _fake_state(model: nn.Module, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Inside, the model's parameters and buffers are fake tensors."""
    fakes: dict[int, Tensor] = {}
    real: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    real.append((table, name, tensor))
    on_cpu = torch.device("cpu")  # the assumed device of meta tensors, which have no values yet
    try:
        for owner, name, tensor in real:
            fake = fake_like(tensor, fake_mode, on_cpu if tensor.is_meta else None)
            owner[name] = fakes.setdefault(id(tensor), fake)
        yield
    finally:
        for owner, name, tensor in real:
            owner[name] = tensor


def _clock_of(model: nn.Module) -> Callable[[], float]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


@dataclasses.dataclass
class _Row:
    """The measurements of one layer in one pass; the fields are as in LayerProfile."""

    name: str
    forward: float
    backward: float
    activation_bytes: int


class _Pass:
    """One forward and backward that calls `now` at the layers' boundaries.

    now: returns the time in seconds, or the number of floating-point operations so far.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], now: Callable[[], float]) -> None:
        self._model = model
        self._names = names
        self._now = now
        self._start_times: dict[str, float] = {}
        self._rows: list[_Row] = []  # in the order of calls
        self._arrivals: list[tuple[float, int]] = []  # (time, row whose output's gradient arrived then)
        self._saved_bytes: dict[int, int] = {}  # bytes by storage, for the layer that runs
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def run(self, batch: Any, loss_fn: Callable[[Any], Tensor]) -> list[_Row]:
        handles = []
        for name in self._names:
            module = self._model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._begin(name)))
            handles.append(module.register_forward_hook(lambda _m, _i, output, name=name: self._end(name, output)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._count_saved, lambda tensor: tensor):
                loss = loss_fn(batch)
            self._arrivals.append((self._now(), len(self._rows)))
            wanted = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, wanted, allow_unused=True)
            end = self._now()
        finally:
            for handle in handles:
                handle.remove()
        arrivals = [*self._arrivals, (end, -1)]
        for (start, row), (following, _) in itertools.pairwise(arrivals):
            if row < len(self._rows):  # the first interval is the backward of the loss itself
                self._rows[row].backward += following - start
        return self._rows

    def _begin(self, name: str) -> None:
        self._saved_bytes = {}
        self._start_times[name] = self._now()

    def _end(self, name: str, output: Any) -> None:
        row = len(self._rows)
        self._rows.append(_Row(name, self._now() - self._start_times[name], 0.0, sum(self._saved_bytes.values())))
        self._saved_bytes = {}
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if outputs:
            outputs[0].register_hook(lambda _gradient: self._arrivals.append((self._now(), row)))

    def _count_saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._parameters:
            self._saved_bytes[storage] = max(tensor.nbytes, self._saved_bytes.get(storage, 0))
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
    """Return the cuts, the names of the first layer of each stage but the first, that make the slowest stage fastest.

    Args:
        profiles: the result of `profile_layers`.
        num_stages: the number of stages.
        schedule: the schedule to be run, which determines how many micro-batches' activations each stage keeps.
            Default: one micro-batch's.
        memory_limit: the most bytes of a stage: activations, and parameters with their gradients and optimizer states.
        state_factor: bytes of parameters, gradients and optimizer states for each byte of parameters; 4 is Adam's.
        memory_weight: 0 balances time, 1 balances bytes, and values in between balance both.

    Raises:
        ValueError: see `weft.strategy.pipeline.partition`.
    """
    chosen = partition(
        [layer.forward + layer.backward for layer in profiles],
        num_stages,
        activation_bytes=[layer.activation_bytes for layer in profiles],
        parameter_bytes=[round(state_factor * layer.parameter_bytes) for layer in profiles],
        in_flight=[] if schedule is None else schedule.simulate().in_flight,
        memory_limit=memory_limit,
        memory_weight=memory_weight,
    )
    return [profiles[begin].name for begin in chosen.begins[1:]]
