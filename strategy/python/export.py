"""export_local: a copy of a parallelized model with plain local parameters, for TorchScript and deployment."""

from __future__ import annotations

import copy
import functools
import linecache

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.nn import ColumnLinear, RowLinear, VocabParallelEmbedding
from weft.strategy.linears import features
from weft.strategy.state import MlpParts, ModuleState, remove_state, state_of


class ColumnConv1D(nn.Module):
    """ColumnLinear with the weight of GPT-2's Conv1D, `[in, out_local]`."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weft.column_linear(x, self.weight.t(), self.bias, group_name=self.group_name)


class RowConv1D(nn.Module):
    """RowLinear with the weight of GPT-2's Conv1D, `[in_local, out]`."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weft.row_linear(x, self.weight.t(), self.bias, group_name=self.group_name)


def export_local(model: nn.Module) -> nn.Module:
    """A copy of a parallelized model that holds this rank's parts as plain parameters, under unchanged names.

    Sharded layers become weft.nn modules (a fused MLP one that calls the fused operator), all others get their own
    class back. The copy runs on this rank of the same group like the model, can be scripted, and after loading in
    another job is bound to that job's group by `weft.nn.rebind_group`.

    Raises:
        ValueError: parameters are also sharded over another axis, or on the meta device.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"export_local: '{name}' is sharded by fully_shard, too; export before fully_shard, or load its "
                "checkpoint into a model that is only parallelized."
            )
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"export_local: '{name}' is on the meta device; give the model its values first.")
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor.detach().clone()
            memo[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    return _restore(copy.deepcopy(model, memo), {})


def _restore(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    """The module with its own class, or what takes its place; shared modules stay shared."""
    if id(module) in done:
        return done[id(module)]
    state = state_of(module)
    full = None if state is None else _full_features(module, state)
    if state is not None:
        module.__class__ = state.original_class
        remove_state(module)
    result = done[id(module)] = module if state is None else _replacement(module, state, full)
    for name, child in result._modules.items():
        if child is not None:
            result._modules[name] = _restore(child, done)
    if isinstance(result, nn.RNNBase):
        result._init_flat_weights()
    return result


def _full_features(module: nn.Module, state: ModuleState) -> tuple[int, int] | None:
    """(in, out) of the whole layer."""
    if state.style not in ("column", "row"):
        return None
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return features(module)


def _replacement(module: nn.Module, state: ModuleState, full: tuple[int, int] | None) -> nn.Module:
    if state.sequence is not None:
        raise ValueError(
            f"export_local: a {state.original_class.__name__} works on a part of the sequence; parallelize the model "
            "without sequence_parallel for export."
        )
    if state.style in ("column", "row"):
        if state.transposed:
            cls: type[nn.Module] = ColumnConv1D if state.style == "column" else RowConv1D
            new = _bare(cls, module)
        else:
            cls = ColumnLinear if state.style == "column" else RowLinear
            new = _bare(cls, module)
            new.in_features, new.out_features = full
        new.group_name = state.group_name
        return new
    if state.style == "vocab_embedding":
        new = _bare(VocabParallelEmbedding, module)
        new.num_embeddings, new.embedding_dim = module.num_embeddings, module.embedding_dim
        new.group_name = state.group_name
        new.vocab_start = state.vocab_start
        return new
    if state.style == "column_row_mlp":
        transposed = tuple(state_of(module._modules[name]).transposed for name in state.mlp.children)
        new = _bare(_fused_class(state.mlp, transposed), module)
        new.group_name, new.activation, new.recompute = state.group_name, state.activation, state.recompute
        layers = (name for name in module._modules if name in state.mlp.children)  # in the order of the state dict
        for name in layers:
            new._modules[name] = module._modules[name]
        return new
    return module


def _bare(cls: type[nn.Module], module: nn.Module) -> nn.Module:
    """A `cls` around the parameters a module has; no other tensor is made."""
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
def _fused_class(mlp: MlpParts, transposed: tuple[bool, ...]) -> type[nn.Module]:
    """A class whose source TorchScript can read, written for these child names."""

    def layer(name: str) -> str:
        return f"getattr(self, {name!r})"

    weights = {
        name: f"{layer(name)}.weight" + (".t()" if is_transposed else "")
        for name, is_transposed in zip(mlp.children, transposed, strict=True)
    }
    first, down = mlp.columns[0], mlp.down
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
    namespace = {"torch": torch, "__name__": __name__}
    exec(compile(source, file_name, "exec"), namespace)
    cls: type[nn.Module] = namespace["FusedMlp"]
    return cls
