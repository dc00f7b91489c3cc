"""Finds the layers of a module that form an MLP: one or two up layers and one down layer."""

from __future__ import annotations

from torch import nn

from weft.strategy.recognition.linears import features, why_no_linear
from weft.strategy.sharding.state import MlpLayers

# (gate, up, down) by the names in existing models.
_GATED = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"), ("gate", "up", "down"))
# (up, down).
_PLAIN = (
    ("fc1", "fc2"),
    ("linear1", "linear2"),
    ("lin1", "lin2"),
    ("c_fc", "c_proj"),
    ("up_proj", "down_proj"),
    ("w1", "w2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
# (gate and up in one layer, down).
_GATE_UP = (("gate_up_proj", "down_proj"), ("w12", "w3"))
NAMES_LOOKED_FOR = ", ".join("/".join(names) for names in (*_GATED, *_PLAIN))


def find_by_name(module: nn.Module) -> MlpLayers | None:
    """Return the MLP that a module's children form by their usual names, or by their order in an nn.Sequential.

    Exactly two children of the nn.Sequential, of which one is the first child, must have parameters, and there must be
    a third child, such as an activation.
    """
    children = module._modules
    for gate, up, down in _GATED:
        if gate in children and up in children and down in children:
            return _fitting(module, MlpLayers(gate, up, down))
    for up, down in _PLAIN:
        if up in children and down in children:
            return _fitting(module, MlpLayers(None, up, down))
    if isinstance(module, nn.Sequential):
        with_parameters = [
            name for name, child in children.items() if child is not None and any(True for _ in child.parameters())
        ]
        first = next(iter(children), None)
        if len(with_parameters) == 2 and with_parameters[0] == first and len(children) > 2:
            return _fitting(module, MlpLayers(None, *with_parameters))
    return None


def find_gate_up(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of an MLP's layer that is gate and up projection in one, and of its down layer."""
    for gate_up, down in _GATE_UP:
        layers = (module._modules.get(gate_up), module._modules.get(down))
        if all(layer is not None and _is_linear(layer) for layer in layers):
            return gate_up, down
    return None


def find(module: nn.Module) -> MlpLayers | None:
    """Return the result of find_by_name, else the MLP that the linear layers of a module form by their shapes."""
    by_name = find_by_name(module)
    if by_name is not None:
        return by_name
    linears = {name: child for name, child in module._modules.items() if child is not None and _is_linear(child)}
    for down, layer in reversed(list(linears.items())):  # the last one, if several fit
        hidden, _ = features(layer)
        ups = [name for name, other in linears.items() if name != down]
        if len(ups) not in (1, 2) or any(features(linears[name])[1] != hidden for name in ups):
            continue
        dims = {features(linears[name])[0] for name in ups}
        is_ambiguous = len(ups) == 2 and dims == {hidden}  # any of the three could be the down layer
        if len(dims) == 1 and not is_ambiguous:
            return _fitting(module, MlpLayers(None if len(ups) == 1 else ups[0], ups[-1], down))
    return None


def _is_linear(module: nn.Module) -> bool:
    return why_no_linear(module) is None


def _fitting(module: nn.Module, mlp: MlpLayers) -> MlpLayers | None:
    layers = [layer for name in mlp.children if (layer := module._modules[name]) is not None]
    if len(layers) < len(mlp.children) or not all(_is_linear(layer) for layer in layers):
        return None
    *ups, down = (features(layer) for layer in layers)
    fits = all(out == down[0] and dim == ups[0][0] for dim, out in ups)
    return mlp if fits else None
