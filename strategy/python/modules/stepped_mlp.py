"""A fused MLP that steps its own weights in its backward: their full gradients are never materialized.

The operator `column_row_mlp` returns each weight's gradient to autograd. The backward here is the same chain of
products. But instead of the product grad_outᵀ x for a weight, it passes both factors to the optimizer, which steps some
rows at a time.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.nn.shard import process_group
from weft.strategy.sharding.state import child_of, state_of

# Steps a parameter whose gradient is leftᵀ right.
StepRows = Callable[[Tensor, Tensor, Tensor], None]

_KEY = "_weft_stepped_mlp"
# Modules whose hooks do nothing if there is no gradient.
_HARMLESS_HOOKS = ("weft.strategy.optimizers.in_backward", "weft.memory")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `column_row_mlp`; without sequence parallelism `sequence_dim` and `sequence_size` are None."""

    activation: str
    group_name: str
    recompute: bool
    sequence_dim: int | None
    sequence_size: int | None


class _PendingCall:
    """One call that has not had its backward. With several calls the gradient is a sum, which is stepped only once.

    owns_weight: which of its weights are the MLP's own, not replacements by torch.func.functional_call.
    """

    def __init__(self, owns_weight: tuple[bool, ...]) -> None:
        self.owns_weight = owns_weight
        self.is_only_call = True


class SteppedMlp:
    """The weights of one fused MLP, and the function that steps them.

    Args:
        weights: in the operator's order, w1, w2, w3; None for weights that do not exist or get their gradients as
            usual.
        transposed: which of them are stored as `[in, out]`.
        step_rows: steps one of them.
    """

    def __init__(self, weights: Sequence[Tensor | None], transposed: Sequence[bool], step_rows: StepRows) -> None:
        self._weights = tuple(weights)
        self._transposed = tuple(transposed)
        self._step_rows = step_rows
        self._pending_calls: weakref.WeakSet[_PendingCall] = weakref.WeakSet()
        self.has_ended = False

    def __call__(
        self,
        options: Options,
        x: Tensor,
        weights: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        parameters: Sequence[Tensor | None],
    ) -> Tensor:
        """Compute `column_row_mlp`, with its tensors in the order w1, w2, w3 and b1, b2, b3.

        parameters: the modules' current parameters for these weights.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        x, biases = _autocast(x, dtype), [_autocast_optional(each, dtype) for each in biases]
        call = _PendingCall(tuple(a is b for a, b in zip(parameters, self._weights, strict=True)))
        self._pending_calls.add(call)
        return _SteppingBackward.apply(self, call, options, dtype, x, *weights, *biases)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied module's weights are not the optimizer's

    def is_used_once(self, call: _PendingCall) -> bool:
        """Return whether no other call is pending, or was since this one; this one is no longer pending afterwards."""
        if len(self._pending_calls) > 1:
            for each in self._pending_calls:
                each.is_only_call = False
        self._pending_calls.discard(call)
        return call.is_only_call

    def can_step(self, index: int, call: _PendingCall) -> bool:
        """Return whether a weight may be stepped by rows now: no gradient to add to, and no hook that needs one."""
        weight = self._weights[index]
        if weight is None or not call.owns_weight[index] or self.has_ended:
            return False
        if weight.grad is not None or weight._backward_hooks:
            return False
        hooks: Iterable[Any] = (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values()
        return all((getattr(hook, "__module__", None) or "").startswith(_HARMLESS_HOOKS) for hook in hooks)

    def step(self, index: int, grad: Tensor, x: Tensor) -> None:
        """Step the weight whose gradient is gradᵀ x."""
        factors = (x, grad) if self._transposed[index] else (grad, x)
        weight = self._weights[index]
        assert weight is not None
        self._step_rows(weight, *(_matrix(factor) for factor in factors))


class _SteppingBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mlp: SteppedMlp,
        call: _PendingCall,
        options: Options,
        dtype: torch.dtype | None,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor | None,
        b1: Tensor | None,
        b2: Tensor | None,
        b3: Tensor | None,
    ) -> Tensor:
        ctx.mlp, ctx.call, ctx.options, ctx.dtype = mlp, call, options, dtype
        ctx.inputs = [each is not None for each in (x, w1, w2, w3, b1, b2, b3)]
        ctx.set_materialize_grads(False)
        y, h1, h3 = torch.ops.weft._column_row_mlp_saving(
            x,
            _autocast(w1, dtype),
            _autocast(w2, dtype),
            _autocast_optional(w3, dtype),
            b1,
            b2,
            b3,
            options.activation,
            options.group_name,
            options.sequence_dim,
            options.sequence_size,
        )
        hidden = (None, None) if options.recompute else (h1, None if w3 is None else h3)
        ctx.save_for_backward(x, *hidden, w1, w2, w3, b1, b3)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "weft::column_row_mlp: got a backward with create_graph=True, but this operator has no second "
                "derivative; call backward without create_graph."
            )
        mlp, options = ctx.mlp, ctx.options
        x, h1, h3, *parameters, b1, b3 = ctx.saved_tensors  # first: a checkpoint recomputes them by calling this MLP
        is_only_call = mlp.is_used_once(ctx.call)
        result: list[Tensor | None] = [None] * 11
        if grad_y is None:
            return tuple(result)
        grads = _RequiredGradients(ctx)

        def weight(index: int) -> Tensor:
            return _autocast(parameters[index], ctx.dtype)

        grad_y, x = (_gather_sequence(each, options) for each in (grad_y, x))
        if options.recompute:
            h1 = F.linear(x, weight(0), b1)
            h3 = None if parameters[2] is None else F.linear(x, weight(2), b3)

        def finish_weight(index: int, grad: Tensor, right: Tensor) -> None:
            if not grads.requires(1 + index):
                return
            if is_only_call and grads.accumulates(1 + index) and mlp.can_step(index, ctx.call):
                mlp.step(index, grad, right)
            else:
                grad_weight = torch.mm(_matrix(grad).t(), _matrix(right))
                result[5 + index] = grad_weight.to(parameters[index].dtype)

        def finish_bias(index: int, grad: Tensor) -> None:
            if grads.requires(4 + index):
                result[8 + index] = _matrix(grad).sum(0)

        grad_h = torch.matmul(grad_y, weight(1))
        if h3 is None:
            grad_h1, h = torch.ops.weft._activation_backward(grad_h, h1, options.activation)
            grad_h3 = None
        else:
            grad_h1, grad_h3, h = torch.ops.weft._gated_activation_backward(grad_h, h1, h3, options.activation)
        del grad_h, h1, h3
        pending = None
        if grads.requires(0):
            grad_x = torch.matmul(grad_h1, weight(0))
            if grad_h3 is not None:
                _matrix(grad_x).addmm_(_matrix(grad_h3), weight(2))
            result[4], pending = _start_reduction(grad_x, options)
        finish_bias(1, grad_y)
        finish_weight(1, grad_y, h)  # in the operator's order: w2, then w3, then w1, while grad_x is in flight
        del h
        if grad_h3 is not None:
            finish_bias(2, grad_h3)
            finish_weight(2, grad_h3, x)
            del grad_h3
        finish_bias(0, grad_h1)
        finish_weight(0, grad_h1, x)
        if pending is not None:
            pending.wait()
        return tuple(result)


class _RequiredGradients:
    """The inputs (x, w1, w2, w3, b1, b2, b3) whose gradients the running backward must compute.

    A weight's step cannot be undone, so for weights the autograd engine is asked: `torch.autograd.grad` may leave them
    out, or return their gradients instead of accumulating them.
    """

    def __init__(self, ctx: Any) -> None:
        needs = ctx.needs_input_grad[4:]
        edges = iter(ctx.next_functions)
        self._nodes: list[Any] = [next(edges)[0] if exists else None for exists in ctx.inputs]
        self._is_required = [
            need and (index not in (1, 2, 3) or torch._C._will_engine_execute_node(node))
            for index, (need, node) in enumerate(zip(needs, self._nodes, strict=True))
        ]

    def requires(self, index: int) -> bool:
        return self._is_required[index]

    def accumulates(self, index: int) -> bool:
        """Return whether the gradient of a weight will be accumulated into its leaf's `.grad`."""
        node = self._nodes[index]
        while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        try:
            return not node.next_functions and torch._C._will_engine_execute_node(node)
        except RuntimeError:  # the leaf is one of the inputs of torch.autograd.grad
            return False


