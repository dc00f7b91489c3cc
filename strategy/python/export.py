"""export_local: a copy of a parallelized model with plain local parameters, for TorchScript and deployment."""

from __future__ import annotations

import copy
import functools
import linecache
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.nn import ColumnLinear, RowLinear, VocabParallelEmbedding
from weft.strategy.experts.layer import ShardedExperts
from weft.strategy.export_layers import ColumnLayer, RowLayer
from weft.strategy.recognition.linears import COLUMN_STYLES, ROW_STYLES, features
from weft.strategy.sharding.state import MlpLayers, ModuleState, child_of, remove_state, state_of

_Module = TypeVar("_Module", bound=nn.Module)


def export_local(model: nn.Module) -> nn.Module:
    """Return a copy of a parallelized model that holds this rank's shards as plain parameters, under unchanged names.

    Weights that are gathered for each forward are full in the copy, so all ranks of the group must call this.
    Sharded layers become weft.nn modules or layers of `export_layers`, a fused MLP a module that calls the fused
    operator; all other modules get their original class back. The copy computes the same as the model on this rank of
    the same group, and can be scripted if the original classes can. After loading it in another job, bind it to that
    job's group by `weft.nn.rebind_group`.

    Raises:
        ValueError: parameters are also sharded by fully_shard, or on the meta device; experts are sharded; a module
            computes in a way that a plain copy cannot: on a shard of the sequence, in a precision of its own, with
            summed gradients, or with dropout on shards in train mode; an embedding has a forward of its own, or a
            trainable weight with a padding row.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"export_local: '{name}' is sharded by fully_shard, too; export before fully_shard, or load its "
                "checkpoint into a model that is only parallelized."
            )
        state = state_of(module)
        if isinstance(module, ShardedExperts) or (state is not None and state.style == "experts"):
            raise ValueError(
                f"export_local: the experts of '{name}' are sharded, and tokens travel between the ranks of their "
                "experts, which a plain copy cannot do; save the weights by weft.save_pretrained and load them into an "
                "unsharded model, or shard the other modules alone."
            )
    memo: dict[int, object] = {}
    in_full = {
        id(parameter)
        for module in model.modules()
        if (state := state_of(module)) is not None and state.style == "gather_weights"
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"export_local: '{name}' is on the meta device; initialize or load its values first.")
        if isinstance(parameter, DTensor):
            local = (parameter.full_tensor() if id(parameter) in in_full else parameter._local_tensor).detach().clone()
            memo[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    copied = copy.deepcopy(model, memo)
    # By the copy of a module; of the original, whose weights have the shapes of the unsharded model.
    full_features = {
        id(copied.get_submodule(name)): _full_features(module, state)
        for name, module in model.named_modules()
        if (state := state_of(module)) is not None
    }
    return _restore(copied, full_features, {})


def _restore(
    module: nn.Module, full_features: dict[int, tuple[int, int] | None], done: dict[int, nn.Module]
) -> nn.Module:
    """Return the module with its original class, or its replacement; a module with two names is restored once."""
    if id(module) in done:
        return done[id(module)]
    state = state_of(module)
    if state is not None:
        module.__class__ = state.original_class
        remove_state(module)
        for attribute, value in state.local_attributes:  # a plain copy has no per-forward values
            setattr(module, attribute, value)
    result = done[id(module)] = module if state is None else _replacement(module, state, full_features[id(module)])
    for name, child in result._modules.items():
        if child is not None:
            result._modules[name] = _restore(child, full_features, done)
    if isinstance(result, nn.RNNBase):
        result._init_flat_weights()
    return result


def _full_features(module: nn.Module, state: ModuleState) -> tuple[int, int] | None:
    """Return the unsharded (in, out) features of a column, row or vocab_head layer; None for other styles."""
    if state.style not in (*COLUMN_STYLES, *ROW_STYLES, "vocab_head"):
        return None
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    conv1d: Any = module
    return features(module)[0], conv1d.nf


def _replacement(module: nn.Module, state: ModuleState, full_features: tuple[int, int] | None) -> nn.Module:
    if state.sequence_role is not None:
        raise ValueError(
            f"export_local: a {state.original_class.__name__} computes on a shard of the sequence; parallelize the "
            "model without sequence_parallel for export."
        )
    if state.precision is not None:
        raise ValueError(
            f"export_local: a {state.original_class.__name__} computes in {state.precision} by its rule, which a plain "
            "copy would not; leave precision out of the plan for export."
        )
    if full_features is not None:
        return _linear(module, state, full_features)
    if state.style == "replicate_sum_gradients" and any(p.requires_grad for p in module.parameters(recurse=False)):
        raise ValueError(
            f"export_local: a {state.original_class.__name__} sums its gradients over the ranks, which a plain copy "
            "would not do; freeze it by requires_grad_(False)."
        )
    layer: Any = module
    if state.dropout_inputs and layer.p > 0 and layer.training:
        raise ValueError(
            "export_local: a Dropout between column and row layers draws the mask of the full tensor, which a plain "
            "copy cannot do; call eval() before the export, or set its p to 0."
        )
    if state.style == "vocab_embedding":
        _check_embedding(module)
        new = _with_parameters_of(VocabParallelEmbedding, module)
        new.num_embeddings, new.embedding_dim = layer.num_embeddings, layer.embedding_dim
        new.group_name = state.group_name
        new.vocab_start = state.vocab_start
        return new
    if state.style == "column_row_mlp":
        assert state.mlp is not None
        transposed = tuple(_is_transposed(child_of(module, name)) for name in state.mlp.children)
        fused: Any = _with_parameters_of(_fused_class(state.mlp, transposed), module)
        fused.group_name, fused.activation, fused.recompute = state.group_name, state.activation, state.recompute
        layers = (name for name in module._modules if name in state.mlp.children)  # in the order of the state dict
        for name in layers:
            fused._modules[name] = module._modules[name]
        return cast("nn.Module", fused)
    return module


def _is_transposed(layer: nn.Module) -> bool:
    state = state_of(layer)
    return state is not None and state.transposed


def _linear(module: nn.Module, state: ModuleState, full_features: tuple[int, int]) -> nn.Module:
    new: Any
    is_row, has_full_activations = state.style in ROW_STYLES, state.style not in ("column", "row")
    if state.transposed or has_full_activations:
        new = _with_parameters_of(RowLayer if is_row else ColumnLayer, module)
        setattr(new, "splits_input" if is_row else "gathers_output", has_full_activations)
        new.transposed = state.transposed
    else:
        new = _with_parameters_of(RowLinear if is_row else ColumnLinear, module)
    new.in_features, new.out_features = full_features
    new.group_name = state.group_name
    return cast("nn.Module", new)


def _check_embedding(module: Any) -> None:
    """Raise ValueError for an embedding, restored to its original class, that does more than VocabParallelEmbedding."""
    if type(module).forward is not nn.Embedding.forward:
        raise ValueError(
            f"export_local: a {type(module).__name__} has a forward of its own around its table, which the copy would "
            "lose; give it the style 'replicate'."
        )
    if module.padding_idx is not None and module.weight.requires_grad:
        raise ValueError(
            f"export_local: an {type(module).__name__} with padding_idx={module.padding_idx} gives that row no "
            "gradient, and the copy would give it one; freeze it by requires_grad_(False)."
        )


def _with_parameters_of(cls: type[_Module], module: nn.Module) -> _Module:
    """Return a `cls` around a module's parameters; no other tensor is created."""
    new = cls.__new__(cls)
    nn.Module.__init__(new)
    new.training = module.training
    for name, parameter in module._parameters.items():
        new.register_parameter(name, parameter)
    return new


