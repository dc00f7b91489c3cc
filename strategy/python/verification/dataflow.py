"""Finds which linear layers of a module feed which others, by running it.

In a run without weights (`weightless`), the output of every linear layer is a leaf of the autograd graph, so the input
of a layer depends on exactly those layers whose output reaches it without passing through another layer: attention's
query, key and value layers reach its output layer, and an MLP's up layer reaches its down layer. A *group* consists of
*sources* and their *sink*, the only layer that they reach. Tensor parallelism shards the sources by column and the sink
by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft.strategy.verification.weightless import Run

OUTPUT = ""  # stands for the module's output


@dataclasses.dataclass(frozen=True)
class Group:
    """Linear layers by their names below the module: the output of each source reaches only the input of the sink."""

    sources: tuple[str, ...]
    sink: str


@dataclasses.dataclass(frozen=True)
class Flow:
    """The dependences between the layers of a module.

    reaches: for each layer that was called, the layers whose input depends on its output, and OUTPUT if the module's
    output does.
    """

    reaches: dict[str, set[str]]

    def groups(self) -> list[Group]:
        """Return the groups, in the order of the sinks' first calls."""
        return self._groups(lambda targets: targets)

    def blocked_groups(self) -> list[Group]:
        """Return the sets of layers that would be groups if the module did not also return the outputs of sources."""
        groups = self.groups()
        return [group for group in self._groups(lambda targets: targets - {OUTPUT}) if group not in groups]

    def _groups(self, counted: Callable[[set[str]], set[str]]) -> list[Group]:
        found = []
        for sink in self.reaches:
            sources = tuple(layer for layer, targets in self.reaches.items() if sink in targets)
            if sources and all(counted(self.reaches[layer]) == {sink} for layer in sources) and sink not in sources:
                found.append(Group(sources, sink))
        return found


def flow_of(run: Run) -> Flow:
    """Return the flow of one run."""
    reaches: dict[str, set[str]] = {call.layer: set() for call in run.calls}
    ends = [(call.layer, call.input) for call in run.calls]
    ends += [(OUTPUT, leaf) for leaf in tree_leaves(run.output) if isinstance(leaf, Tensor)]
    leaves = [call.output for call in run.calls]
    for name, end in ends:
        if not end.requires_grad:
            continue
        grads = torch.autograd.grad(end, leaves, torch.ones_like(end), retain_graph=True, allow_unused=True)
        for call, grad in zip(run.calls, grads, strict=True):
            if grad is not None:
                reaches[call.layer].add(name)
    return Flow(reaches)
