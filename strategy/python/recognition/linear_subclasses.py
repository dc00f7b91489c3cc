"""Recognises subclasses of nn.Linear whose own forward computes the same as that of nn.Linear.

Falcon's linear layers are such a class. The forward is tried on a copy with random weights of a small shape, in
float64, in train and in eval mode; outputs and gradients must equal those of nn.Linear. The copy keeps the attributes
in_features and out_features of the original, so a forward that uses them fails in this trial, and its class does not
count as a linear layer. A forward that computes something else for larger weights only is not detected.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.strategy.recognition.shell import isolated_execution, shell_of
from weft.strategy.sharding.state import original_class

_IN, _OUT = 5, 3
_INPUT_SIZES = ((4, _IN), (2, 3, _IN))
_SCALES = (1.0, 1e3)
_TOLERANCE = 1e-12
_MODULE_ATTRIBUTES = (*vars(nn.Module()), "_weft_state")
_PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)

_results: dict[Any, bool] = {}


def computes_linear(module: nn.Linear) -> bool:
    """Return whether a module's own forward computes the same as that of nn.Linear.

    Modules of equal classes and attributes are tried once. False, without a trial, for a module with buffers or with
    attributes other than None, numbers, strings, dtypes and devices: their values may change.
    """
    attributes = {name: value for name, value in module.__dict__.items() if name not in _MODULE_ATTRIBUTES}
    if module._buffers or not all(isinstance(value, _PLAIN_TYPES) for value in attributes.values()):
        return False
    has_bias = module._parameters.get("bias") is not None
    key = (original_class(module), has_bias, *sorted((name, repr(value)) for name, value in attributes.items()))
    if key not in _results:
        cases = itertools.product((True, False), _INPUT_SIZES, _SCALES)
        with isolated_execution():
            try:
                _results[key] = all(_agrees(module, *case) for case in cases)
            except Exception:  # the module's code may raise anything
                _results[key] = False
    return _results[key]


def _agrees(module: nn.Linear, training: bool, input_size: tuple[int, ...], scale: float) -> bool:
    generator = torch.Generator().manual_seed(len(input_size))
    sizes = {"weight": (_OUT, _IN), "bias": (_OUT,)}
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    values = {name: torch.randn(sizes[name], generator=generator).requires_grad_() for name in parameters}
    x = torch.randn(input_size, generator=generator).mul_(scale).requires_grad_()
    copy = shell_of(module, {id(parameters[name]): values[name] for name in parameters}, {})
    copy.training = training
    results = [copy(x), F.linear(x, values["weight"], values.get("bias"))]
    if not isinstance(results[0], Tensor) or results[0].shape != results[1].shape:
        return False
    factor = torch.randn(results[1].shape, generator=generator)
    actual, expected = (
        [result, *torch.autograd.grad((result * factor).sum(), [x, *values.values()])] for result in results
    )
    return all((a - b).norm() <= _TOLERANCE * b.norm() for a, b in zip(actual, expected, strict=True))