_FUSED_SOURCE = '''
class FusedMlp(torch.nn.Module):
    """A fused MLP under the names of the module it was exported from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weft.column_row_mlp(
            x, {arguments}, activation=self.activation, group_name=self.group_name, recompute=self.recompute
        )
'''


@functools.cache
def _fused_class(mlp: MlpLayers, transposed: tuple[bool, ...]) -> type[nn.Module]:
    """Return a class that is generated for these child names, with source code that TorchScript can read."""

    def layer(name: str) -> str:
        return f"getattr(self, {name!r})"

    weights = {
        name: f"{layer(name)}.weight" + (".t()" if is_transposed else "")
        for name, is_transposed in zip(mlp.children, transposed, strict=True)
    }
    first, down = mlp.column_layers[0], mlp.down
    gated = mlp.gate is not None
    arguments = ", ".join(
        (
            weights[first],
            weights[down],
            weights[mlp.up] if gated else "None",
            f"{layer(first)}.bias",
            f"{layer(down)}.bias",
            f"{layer(mlp.up)}.bias" if gated else "None",
        )
    )
    source = _FUSED_SOURCE.format(arguments=arguments)
    file_name = f"<weft FusedMlp {'/'.join(mlp.children)} {transposed}>"
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    namespace: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(compile(source, file_name, "exec"), namespace)
    cls: type[nn.Module] = namespace["FusedMlp"]
    return cls
