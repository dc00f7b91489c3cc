"""The classes that parallelized modules get in place of their original ones.

Each is a subclass of the module's class, made once for each set of arguments of `parallel_class`. isinstance, hooks,
names and `_parameters` do not change; the forward, the reading of parameters and the slices of nn.Sequential do. FSDP2
changes classes the same way.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.strategy.experts.layer import experts_forward
from weft.strategy.modules.precision import in_precision
from weft.strategy.modules.sharded_errors import explaining_errors
from weft.strategy.modules.stepped_mlp import stepped_mlp_of
from weft.strategy.modules.vocab_head import VocabParallelLogits, head_of
from weft.strategy.recognition.attribute_reads import changes_in
from weft.strategy.recognition.linears import longest_dim
from weft.strategy.sharding.local_tensor import enter_forward, exit_forward, inside_forward, is_full, local_of
from weft.strategy.sharding.scopes import in_scope, is_outside, with_scope
from weft.strategy.sharding.shard_dropout import shard_dropout
from weft.strategy.sharding.state import ModuleState, cached, with_local_attributes


class ParallelModule:
    """Marks every module that parallelize has changed."""

    _weft_state: ModuleState

    @property
    def __jit_ignored_attributes__(self) -> list[str]:
        # torch.jit.script and torch.jit.trace read this attribute first; they would save zeros for the DTensors.
        raise ValueError(
            "torch.jit got a module whose parameters are DTensors, which it would save as zeros: "
            "call weft.export_local(model) and script its result."
        )

    __prepare_scriptable__ = property(lambda self: self.__jit_ignored_attributes__)


def _local_shard_of(module: Any, name: str) -> Tensor | None:
    """Return this rank's tensor-parallel shard of a parameter, in the module's precision; None if there is none."""
    parameter = module._parameters[name]
    if isinstance(parameter, DTensor) and not torch.compiler.is_compiling():
        mesh, expected = parameter._spec.mesh, module._weft_state.mesh
        if mesh is not expected and mesh != expected:
            _raise_still_sharded(module, name, mesh)
    return None if parameter is None else _cast(module._weft_state, local_of(parameter))


def _cast(state: ModuleState, value: Tensor) -> Tensor:
    return value.to(state.precision) if state.precision is not None and value.is_floating_point() else value


def _raise_still_sharded(module: Any, name: str, mesh: DeviceMesh) -> None:
    axes = " and ".join(mesh.mesh_dim_names or ("another mesh",))
    kind = module._weft_state.original_class.__name__
    raise ValueError(
        f"a {kind} was called while its {name} is sharded over {axes}: call the module that fully_shard was applied "
        "to, whose forward gathers it, not a layer or a method inside, or set zero_stage=1."
    )


def _weight_and_bias(module: nn.Module, transposed: bool) -> tuple[Tensor, Tensor | None]:
    weight: Any = _local_shard_of(module, "weight")
    return (weight.t() if transposed else weight), _local_shard_of(module, "bias")


def _column_forward(self: Any, input: Tensor) -> Tensor:
    state = self._weft_state
    weight, bias = _weight_and_bias(self, state.transposed)
    if state.sequence_role is not None:  # the preceding gather's backward sums the input's gradient
        return torch.nn.functional.linear(input, weight, bias)
    output: Tensor = torch.ops.weft.column_linear(input, weight, bias, group_name=state.group_name)
    return output if state.scope is None or not is_outside(state.scope) else _gathered(self, output)


def _row_forward(self: Any, input: Tensor) -> Tensor:
    state = self._weft_state
    weight, bias = _weight_and_bias(self, state.transposed)
    if state.sequence_role is not None:
        return torch.ops.weft.linear_reduce_scatter(
            input, weight, bias, scatter_dim=input.dim() - 2, group_name=state.group_name
        )
    if state.scope is not None and is_outside(state.scope):
        input = torch.ops.weft.scatter_to_group(input, input.dim() - 1, state.group_name)
    return torch.ops.weft.row_linear(input, weight, bias, group_name=state.group_name)


def _column_gather_output_forward(self: Any, input: Tensor) -> Tensor:
    return _gathered(self, _column_forward(self, input))


def _gathered(layer: Any, output: Tensor) -> Tensor:
    state = layer._weft_state
    num_features = layer._parameters["weight"].shape[1 if state.transposed else 0]
    full: Tensor = torch.ops.weft.gather_from_group(output, output.dim() - 1, state.group_name, dim_size=num_features)
    return full


def _row_split_input_forward(self: Any, input: Tensor) -> Tensor:
    shard = torch.ops.weft.scatter_to_group(input, input.dim() - 1, self._weft_state.group_name)
    return _row_forward(self, shard)


def _vocab_head_forward(self: Any, input: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or self._backward_hooks or self._backward_pre_hooks:
        return _column_gather_output_forward(self, input)
    state = self._weft_state
    weight, bias = _weight_and_bias(self, state.transposed)
    parameter = self._parameters["weight"]
    num_features = parameter.shape[1 if state.transposed else 0]
    head = head_of(parameter, weight, bias, state.vocab_start, num_features, state.group_name)
    device_type = input.device.type
    is_autocast = torch.is_autocast_enabled(device_type) and input.is_floating_point()
    return VocabParallelLogits(head, input, torch.get_autocast_dtype(device_type) if is_autocast else None)


def _vocab_embedding_forward(self: Any, input: Tensor) -> Tensor:
    state = self._weft_state
    output = torch.ops.weft.vocab_parallel_embedding(
        input,
        _local_shard_of(self, "weight"),
        state.vocab_start,
        group_name=state.group_name,
        vocab_size=self.num_embeddings,
    )
    if self.padding_idx is None or not output.requires_grad:
        return output
    return torch.where((input == self.padding_idx).unsqueeze(-1), output.detach(), output)  # no gradient for padding


class _VocabEmbedding(nn.Embedding):
    """The base class that `super().forward` finds in a subclass of nn.Embedding."""

    forward = _vocab_embedding_forward


def _fused_forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
    if len(args) + len(kwargs) != 1:
        raise TypeError(
            f"{type(self).__name__}: got {len(args) + len(kwargs)} arguments, but a fused MLP takes one tensor; "
            "replace column_row_mlp by column and row rules for its layers."
        )
    x = args[0] if args else next(iter(kwargs.values()))
    state = self._weft_state
    region = None if state.sequence_role is None else state.sequence_role.region
    mlp = state.mlp
    children = [self._modules[name] for name in mlp.children]
    for name, child, expected in zip(mlp.children, children, state.child_classes, strict=True):
        if type(child) is not expected:
            _raise_changed_child(name, child)
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            own_forward = _plain_forward_of(state.original_class)
            x = x if region is None else region.gather(x)
            return own_forward(self, x) if state.own_scope is None else in_scope(state.own_scope, own_forward, self, x)
    for name, before, now in changes_in(self, state.watched):
        _raise_changed_attribute(self, name, before, now)
    weights_and_biases = [_weight_and_bias(child, child._weft_state.transposed) for child in children]
    w3, b3 = (None, None) if mlp.gate is None else weights_and_biases[1]
    (w1, b1), (w2, b2) = weights_and_biases[0], weights_and_biases[-1]
    options = {
        "activation": state.activation,
        "group_name": state.group_name,
        "recompute": state.recompute,
        "sequence_dim": None if region is None else x.dim() - 2,
        "sequence_size": None if region is None else region.full_length,
    }
    operator = functools.partial(torch.ops.weft.column_row_mlp, x, w1, w2, w3, b1, b2, b3, **options)
    stepped = stepped_mlp_of(self)
    if stepped is None:
        output: Tensor = operator()
        return output
    parameters = [child._parameters["weight"] for child in children]
    return stepped.call(operator, (parameters[0], parameters[-1], None if w3 is None else parameters[1]))


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    shard_of = functools.partial(_local_shard_of, self)
    return experts_forward(self, self._weft_state.experts, shard_of, hidden_states, top_k_index, top_k_weights)


def _dropout_forward(self: Any, input: Tensor) -> Tensor:
    if not self.training or self.p == 0.0:
        return input
    # All ranks draw the same seed; a rank's mask follows from the positions of its tokens in the unsharded sequence.
    # The seed is a tensor `[]`, as in weft.nn.Dropout.
    seed = torch.randint(0, 1 << 62, (), dtype=torch.int64, device=torch.device("cpu"))
    region = self._weft_state.sequence_role.region
    return torch.ops.weft.dropout(
        input, seed, p=self.p, group_name=region.group_name, dim=input.dim() - 2, dim_size=region.full_length
    )


def _shard_dropout_forward(self: Any, input: Tensor) -> Tensor:
    if not self.training or self.p == 0.0:
        return input
    mesh = self._weft_state.mesh
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    sharded = next((each for each in self._weft_state.dropout_inputs if each.matches(input, rank, num_ranks)), None)
    if sharded is None:
        raise ValueError(
            f"a Dropout between column and row layers got {list(input.shape)}, which is not one rank's shard of an "
            "input that it got in verification; give the layers around it the styles column_gather_output and "
            "row_split_input."
        )
    return shard_dropout(input, self.p, sharded, rank, num_ranks)


def _raise_changed_child(name: str, child: nn.Module) -> None:
    if isinstance(child, FSDPModule):
        raise ValueError(
            f"fully_shard was applied to '{name}', a layer of a fused MLP: "
            "apply fully_shard to the MLP itself, which is one unit, and not to its layers."
        )
    raise ValueError(
        f"'{name}', a layer of a fused MLP, was replaced by a {type(child).__name__} after parallelize: "
        "change the model before parallelize."
    )


def _raise_changed_attribute(module: Any, name: str, before: Any, now: Any) -> None:
    state = module._weft_state
    raise ValueError(
        f"'{state.name}', a {state.original_class.__name__}, is a fused MLP and its attribute '{name}' is {now!r}, but "
        f"was {before!r} when the operator was compared with its forward; set it before parallelize, or give its "
        "layers rules (column and row, or column_gather_output and row_split_input), which keep your forward."
    )


@cached
def _plain_forward_of(cls: type[nn.Module], has_local_attributes: bool = False) -> Callable[..., Any]:
    """Return the class's own forward, inside which attributes of replicated parameters are local tensors."""
    own_forward = with_local_attributes(cls.forward) if has_local_attributes else cls.forward

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        enter_forward()
        try:
            return own_forward(self, *args, **kwargs)
        finally:
            exit_forward()

    return forward


