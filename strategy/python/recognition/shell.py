"""Makes shells: copies of modules with the same code and replaced tensors, on which a forward can be tried."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.strategy.deferred import full_value_of, is_deferred
from weft.strategy.sharding.state import original_class

_HOOK_DICTS = tuple(
    name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, OrderedDict)
)

_REPLACED = ("_parameters", "_buffers", "_modules", "_weft_state", *_HOOK_DICTS)


def shell_of(
    module: nn.Module,
    parameters: dict[int, Tensor],
    buffers: dict[int, Tensor],
    memo: dict[int, Any] | None = None,
) -> nn.Module:
    """Return a copy of a module with its original class and replaced parameters and buffers.

    `parameters` and `buffers` map the id of each of the module's tensors to its replacement. Plain attributes are the
    same objects, except that tensors (converted to the CPU and float64), lists and dicts are copied, so that the
    copy's forward does not change those of the original. Hooks are left out: the copy's forward runs no user code
    except that of the module itself. The compiled call of a module on which `compile` was called is left out, too: it
    would call the original. A module that is used twice is copied once; `memo` maps the ids of copied modules, lists
    and dicts to their copies.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        made: nn.Module = memo[id(module)]
        return made
    copy = memo[id(module)] = object.__new__(original_class(module))
    copy.__dict__ = {n: _attribute_copy(value, memo) for n, value in module.__dict__.items() if n not in _REPLACED}
    for name in _HOOK_DICTS:
        copy.__dict__[name] = OrderedDict()
    copy.__dict__["_parameters"] = {
        name: None if value is None else parameters[id(value)] for name, value in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if value is None else buffers[id(value)] for name, value in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else shell_of(child, parameters, buffers, memo)
        for name, child in module._modules.items()
    }
    copy.__dict__.pop("_compiled_call_impl", None)
    if is_compile_wrapper(module):
        copy.__dict__["forward"] = copy._modules["_orig_mod"]
    if isinstance(module, nn.RNNBase):
        copy.__dict__["_flat_weights"] = [copy._parameters.get(name) for name in module._flat_weights_names]
    return copy


def is_compile_wrapper(module: nn.Module) -> bool:
    """Return whether `torch.compile(another_module)` has returned this module."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # not imported before the first torch.compile
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def _attribute_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a tensor that `_values_of` has converted, a copied list or dict, or any other object unchanged.

    Each list or dict is copied only once.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _values_of(value).clone()
    if type(value) not in (list, dict):
        return value
    if id(value) not in memo:
        memo[id(value)] = copy = type(value)()
        if type(value) is list:
            copy.extend(_attribute_copy(item, memo) for item in value)
        else:
            copy.update({key: _attribute_copy(item, memo) for key, item in value.items()})
    return memo[id(value)]


def _values_of(tensor: Tensor) -> Tensor:
    """Return the values on the CPU, floating ones in float64; zeros for a meta or fake tensor."""
    if is_deferred(tensor):
        tensor = full_value_of(tensor)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    tensor = tensor.detach().cpu()
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def buffer_copies(module: nn.Module) -> dict[int, Tensor]:
    """Return copies of the buffers by their ids, for `shell_of`, on the CPU, floating ones in float64."""
    return {id(buffer): _values_of(buffer).clone() for buffer in module.buffers()}


def plain_tensors(shell: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the tensors that modules keep outside of parameters and buffers, by module and attribute.

    Lists, tuples and dicts in attributes are searched, too.
    """
    found: dict[tuple[str, str], Tensor] = {}

    def collect(module: str, place: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[module, place] = value
        elif type(value) in (list, tuple):
            for index, item in enumerate(value):
                collect(module, f"{place}[{index}]", item)
        elif type(value) is dict:
            for key, item in value.items():
                collect(module, f"{place}[{key!r}]", item)

    for name, module in shell.named_modules():
        for attribute, value in module.__dict__.items():
            if attribute not in _REPLACED:
                collect(name, attribute, value)
    return found


def random_input(shape: Sequence[int], scale: float, seed: int) -> Tensor:
    """Return normal float64 values with the standard deviation `scale`, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator).mul_(scale)


def random_parameter(shape: Any, fan_in: int, seed: int) -> Tensor:
    """Return a random float64 parameter; a layer with it preserves the scale of its input."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).div_(max(fan_in, 1) ** 0.5).requires_grad_()


@contextlib.contextmanager
def isolated_execution() -> Iterator[None]:
    """Inside, gradients are on, CPU autocast and warnings are off, and new tensors are float64 on the CPU.

    At the end, the states of the random generators of torch (on the CPU), Python and numpy are restored.
    """
    state, dtype = random.getstate(), torch.get_default_dtype()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=()):
        try:
            torch.set_default_dtype(torch.float64)
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                with _on_cpu(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors are on the CPU.

    If the CPU is the default, the context does nothing: a device context slows every call.
    """
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.__dict__["forward"] = forward
