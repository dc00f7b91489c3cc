"""Finds the module whose output, or gradient, is the first that is not finite.

Hooks on each module's call look at the inputs, at the outputs and, in the backward, at the gradients of the outputs and
of the parameters, before any of them is averaged with other ranks. Each look is one reduction on the device: no hook
waits for it, and the results are read only when `first` is called. A tensor that several hooks see is read once.

Infinite values with a minus sign count as finite in a forward: masks have them. Deferred logits of a `vocab_head` are
not read, which would gather them, and hooks that `torch.compile` traces do nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from weft.strategy.data_parallel.local import local_shard
from weft.strategy.modules.vocab_head import VocabParallelLogits
from weft.strategy.sharding.state import child_of, original_class, state_of


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value that is not finite came first on a rank.

    text: such as "the output of 'head' (Linear)".
    position: of the hook's call among all calls since `clear`; comparable between ranks that run the same modules.
    is_input: it is a module's input: code outside of modules has made it, or it came from another rank.
    in_backward: it is a gradient.
    """

    text: str
    position: int
    is_input: bool
    in_backward: bool


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Tensors that a hook saw: the largest values, `[]` each, and of gradients the smallest; NaN if an element is."""

    source: Source
    values: list[Tensor]

    def is_bad(self) -> bool:
        if self.source.in_backward:
            return not all(bool(value.isfinite()) for value in self.values)
        return any(bool(value.isnan() | (value == math.inf)) for value in self.values)


class ModuleWatch:
    """Watches modules from now until `remove`; between `clear` and `first`, each call and each gradient is recorded.

    Set `is_active` only while training: hooks record nothing at other times.

    modules: those to watch, by name. The layers of fused MLPs get no hooks, which would prevent fusing: see the MLP.
    parameters: by name; a gradient that is a sum over several uses is seen once, complete.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> None:
        self.is_active = False
        self._seen: list[_Seen] = []
        self._read: Any = WeakIdKeyDictionary()  # tensor -> (its version, its extreme values)
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        fused = _layers_of_fused(modules.values())
        for name, module in modules.items():
            if module not in fused and not isinstance(module, torch.jit.ScriptModule):
                self._watch(name, module)
        for name, parameter in parameters.items():
            self._watch_gradient(name, parameter)

    def clear(self) -> None:
        """Forget all that was recorded."""
        self._seen.clear()
        self._read.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def first(self) -> Source | None:
        """Return where a value that is not finite came first; None: no such value was seen.

        Values of the forward come before gradients: a backward follows a forward that has such values.
        """
        bad = [seen.source for seen in self._seen if seen.is_bad()]
        return min(bad, key=lambda source: (source.in_backward, source.position), default=None)

    def _watch(self, name: str, module: nn.Module) -> None:
        class_name = original_class(module).__name__
        if isinstance(module, FSDPModule):
            class_name = class_name.removeprefix("FSDP")
        text = f"'{name}' ({class_name})" if name else f"the {class_name}"

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_active and not torch.compiler.is_compiling():
                if isinstance(module, FSDPModule):  # its parameters are full only during the forward
                    for own, parameter in module.named_parameters():
                        self._watch_gradient(f"{name}.{own}" if name else own, parameter)
                self._record(f"the input of {text}", (args, kwargs), is_input=True)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.is_active and not torch.compiler.is_compiling():
                self._record(f"the output of {text}", output)
                self._watch_gradient_of(output, f"the gradient of the output of {text}")

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _watch_gradient(self, name: str, parameter: Tensor) -> None:
        if id(parameter) not in self._hooked and parameter.requires_grad:
            self._hooked.add(id(parameter))
            handle = parameter.register_hook(self._gradient_hook(f"the gradient of '{name}'"))
            self._handles.append(handle)

    def _watch_gradient_of(self, output: Any, text: str) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(text))

    def _gradient_hook(self, text: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if self.is_active:
                self._record(text, gradient, in_backward=True)

        return hook

    def _record(self, text: str, tree: Any, *, is_input: bool = False, in_backward: bool = False) -> None:
        # A pipeline's mode intercepts functions between layers; these compute nothing that the model uses.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            values = [value for tensor in _tensors(tree) for value in self._extremes(tensor, in_backward)]
        self._seen.append(_Seen(Source(text, len(self._seen), is_input, in_backward), values))

    def _extremes(self, tensor: Tensor, in_backward: bool) -> tuple[Tensor, ...]:
        """Return the largest value and, in the backward, the smallest; NaN if any value is."""
        version = None if tensor.is_inference() else tensor._version  # inference tensors have none: read each time
        read_version, values = self._read.get(tensor, (None, ()))
        if version is None or version != read_version:
            local = local_shard(tensor)
            if local.numel() > 0:  # a shard of a DTensor may have no elements
                values = tuple(torch.aminmax(local)) if in_backward else (local.amax(),)
            if version is not None:
                self._read[tensor] = (version, values)
        found: tuple[Tensor, ...] = values
        return found


def _layers_of_fused(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the linear layers of the fused MLPs among `modules`."""
    found: set[nn.Module] = set()
    for module in modules:
        state = state_of(module)
        if state is not None and state.mlp is not None:
            found.update(child_of(module, name) for name in state.mlp.children)
    return found


def _tensors(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors with values in nested lists, tuples and dicts."""
    return [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor)
        and leaf.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and not (isinstance(leaf, FakeTensor | VocabParallelLogits) or leaf.is_meta or leaf.is_sparse)
        and leaf.numel() > 0
    ]
