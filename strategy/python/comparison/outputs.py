"""Finds the first module output that differs between the unsharded and the sharded forward."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.comparison.result import OutputDifference
from weft.strategy.comparison.subject import first_tensor
from weft.strategy.sharding.state import original_class, state_of


class Outputs:
    """Records the outputs of all modules in an unsharded forward, and finds the first that differs in a sharded one.

    An output is the first floating tensor that a module returns. Outputs are ordered by the ends of the modules'
    forwards. If this rank's output is a shard along one dim, as of a column layer, it is compared with the same shard
    of the unsharded output. Outputs of other shapes and of other tensor classes, such as deferred ones, are left out.

    Attributes:
        tolerance: the largest relative difference that counts as agreement; the caller sets it before `compare`.
        first: the first output that differs; None: there is none.
    """

    def __init__(self, rank: int, size: int) -> None:
        """`rank` and `size` are those of the tensor-parallel group."""
        self._rank, self._size = rank, size
        self.tolerance = 0.0
        # (module name, number of the module's call, from 1) -> (position in the order of forwards' ends, output)
        self._recorded: dict[tuple[str, int], tuple[int, Tensor]] = {}
        self.first: OutputDifference | None = None

    @contextlib.contextmanager
    def record_reference(self, model: nn.Module) -> Iterator[None]:
        """Inside, keep copies of the outputs of a forward."""

        def on_output(key: tuple[str, int], module: nn.Module, tensor: Tensor) -> None:
            self._recorded[key] = (len(self._recorded), tensor.detach().clone())

        with _output_hooks(model, on_output):
            yield

    @contextlib.contextmanager
    def compare(self, model: nn.Module) -> Iterator[None]:
        """Inside, compare the outputs of a forward with the recorded ones; drop the recorded ones afterwards."""

        def on_output(key: tuple[str, int], module: nn.Module, tensor: Tensor) -> None:
            if self.first is not None or key not in self._recorded:
                return
            position, expected = self._recorded[key]
            reference = self._matching_shard(expected, tensor)
            if reference is None:
                return
            difference = relative_difference(tensor.detach(), reference)
            if not difference <= self.tolerance:
                self.first = OutputDifference(key[0], original_class(module).__name__, position, difference)

        try:
            with _output_hooks(model, on_output):
                yield
        finally:
            self._recorded.clear()

    def _matching_shard(self, expected: Tensor, tensor: Tensor) -> Tensor | None:
        if expected.shape == tensor.shape:
            return expected
        if expected.dim() != tensor.dim():
            return None
        dims = [dim for dim in range(tensor.dim()) if expected.shape[dim] != tensor.shape[dim]]
        if len(dims) != 1:
            return None
        chunks = expected.chunk(self._size, dims[0])
        shard = chunks[self._rank] if self._rank < len(chunks) else None
        return shard if shard is not None and shard.shape == tensor.shape else None


@contextlib.contextmanager
def _output_hooks(model: nn.Module, on_output: Callable[[tuple[str, int], nn.Module, Tensor], None]) -> Iterator[None]:
    calls: collections.Counter[str] = collections.Counter()

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] += 1
            tensor = first_tensor(output)
            # Other tensor classes are skipped: reading deferred logits would compute them.
            if tensor is not None and type(tensor) in (Tensor, nn.Parameter):
                on_output((name, calls[name]), module, tensor)

        return hook

    with _hooks(model, lambda name, module: module.register_forward_hook(hook_of(name))):
        yield


@contextlib.contextmanager
def running_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that is kept up to date: the names of the modules whose forwards are running, outermost first.

    A module whose forward raises stays in the list. ScriptModules and the layers of fused MLPs are never in it.
    """
    running: list[str] = []

    def on_exit(*_: Any) -> None:
        running.pop()

    with (
        _hooks(model, lambda name, module: module.register_forward_pre_hook(lambda *_: running.append(name))),
        _hooks(model, lambda name, module: module.register_forward_hook(on_exit)),
    ):
        yield running


@contextlib.contextmanager
def _hooks(model: nn.Module, register: Callable[[str, nn.Module], Any]) -> Iterator[None]:
    """Register hooks on all modules except ScriptModules and layers of fused MLPs: hooks would disable the fusion."""
    handles = []
    for name, module in model.named_modules():
        state = state_of(module)
        if not isinstance(module, torch.jit.ScriptModule) and (state is None or not state.is_layer_of_fused):
            handles.append(register(name, module))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def relative_difference(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, divided by the larger of `floor` and the norm of `reference`.

    If both are 0, the norm of the difference is not divided. The result is inf if an element is not finite.
    """
    value, reference = value.to(torch.float64), reference.to(torch.float64)
    difference = (value - reference).norm().item()
    scale = max(reference.norm().item(), floor)
    result = difference / scale if scale > 0 else difference
    return float("inf") if math.isnan(result) else result
