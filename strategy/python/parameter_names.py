"""The names that parameters have in checkpoints, whatever wraps or divides the model."""

from __future__ import annotations

from torch import Tensor, nn

# torch.compile and torch's checkpoint_wrapper insert these prefixes into names of parameters; checkpoints omit them.
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Return {parameter: name in checkpoints}; tied parameters have the name on the first stage that has a copy."""
    from weft.strategy.pipeline import find_staged
    from weft.strategy.recognition.assignments import join

    first_names = {}  # of this rank's copies of tied parameters, by their names on this stage
    if (found := find_staged(module)) is not None:
        prefix, staged = found
        first_names = {join(prefix, own): join(prefix, first) for own, first in staged.names_of_copies().items()}
    return {
        parameter: unwrapped(first_names.get(own_name, own_name)) for own_name, parameter in module.named_parameters()
    }


def unwrapped(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name
