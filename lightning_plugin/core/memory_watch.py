"""Tags the memory of a strategy's training loop for `weft.memory`."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from weft import memory


class MemoryWatch:
    """Forwards the phases of steps to a `weft.memory.Watch`, if memory is counted at `begin`; else does nothing."""

    def __init__(self) -> None:
        self._watch: memory.Watch | None = None

    def begin(self, module: Module, *optimizers: Optimizer) -> None:
        self.end()
        if memory.is_tracking():
            self._watch = memory.watch(module, *optimizers)

    def end(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if self._watch is not None:
            self._watch.add_optimizer(optimizer)

    def forward_begins(self, batch: Any) -> None:
        if self._watch is not None:
            self._watch.forward_begins(batch)

    def backward_begins(self) -> None:
        if self._watch is not None:
            self._watch.backward_begins()
