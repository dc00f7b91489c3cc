"""Runs a module's own code on a copy without weights.

The output of every linear layer, convolution and embedding is drawn at random instead of computed. So the code between
these layers runs on real values (masks, positions, caches, views, norms), and only activations take memory: a model
without values, or one that does not fit into memory, runs, too. Modules with experts are left out. The seed of an
output is the name of the layer and the number of its call, so two runs of one module get the same values.

Weights that code reads without calling their layer are noted: only layers that are called can be sharded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.strategy.experts.recognition import layout_of
from weft.strategy.experts.stand_in import combine_without_experts
from weft.strategy.recognition.linears import features, why_no_linear, why_no_vocab_embedding
from weft.strategy.recognition.shell import buffer_copies, is_compile_wrapper, plain_tensors, shell_of
from weft.strategy.sharding.shard_dropout import ShardedDim, shard_dropout
from weft.strategy.sharding.state import original_class

_MAX_DRAWN = 1 << 16  # elements of a parameter drawn one by one; a larger parameter repeats one row
_PERIOD = 65_521  # elements after which draws repeat: a prime, so that no two heads or rows are equal
_CONVOLUTIONS = {
    cls.forward: cls
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
}


class UnreadWeight(Tensor):
    """Stands for a weight of a layer that is not computed. Operations on its values add `owner` to `read_ids`."""

    read_ids: set[int]
    owner: int  # the id of the parameter that it stands for

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, UnreadWeight):
                    each.read_ids.add(each.owner)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "is_mps")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.get_device),
    *(Tensor.data_ptr, Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset),
}


def _is_convolution(layer: nn.Module) -> bool:
    return original_class(layer).forward in _CONVOLUTIONS and "forward" not in layer.__dict__


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a linear layer: its input `[..., in]` and its output `[..., out]`, a leaf of the autograd graph."""

    layer: str
    input: Tensor
    output: Tensor


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a module that are not computed: by the id of each, its name below the module."""

    linears: dict[int, str]
    others: dict[int, str]  # embeddings and convolutions

    @classmethod
    def of(cls, module: nn.Module) -> Layers:
        linears, others = {}, {}
        for name, layer in module.named_modules():
            if why_no_linear(layer) is None:
                linears[id(layer)] = name
            elif why_no_vocab_embedding(layer) is None or _is_convolution(layer):
                others[id(layer)] = name
        return cls(linears, others)


class _DrawnEmbedding(nn.Embedding):
    """The base class that makes `super().forward` in the copy of a subclassed embedding return the drawn output."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.__dict__["_weft_drawn_forward"](input)
        return output


def drawn(shape: Any, *seed: int, scale: float = 1.0) -> Tensor:
    """Return normal float64 values determined by the seed; a large tensor repeats its first values."""
    number = functools.reduce(lambda a, b: (a * 1_000_003 + b) % (1 << 62), seed, 12345)
    size = math.prod(shape)
    values = torch.empty(size, dtype=torch.float64)
    first = values[:_PERIOD]
    torch.randn(first.shape, out=first, generator=torch.Generator().manual_seed(number))
    first.mul_(scale)
    for start in range(_PERIOD, size, _PERIOD):
        values[start : start + _PERIOD] = first[: size - start]
    return values.view(shape)


def placeholder_values(parameter: Tensor, seed: int, force: bool = False) -> Tensor:
    """Return random values of a parameter's shape around 0.75, like the weights of norms and scales; integers are 0.

    A large parameter repeats one row, unless `force` is set.
    """
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    is_large = parameter.numel() > _MAX_DRAWN and not force
    values = drawn(parameter.shape[-1:] if is_large else parameter.shape, seed, 7, scale=0.5).add_(0.75)
    return (values.expand(parameter.shape) if is_large else values).requires_grad_()


