"""Fused MLPs that step their own weights in the backward, without materializing the full gradients.

The backward of the operator `column_row_mlp` passes the two factors of each weight's gradient, grad_out and x, to a
sink (weft/ops/weight_sink.h). The sink here passes them on to the optimizer, which steps some rows at a time. If a
weight needs a full gradient, the sink declines, and the operator computes it as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft import _weight_sink
from weft.strategy.sharding.state import child_of, state_of

# Steps a parameter whose gradient is leftᵀ right. Arguments: parameter `[rows, columns]`, left `[tokens, rows]`, right
# `[tokens, columns]`.
StepRows = Callable[[Tensor, Tensor, Tensor], None]

_KEY = "_weft_stepped_mlp"
# Modules whose hooks do nothing if there is no gradient.
_HARMLESS_HOOKS = ("weft.strategy.optimizers.in_backward", "weft.memory")


class _Call:
    """The sink of one call of the operator, until its backward.

    If several calls have not had their backward yet, the gradient of a weight is a sum over these calls: none of the
    calls may step the weight by rows.
    """

    def __init__(self, mlp: SteppedMlp, owns_weight: tuple[bool, ...]) -> None:
        """`owns_weight`: which weights of the call are the MLP's own, not replacements by functional_call."""
        self._mlp, self._owns_weight = mlp, owns_weight
        self.is_only_call = True

    def begin_backward(self) -> None:
        self._mlp.on_backward(self)

    def take(self, index: int, grad: Tensor, x: Tensor) -> bool:
        """Step the weight whose gradient is the product of `grad` and `x`, unless its full gradient is needed.

        Returns:
            Whether the weight was stepped; if not, the operator computes the gradient.
        """
        if not self.is_only_call or not self._owns_weight[index] or not self._mlp.can_step(index):
            return False
        self._mlp.step(index, grad, x)
        return True


class SteppedMlp:
    """The weights of one fused MLP, and the function that steps them.

    Args:
        weights: in the operator's order, w1, w2, w3; None for weights that do not exist or get their gradients as
            usual.
        transposed: for each weight, whether it is stored as `[in, out]`.
        step_rows: steps a weight.

    is_paused: whether gradients are accumulated, and no weight may be stepped.
    """

    def __init__(self, weights: Sequence[Tensor | None], transposed: Sequence[bool], step_rows: StepRows) -> None:
        self._weights = tuple(weights)
        self._transposed = tuple(transposed)
        self._step_rows = step_rows
        self._due_calls: weakref.WeakSet[_Call] = weakref.WeakSet()  # those that have not had their backward
        self.has_ended = False
        self.is_paused = False

    def call(self, operator: Callable[[], Tensor], parameters: Sequence[Tensor | None]) -> Tensor:
        """Call the operator, whose backward steps the weights.

        parameters: the modules' current parameters for the weights, in the operator's order.
        """
        owns_weight = tuple(a is b for a, b in zip(parameters, self._weights, strict=True))
        call = _Call(self, owns_weight)
        self._due_calls.add(call)
        return _weight_sink.call_with(call, operator)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied module's weights are not the optimizer's

    def on_backward(self, call: _Call) -> None:
        """Note that the backward of a call begins; if other calls are due, no call that is due may step weights."""
        if len(self._due_calls) > 1:
            for each in self._due_calls:
                each.is_only_call = False
        self._due_calls.discard(call)

    def can_step(self, index: int) -> bool:
        """Return whether a weight may be stepped by rows now: it has no gradient yet, and no hook that needs one."""
        weight = self._weights[index]
        if weight is None or self.has_ended or self.is_paused or weight.grad is not None or weight._backward_hooks:
            return False
        hooks: Iterable[Any] = (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values()
        return all((getattr(hook, "__module__", None) or "").startswith(_HARMLESS_HOOKS) for hook in hooks)

    def step(self, index: int, grad: Tensor, x: Tensor) -> None:
        """Step the weight whose gradient is gradᵀ x, or xᵀ grad if the weight is transposed."""
        factors = (x, grad) if self._transposed[index] else (grad, x)
        weight = self._weights[index]
        assert weight is not None
        self._step_rows(weight, *(_matrix(factor) for factor in factors))


def _matrix(tensor: Tensor) -> Tensor:
    """Return `[..., features]` as `[tokens, features]`, a view if it is contiguous."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def stepped_mlp_of(module: nn.Module) -> SteppedMlp | None:
    """Return the SteppedMlp through which a module's forward calls the operator; None: it does so directly."""
    stepped = module.__dict__.get(_KEY)
    return None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else stepped


def step_mlps_by_rows(
    model: nn.Module, parameters: Iterable[Tensor], step_rows: StepRows
) -> dict[nn.Module, list[str]]:
    """Make the fused MLPs of a parallelized model step those of their weights that are in `parameters`.

    Weights that other modules use too, or that are also sharded over a data-parallel axis, get their gradients as
    usual.

    Returns:
        The MLPs, each with the names in the model of the weights that it steps; `stop_stepping(mlps)` undoes this.

    Raises:
        ValueError: an MLP steps its weights already.
    """
    wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
    counts: dict[int, int] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
        names[id(parameter)] = name
    found: dict[nn.Module, list[str]] = {}
    for module in model.modules():
        state = state_of(module)
        if state is None or state.mlp is None or state.style != "column_row_mlp":
            continue
        if module.__dict__.get(_KEY) is not None:
            raise ValueError(
                "optimizer_in_backward='rows': the weights of an MLP are stepped in its backward already; call "
                "remove() on the StepInBackward that steps them."
            )
        layers = [
            child_of(module, name)
            for name in (state.mlp.column_layers[0], state.mlp.down, *state.mlp.column_layers[1:])
        ]
        weights = [layer._parameters["weight"] for layer in layers]
        steppable = [
            weight
            if id(weight) in wanted
            and counts[id(weight)] == 1
            and isinstance(weight, DTensor)
            and weight.device_mesh == state.mesh
            else None
            for weight in weights
        ]
        if any(weight is not None for weight in steppable):
            missing = 3 - len(layers)
            states = [state_of(layer) for layer in layers]
            transposed = [each is not None and each.transposed for each in states] + [False] * missing
            module.__dict__[_KEY] = SteppedMlp([*steppable, *[None] * missing], transposed, step_rows)
            found[module] = [names[id(weight)] for weight in steppable if weight is not None]
    return found


def pause_stepping(modules: Iterable[nn.Module], is_paused: bool) -> None:
    """Make MLPs that step their weights return the gradients, or step again."""
    for module in modules:
        module.__dict__[_KEY].is_paused = is_paused


def stop_stepping(modules: Iterable[nn.Module]) -> None:
    """Make MLPs return the gradients of their weights again."""
    for module in modules:
        module.__dict__.pop(_KEY).has_ended = True  # also stops it for existing graphs
