"""The backward of one stage for one micro-batch, complete or in two halves.

The halves are those of Qi et al., "Zero Bubble Pipeline Parallelism" (2024): first the gradients of the stage's inputs,
which the previous stage waits for, later those of the weights. Any graph is split by its structure: the first half runs
the nodes between outputs and inputs, and stores the gradients that arrive at nodes with edges to weights alone; the
second half follows only these edges, to compute the weights' gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edge = tuple[Node, int]


def edge_of(output: Tensor) -> GradientEdge | None:
    """Return the edge for an output's gradient, which keeps the graph but not the output; None: it requires none."""
    return get_gradient_edge(output) if output.requires_grad else None


def backward(outputs: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Accumulate the gradients of all leaves, and free the graph.

    `gradients`: those of `outputs`.
    """
    if outputs:
        torch.autograd.backward(list(outputs), list(gradients))


def backward_input(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightHalf]:
    """Return the gradients of `inputs` (leaves), and the remaining half.

    The gradient of a weight that several nodes between outputs and inputs use directly is computed here, because only a
    run through all of them sums it; the remaining half accumulates it. If such a weight is also reached through nodes
    that lead only to weights, the full backward runs here.
    """
    graph = _Graph([output.node for output in outputs], inputs)
    if not graph.can_be_split:
        backward(outputs, gradients)
        return [leaf.grad for leaf in inputs], WeightHalf({}, [], [])
    pairs = list(zip(outputs, gradients, strict=True))
    main = [(output, gradient) for output, gradient in pairs if output.node in graph.to_inputs]
    separate = [(output, gradient) for output, gradient in pairs if output.node not in graph.to_inputs]
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [node.register_prehook(_store_gradients_hook(node, arrived)) for node in graph.junctions]
    wanted = [*map(get_gradient_edge, inputs), *(GradientEdge(*edge) for edge in graph.shared)]
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    try:
        if main:
            grads = torch.autograd.grad(
                [output for output, _ in main],
                wanted,
                [gradient for _, gradient in main],
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for hook in hooks:
            hook.remove()
    input_gradients, shared = list(grads[: len(inputs)]), grads[len(inputs) :]
    initial = [(edge, g) for edge, g in zip(wanted[len(inputs) :], shared, strict=True) if g is not None]
    return input_gradients, WeightHalf(graph.junctions, list(arrived.items()), [*initial, *separate])


def _store_gradients_hook(node: Node, arrived: dict[Node, tuple[Tensor | None, ...]]) -> Any:
    def store(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    return store


class _Graph:
    """The nodes of a graph between outputs and inputs, and their edges to weights.

    A side edge leads from a node of `to_inputs` to a node that leads only to weights.

    to_inputs: the nodes from which an input can be reached.
    junctions: the nodes with side edges to nodes that no other node leads to, with these edges.
    shared: the other side edges, to nodes that several nodes lead to.
    can_be_split: whether only nodes of `to_inputs` lead to the nodes at the ends of shared edges.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        input_nodes = {get_gradient_edge(tensor).node for tensor in inputs}
        self.to_inputs: set[Node] = set()
        for node in reversed(_topological_order(roots)):  # each node after those it leads to
            if node in input_nodes or any(following in self.to_inputs for following, _ in node.next_functions):
                self.to_inputs.add(node)
        parents: dict[Node, set[Node]] = collections.defaultdict(set)
        sides: dict[Node, list[Edge]] = {}
        for node in _topological_order([root for root in roots if root in self.to_inputs]):
            for following, _ in node.next_functions:
                if following is not None:
                    parents[following].add(node)
            if node in self.to_inputs:
                edges = ((n, i) for n, i in node.next_functions if n is not None and n not in self.to_inputs)
                sides[node] = list(dict.fromkeys(edges))
        shared = {edge: None for edges in sides.values() for edge in edges if len(parents[edge[0]]) > 1}
        self.shared = list(shared)
        self.junctions = {
            node: exclusive
            for node, edges in sides.items()
            if (exclusive := [edge for edge in edges if edge not in shared])
        }
        self.can_be_split = all(parents[node] <= self.to_inputs for node, _ in shared)


def _topological_order(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes that can be reached from `roots`, each before those it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order[::-1]


class WeightHalf:
    """The second half of a backward; keeps the graph until it has run.

    junctions: nodes, with the edges along which their weights' gradients flow.
    arrived: the junctions that the first half reached, with the gradients that arrived there.
    initial: further edges to start from, with their gradients.
    """

    def __init__(
        self,
        junctions: dict[Node, list[Edge]],
        arrived: list[tuple[Node, tuple[Tensor | None, ...]]],
        initial: list[tuple[GradientEdge, Tensor]],
    ) -> None:
        self._junctions = junctions
        self._arrived = arrived
        self._initial = initial

    def run(self) -> None:
        """Accumulate the weights' gradients; call it once."""
        edges = [edge for edge, _ in self._initial]
        gradients = [gradient for _, gradient in self._initial]
        for node, arrived in self._arrived:
            sources = [(GradientEdge(node, i), gradient) for i, gradient in enumerate(arrived) if gradient is not None]
            sides = [GradientEdge(*edge) for edge in self._junctions[node]]
            # The weights are reached only along these edges: other successors of the node do not run.
            side_gradients = torch.autograd.grad(
                [source for source, _ in sources],
                sides,
                [gradient for _, gradient in sources],
                retain_graph=True,
                allow_unused=True,
            )
            edges += [side for side, gradient in zip(sides, side_gradients, strict=True) if gradient is not None]
            gradients += [gradient for gradient in side_gradients if gradient is not None]
        self._arrived.clear()
        self._initial.clear()
        backward(edges, gradients)