def _matrix(tensor: Tensor) -> Tensor:
    """Return `[..., features]` as `[tokens, features]`, a view if it is contiguous."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def _autocast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast like torch.autocast, which leaves float64 unchanged; dtype None: autocast is off."""
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def _autocast_optional(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None else _autocast(tensor, dtype)


def _gather_sequence(shard: Tensor, options: Options) -> Tensor:
    if options.sequence_dim is None:
        return shard
    return torch.ops.weft.gather_from_sequence(
        shard, options.sequence_dim, options.group_name, dim_size=options.sequence_size
    )


def _start_reduction(grad_x: Tensor, options: Options) -> tuple[Tensor, dist.Work | None]:
    """Start the sum over the group, with sequence parallelism a reduce-scatter; complete when the Work is."""
    if options.sequence_dim is not None:
        return torch.ops.weft.reduce_scatter_to_sequence(grad_x, options.sequence_dim, options.group_name), None
    if not options.group_name:
        return grad_x, None
    group = process_group(options.group_name)
    return grad_x, None if group.size() == 1 else dist.all_reduce(grad_x, group=group, async_op=True)


def stepped_mlp_of(module: nn.Module) -> SteppedMlp | None:
    """Return what a module's forward must call instead of the operator while gradients are recorded."""
    stepped = module.__dict__.get(_KEY)
    return None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else stepped


def step_mlps_by_rows(
    model: nn.Module, parameters: Iterable[Tensor], step_rows: StepRows
) -> dict[nn.Module, list[str]]:
    """Make the fused MLPs of a parallelized model step their weights among `parameters`.

    Weights that other modules use too, or that are also sharded over a data-parallel axis, get their gradients as
    usual.

    Returns:
        the MLPs with the full names of these weights; `stop_stepping(mlps)` undoes it.

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
                "remove() on the StepInBackward that does."
            )
        layers = [child_of(module, name) for name in (state.mlp.columns[0], state.mlp.down, *state.mlp.columns[1:])]
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


def stop_stepping(modules: Iterable[nn.Module]) -> None:
    """Make MLPs return the gradients of their weights again."""
    for module in modules:
        module.__dict__.pop(_KEY).has_ended = True  # also stops it for existing graphs