class Weightless:
    """Runs of one module without its weights.

    Args:
        module: any module; it is not changed.
        scale: the standard deviation of the layers' outputs.
        full_values: draw all rows of parameters outside the layers, however large; False: large ones repeat one row.
    """

    def __init__(self, module: nn.Module, scale: float = 1.0, full_values: bool = False) -> None:
        self.module = module
        self.layers = Layers.of(module)
        self.scale = scale
        self.read: set[int] = set()  # the ids of parameters that code has read without calling their layer
        self.called: set[int] = set()  # the ids of layers that were called
        self.values = self._values(full_values)
        self.parameters: dict[int, Tensor] = {
            key: value for key, value in self.values.items() if not isinstance(value, UnreadWeight)
        }

    def _values(self, full_values: bool) -> dict[int, Tensor]:
        values: dict[int, Tensor] = {}
        for layer in self.module.modules():
            if id(layer) in self.layers.linears or id(layer) in self.layers.others:
                for parameter in layer._parameters.values():
                    if parameter is not None:
                        values[id(parameter)] = self._unread_weight(parameter)
        for seed, parameter in enumerate(self.module.parameters()):
            if id(parameter) not in values:
                values[id(parameter)] = placeholder_values(parameter, seed, full_values)
        return values

    def _unread_weight(self, parameter: Tensor) -> Tensor:
        dtype = torch.float64 if parameter.is_floating_point() else parameter.dtype
        value = torch.full((1,) * parameter.dim(), 0.5).to(dtype).expand(parameter.shape).as_subclass(UnreadWeight)
        value.read_ids, value.owner = self.read, id(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return value.requires_grad_(parameter.is_floating_point())

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        training: bool = True,
        replace: Mapping[str, Callable[[int, Tensor], Tensor]] | None = None,
        wrap: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]] | None = None,
        shard_context: ShardContext | None = None,
    ) -> Run:
        """Run the module's own forward on these arguments; errors of its code are not caught.

        Args:
            replace: by the name of a linear layer, a function that gets the number of its call and the drawn output and
                returns the output to use, which may have fewer features.
            wrap: a function that gets a module's name, its copy and the copy's forward, and returns the forward to use;
                called for each module whose own code runs.
            shard_context: the full run, and the rank whose shard this run computes; dropouts with a sharded input use
                that rank's shard of the full mask.
        """
        shell = shell_of(self.module, self.values, buffer_copies(self.module))
        run = Run([], {})
        before = plain_tensors(shell)
        try:
            self._replace_forwards(shell, run, training, replace or {}, wrap, shard_context)
            run.output = shell(*args, **kwargs)
        finally:  # a forward refers to its copy and to the run: only the garbage collector would free their tensors
            for copy in shell.modules():
                copy.__dict__.pop("forward", None)
                copy.__dict__.pop("_weft_drawn_forward", None)
        after = plain_tensors(shell)
        run.stored_tensors = {key: value for key, value in after.items() if before.get(key) is not value}
        run.buffers = dict(shell.named_buffers())
        return run

    def _replace_forwards(
        self,
        shell: nn.Module,
        run: Run,
        training: bool,
        replace: Mapping[str, Callable[[int, Tensor], Tensor]],
        wrap: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]] | None,
        shard_context: ShardContext | None,
    ) -> None:
        originals = dict(self.module.named_modules())
        counts: dict[str, int] = {}
        for name, copy in shell.named_modules():
            original = originals[name]
            own_forward = types.MethodType(type(copy).forward, copy)
            copy.__dict__["training"] = training
            if id(original) in self.layers.linears:
                copy.__dict__["forward"] = self._linear_forward(
                    name, original, run, counts, replace.get(name), shard_context
                )
            elif id(original) in self.layers.others:
                drawn_forward = self._other_forward(name, original, counts)
                if type(copy).forward is nn.Embedding.forward or _is_convolution(original):
                    copy.__dict__["forward"] = drawn_forward
                else:
                    copy.__class__ = type(type(copy).__name__, (type(copy), _DrawnEmbedding), {})
                    copy.__dict__["_weft_drawn_forward"] = drawn_forward
            elif layout_of(original) is not None:
                copy.__dict__["forward"] = combine_without_experts
            elif type(copy).forward is nn.Dropout.forward and "forward" not in original.__dict__:
                copy.__dict__["forward"] = self._dropout_forward(name, cast("nn.Dropout", copy), run, shard_context)
            elif "forward" in original.__dict__ and not is_compile_wrapper(original):
                raise ValueError(f"the forward of '{name}' was replaced on the instance")
            elif wrap is not None and type(copy).forward is not nn.Module.forward:
                wrapper = wrap(name, copy, own_forward)
                copy.__dict__["forward"] = wrapper if wrapper is own_forward else functools.wraps(own_forward)(wrapper)

    def _dropout_forward(
        self, name: str, copy: nn.Dropout, run: Run, shard_context: ShardContext | None
    ) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            number = len(run.dropouts)
            run.dropouts.append((name, tuple(input.shape)))
            if shard_context is not None:
                full = (
                    shard_context.run.dropouts[number][1]
                    if number < len(shard_context.run.dropouts)
                    else tuple(input.shape)
                )
                sharded = ShardedDim.from_shapes(full, input.shape, shard_context.num_ranks)
                run.sharded_dropouts.setdefault(name, set()).add(sharded)
                if sharded is not None and copy.training and copy.p > 0:
                    return shard_dropout(input, copy.p, sharded, shard_context.rank, shard_context.num_ranks)
            return torch.nn.functional.dropout(input, copy.p, copy.training, copy.inplace)

        return forward

    def _draw(self, name: str, layer: nn.Module, shape: Any, counts: dict[str, int]) -> tuple[int, Tensor]:
        """Return the number of a layer's call, and its random output."""
        number = counts.get(name, 0)
        counts[name] = number + 1
        self.called.add(id(layer))
        # The seed depends on the layer's name, so that the layer gets the same values in all runs of the module.
        return number, drawn(shape, zlib.crc32(name.encode()), number, scale=self.scale)

    def _linear_forward(
        self,
        name: str,
        layer: nn.Module,
        run: Run,
        counts: dict[str, int],
        replacement: Callable[[int, Tensor], Tensor] | None,
        shard_context: ShardContext | None,
    ) -> Callable[[Tensor], Tensor]:
        fan_in, fan_out = features(layer)
        full_calls = [] if shard_context is None else [c for c in shard_context.run.calls if c.layer == name]

        def forward(input: Tensor) -> Tensor:
            if input.shape[-1] != fan_in and replacement is None:
                raise ValueError(f"'{name}' got {input.shape[-1]} features and takes {fan_in}")
            shape = (*input.shape[:-1], fan_out)
            number = counts.get(name, 0)
            if number < len(full_calls) and full_calls[number].output.shape == shape:
                # The full run drew the same values; to copy them takes less time than to draw them again.
                counts[name] = number + 1
                output = full_calls[number].output.detach().clone()
            else:
                number, output = self._draw(name, layer, shape, counts)
            if replacement is not None:
                output = replacement(number, output)
            output = output.requires_grad_()
            run.calls.append(LayerCall(name, input, output))
            return output.to(input.dtype)

        return forward

    def _other_forward(self, name: str, layer: nn.Module, counts: dict[str, int]) -> Callable[[Tensor], Tensor]:
        table: Any = layer  # an embedding, if it is no convolution
        if _is_convolution(layer):
            shapes = {id(p): torch.empty(p.shape, dtype=torch.float64, device="meta") for p in layer.parameters()}
            on_meta = shell_of(layer, shapes, {})

        def forward(input: Tensor, *args: Any) -> Tensor:
            if _is_convolution(layer):
                shape = type(on_meta).forward(on_meta, input.to("meta", torch.float64), *args).shape
            elif input.is_floating_point():
                raise ValueError(f"'{name}' got floating values and takes the indices of its rows")
            elif input.numel() and not 0 <= int(input.min()) <= int(input.max()) < table.num_embeddings:
                raise ValueError(f"'{name}' got indices beyond its {table.num_embeddings} rows")
            else:
                shape = torch.Size((*input.shape, table.embedding_dim))
            return self._draw(name, layer, shape, counts)[1].requires_grad_()

        return forward


@dataclasses.dataclass(frozen=True)
class ShardContext:
    """The full run, and the rank whose shard another run computes."""

    run: Run
    rank: int
    num_ranks: int


@dataclasses.dataclass
class Run:
    """The result of one run: the calls of linear layers in their order, and the output.

    buffers: by name, after the run.
    stored_tensors: tensors that the run stored in plain attributes of modules, by module and attribute.
    dropouts: the name and the input's shape of each call of an nn.Dropout.
    sharded_dropouts: in a run of one rank's shard, by the name of an nn.Dropout, the sharded dims of its inputs; None
    for a full input.
    """

    calls: list[LayerCall]
    output: Any
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    stored_tensors: dict[tuple[str, str], Tensor] = dataclasses.field(default_factory=dict)
    dropouts: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    sharded_dropouts: dict[str, set[ShardedDim | None]] = dataclasses.field(default_factory=dict)
