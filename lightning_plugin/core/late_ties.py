"""Detects weights that hooks tie after the model has been set up."""

from __future__ import annotations

from torch import nn


class LateTies:
    """Compares which parameters of a module are tied with those at the end of its setup."""

    def __init__(self) -> None:
        self._first_names: dict[str, str] = {}

    def record(self, module: nn.Module) -> None:
        """Record which parameters are tied now."""
        self._first_names = _first_names(module)

    def check(self, module: nn.Module) -> None:
        """Raise ValueError for two parameters that have been tied since `record`.

        FSDP2 and pipeline stages have lists of the parameters as they were; a weight that is tied later would miss a
        part of its gradient.
        """
        for name, first in _first_names(module).items():
            if self._first_names.get(name, first) != first:
                raise ValueError(
                    f"'{name}' was tied to '{first}' after the strategy had sharded the model, which it supports for "
                    "weights that are sharded over the axis tensor_parallel only; tie them in __init__, setup or "
                    "configure_model."
                )


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return for each name of a parameter the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
