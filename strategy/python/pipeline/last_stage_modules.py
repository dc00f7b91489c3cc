"""Keeps the parameters outside of a module in stages only on the rank of the last stage.

A module in stages is one whose layers are divided into stages. A root around it, such as a LightningModule, may have
further modules and parameters, which are *beside* the module in stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from weft.strategy.pipeline.fake_mode import FakeMode
from weft.strategy.pipeline.staged_model import fake_copy
from weft.strategy.recognition.assignments import join
from weft.strategy.sharding.remote_layers import RemoteLayer
from weft.strategy.sharding.state import child_of


class LastStageModules:
    """Removes the parameters beside a module in stages from ranks without the last stage, in place.

    Placeholders replace the modules beside the module in stages that have parameters, and the parameters that the
    ancestors of the module in stages hold directly.

    root: for example a LightningModule.
    name: the name of the module in stages, in `root`. "": `root` itself, which has no modules beside it.
    has_last_stage: whether this rank has the last stage and so keeps all parameters.
    """

    def __init__(self, root: nn.Module, name: str, has_last_stage: bool) -> None:
        self._root = root
        self._name = name
        fake_mode = FakeMode()
        placeholders = {
            own_name: RemoteLastStageModule(own_name, name, fake_copy(module, module.buffers(), fake_mode))
            for own_name, module in _modules_beside(root, name)
            if any(True for _ in module.parameters())
        }
        if has_last_stage:  # this rank made the placeholders, too, so that all ranks raise if a copy fails
            return
        for own_name, module in placeholders.items():
            parent, _, child = own_name.rpartition(".")
            root.get_submodule(parent)._modules[child] = module
        for own_name, _ in list(_direct_parameters(root, name)):
            parent, _, child = own_name.rpartition(".")
            holder = root.get_submodule(parent)
            del holder._parameters[child]
            holder.__dict__[child] = RemoteParameter(own_name, name)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's current parameters by name; there are none on ranks without the last stage."""
        return dict(_parameters_beside(self._root, self._name))

    def forbidding_use(self) -> TorchFunctionMode:
        """Return a mode in which using `parameters` raises.

        Use it for the code of a step before the call of the module in stages: ranks without these parameters run this
        code, too.
        """
        return _ForbiddenUse(self.parameters, self._name)


def check_not_shared(root: nn.Module, name: str) -> None:
    """Raise ValueError for a parameter both inside the module to be split and beside it; call before the split."""
    inside = {id(p): n for n, p in root.get_submodule(name).named_parameters(remove_duplicate=False)}
    for own_name, parameter in _parameters_beside(root, name):
        if id(parameter) in inside:
            raise ValueError(
                f"pipeline: '{own_name}' and '{join(name, inside[id(parameter)])}' are one parameter, and '{name}' is "
                f"to be divided into stages; put both inside of '{name}'."
            )


class RemoteLastStageModule(RemoteLayer):
    """Stands for a module beside the one in stages, on a rank without the last stage."""

    def __init__(self, name: str, staged_name: str, skeleton: nn.Module) -> None:
        super().__init__(name, stage=-1, skeleton=skeleton)  # -1: the last
        self.__dict__["_weft_beside"] = staged_name

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._raise_unavailable("", RuntimeError)

    def extra_repr(self) -> str:
        return f"{type(self._weft_skeleton).__name__} of the last stage"

    def _raise_unavailable(self, what: str, error: type[Exception]) -> NoReturn:
        raise _unavailable_error(self._weft_name, self._weft_beside, error)


class RemoteParameter(Tensor):
    """A parameter beside the module in stages, on a rank without the last stage: any use of it raises."""

    @staticmethod
    def __new__(cls, name: str, staged_name: str) -> RemoteParameter:
        parameter = torch.empty(0, device="meta").as_subclass(cls)
        parameter.__dict__.update(_weft_name=name, _weft_beside=staged_name)
        return parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        names = next(leaf.__dict__ for leaf in leaves if isinstance(leaf, cls))
        raise _unavailable_error(names["_weft_name"], names["_weft_beside"], RuntimeError)


class _ForbiddenUse(TorchFunctionMode):
    def __init__(self, parameters: dict[str, nn.Parameter], staged_name: str) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._staged_name = staged_name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if id(leaf) in self._names:
                raise _unavailable_error(self._names[id(leaf)], self._staged_name, RuntimeError)
        return func(*args, **(kwargs or {}))


def _unavailable_error(name: str, staged_name: str, error: type[Exception]) -> Exception:
    return error(
        f"pipeline: '{name}' is outside of '{staged_name}' and therefore only on the last stage; use it in a step "
        f"after the call of '{staged_name}', move it into '{staged_name}', or divide the module that holds both."
    )


def _path(name: str) -> list[str]:
    return name.split(".") if name else []


def _modules_beside(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the outermost modules that neither hold the module `name` nor are inside of it."""
    holder, prefix = root, ""
    for part in _path(name):
        for child_name, child in holder._modules.items():
            if child_name != part and child is not None:
                yield join(prefix, child_name), child
        holder, prefix = child_of(holder, part), join(prefix, part)


def _direct_parameters(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of the parameters that the ancestors of the module `name` hold directly."""
    holder, prefix = root, ""
    for part in _path(name):
        for own_name, parameter in holder._parameters.items():
            if parameter is not None:
                yield join(prefix, own_name), parameter
        holder, prefix = child_of(holder, part), join(prefix, part)


def _parameters_beside(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in _modules_beside(root, name):
        for own_name, parameter in module.named_parameters():
            yield join(prefix, own_name), parameter
    yield from _direct_parameters(root, name)