def _explained_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def explained_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        with explaining_errors():
            return forward(self, *args, **kwargs)

    return explained_forward


@cached
def _sequence_forward_of(cls: type[nn.Module], has_local_attributes: bool = False) -> Callable[..., Any]:
    """Return `_plain_forward_of(cls)` with the sequence role's operations before and after it."""
    plain = _plain_forward_of(cls, has_local_attributes)

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        role = self._weft_state.inner_role or self._weft_state.sequence_role
        args, kwargs = role.prepare_inputs(args, kwargs)
        return role.finish_output(plain(self, *args, **kwargs))

    return forward


def _getattr_of(cls: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
    own_getattr = cls.__getattr__

    def __getattr__(self: nn.Module, name: str) -> Any:
        value = own_getattr(self, name)
        if not isinstance(value, DTensor) or not inside_forward():
            return value
        state = self.__dict__["_weft_state"]
        # FSDP2, too, reads its shards in a forward.
        if state.style == "gather_weights" and not is_full(value) and value.device_mesh == state.mesh:
            return _gather_parameter(self, name, state)
        if is_full(value):
            sums_gradients = state.style == "replicate_sum_gradients"
            if sums_gradients or (state.sequence_role is not None and state.sequence_role.needs_gradient_sum):
                return _cast(state, torch.ops.weft.copy_to_group(local_of(value), state.group_name))
            return _cast(state, local_of(value))
        return value

    return __getattr__


def _gather_parameter(module: Any, name: str, state: ModuleState) -> Tensor:
    """Return the full parameter; its gradient, equal on all ranks, is sharded again."""
    parameter = module._parameters[name]
    shard = _local_shard_of(module, name)
    dim = longest_dim(parameter)
    full: Tensor = torch.ops.weft.gather_from_group(shard, dim, state.group_name, dim_size=parameter.shape[dim])
    return full


def _flat_weights(self: Any) -> list[Tensor | None]:
    """Return the parameters that nn.RNNBase computes with; its own list of them would be stale."""
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _sequential_getitem(self: Any, idx: int | slice) -> Any:
    """Implement nn.Sequential's indexing; a slice is a plain nn.Sequential, as it has no `_weft_state`."""
    if isinstance(idx, slice):
        return nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
    return nn.Sequential.__getitem__(self, idx)


_STYLED_FORWARDS = {
    "column": _column_forward,
    "column_gather_output": _column_gather_output_forward,
    "row": _row_forward,
    "row_split_input": _row_split_input_forward,
    "vocab_embedding": _vocab_embedding_forward,
    "vocab_head": _vocab_head_forward,
    "experts": _experts_forward,
    "column_row_mlp": _fused_forward,
}


@cached
def parallel_class(
    cls: type[nn.Module],
    style: str,
    sequence_kind: str = "",
    has_precision: bool = False,
    has_local_attributes: bool = False,
    is_shard_dropout: bool = False,
    explains: bool = False,
    is_scope: bool = False,
) -> type[nn.Module]:
    """Return the class that replaces `cls` for modules of a style.

    The forward is one of `_STYLED_FORWARDS`, that of a dropout on shards, or else a wrapper around that of `cls`.

    Args:
        sequence_kind: `SequenceRole.kind`, if activations are sharded along the sequence; else "".
        has_precision: whether the module computes in a dtype of its own.
        has_local_attributes: whether attributes have this rank's values, such as head counts, while its forward runs.
        is_shard_dropout: whether the module is an nn.Dropout whose input is one rank's shard.
        explains: whether its forward explains errors of sharded modules inside.
        is_scope: whether its forward is the scope (see `sharding.scopes`) of column and row layers inside.
    """
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__getattr__": _getattr_of(cls)}
    own_dropout = _shard_dropout_forward if is_shard_dropout else None
    styled = _dropout_forward if sequence_kind == "dropout" else own_dropout or _STYLED_FORWARDS.get(style)
    bases: tuple[type, ...] = (ParallelModule, cls)
    if style == "vocab_embedding" and cls.forward is not nn.Embedding.forward:
        bases, styled = (*bases, _VocabEmbedding), None
    if styled is not None:
        forward = types.FunctionType(styled.__code__, styled.__globals__, styled.__name__)
        namespace["forward"] = functools.update_wrapper(forward, cls.forward)  # keeps the signature
    elif cls.forward is not nn.Module.forward:
        forward_of = _sequence_forward_of if sequence_kind in ("block", "gathers", "whole") else _plain_forward_of
        namespace["forward"] = forward_of(cls, has_local_attributes)
    if is_scope and "forward" in namespace and style != "column_row_mlp":  # a fused MLP's operator calls no layers
        namespace["forward"] = with_scope(namespace["forward"])
    if explains and "forward" in namespace:
        namespace["forward"] = _explained_forward(namespace["forward"])
    if has_precision and (styled is not None or cls.forward is not nn.Module.forward):
        namespace["forward"] = in_precision(namespace["forward"])
    if issubclass(cls, nn.Sequential):
        namespace["__getitem__"] = _sequential_getitem
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    return type(f"Weft{cls.__name__}", bases, namespace)


def set_parallel_class(module: nn.Module, state: ModuleState) -> None:
    """Give a module the class and state of its style."""
    kind = "" if state.sequence_role is None else state.sequence_role.kind
    module.__class__ = parallel_class(
        state.original_class,
        state.style,
        kind,
        state.precision is not None,
        bool(state.local_attributes),
        bool(state.dropout_inputs),
        state.is_root,
        state.own_scope is not None,
    )
    module.__dict__["_weft_state"] = state
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # its inference fast path reads its layers' weights itself
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False  # the same fast path
    elif isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)


def check_no_fsdp_children(name: str, module: nn.Module) -> None:
    for child_name, child in module.named_modules():
        if child_name and isinstance(child, FSDPModule):
            raise ValueError(
                f"parallelize: fully_shard was already applied to '{name}.{child_name}', inside an MLP that is to "
                f"be fused; call parallelize first and apply fully_shard to '{name}' itself, which is one unit."
            )
