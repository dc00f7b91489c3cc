"""A digest of a dry run: trainings with the same one have the same modules, operators and peaks of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class OperatorTrace:
    """Hashes the modules of a model, and calls of operators with the shapes, strides and dtypes of their arguments.

    Values of floats, such as learning rates, do not matter.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add_modules(self, model: nn.Module) -> None:
        for name, module in model.named_modules(remove_duplicate=False):
            self._add(f"{name}:{type(module).__module__}.{type(module).__qualname__}")
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            self._add(f"{name}:{_text(tensor)}{tensor.requires_grad}")

    def add_call(self, func: Any, args: Any, kwargs: Any) -> None:
        self._add(f"{func}({','.join(map(_text, tree_leaves((args, kwargs))))})")

    def add_bytes(self, phases: Mapping[str, Mapping[str, int]]) -> None:
        self._add(repr({name: dict(usage) for name, usage in phases.items()}))

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _add(self, text: str) -> None:
        self._hash.update(text.encode())
        self._hash.update(b"\n")


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
