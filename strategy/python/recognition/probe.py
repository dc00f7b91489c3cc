"""Finds out whether an MLP's own forward computes the same as the fused operator, by running both.

The result depends on the forward's code, not on the weights. So the probe gives both sides random float64 weights for
a few of the hidden units, and inputs of scales 1e-3, 1 and 30: every rank comes to the same result, meta models need no
values, and zero weights (with which every activation looks the same) do no harm. The inputs have the shape [2, 3, dim]
and, at scale 1 only, the shapes of the calls that an example makes. The forward runs on a `shell`: a copy of the module
with its code and these weights (`recognition.shell`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.recognition.attribute_reads import Read, reads_of, why_not_watched
from weft.strategy.recognition.linears import features, is_conv1d, why_not_fusable
from weft.strategy.recognition.shell import (
    buffer_copies,
    isolated_execution,
    plain_tensors,
    random_input,
    random_parameter,
    replace_forward,
    shell_of,
)
from weft.strategy.sharding.state import MlpLayers, child_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_SCALES = (1e-3, 1.0, 30.0)
_MAX_HIDDEN = 16  # hidden units in the probe, to save memory; all other sizes are those of the model
_TOLERANCE = 1e-10


def why_not_fused(container: nn.Module, mlp: MlpLayers) -> str | None:
    """Return what in the module's structure prevents fusing, whatever its values; None if nothing does."""
    if "forward" in container.__dict__:
        return "its forward was replaced on the instance"
    for name in mlp.children:
        reason = why_not_fusable(child_of(container, name))
        if reason is not None:
            return f"'{name}' cannot be fused: {reason}"
    layer_parameters = {id(p) for name in mlp.children for p in child_of(container, name).parameters()}
    extra = [name for name, parameter in container.named_parameters() if id(parameter) not in layer_parameters]
    if extra:
        return f"it has more parameters than its linear layers: {', '.join(extra)}"
    for name, child in container.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return f"'{name}' is a Dropout with p={child.p}"
        if name and any(
            (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks)
        ):
            return f"'{name}' has hooks"
    return None


def find_activation(
    container: nn.Module, mlp: MlpLayers, shapes: Sequence[tuple[int, ...]] = ()
) -> tuple[MlpLayers, str] | str:
    """Return the (mlp, activation) with which the operator agrees with the forward, or the reason not to fuse.

    In the result gate and up are swapped if the forward applies its activation to `mlp.up`.

    Args:
        shapes: further shapes of inputs, besides [2, 3, dim].
    """
    orders = [mlp]
    if mlp.gate is not None:
        orders.append(MlpLayers(mlp.up, mlp.gate, mlp.down))
    candidates = [(order, activation) for order in orders for activation in ACTIVATIONS]
    with isolated_execution():
        try:
            shell, _ = _shell_with_hidden(container, mlp, _MAX_HIDDEN)
            before, numbers = plain_tensors(shell), _plain_numbers(shell)
            runs = _reference_runs(shell, container, mlp, shapes)
            while (run := next(runs, None)) is not None:
                x, expected, grad_y = run
                candidates = [each for each in candidates if _agrees(shell, *each, x, expected, grad_y)]
            stored = _stored(shell, before)
            changed = [name for (_, name), value in _plain_numbers(shell).items() - numbers.items()]
        except Exception as error:  # the user's forward may raise anything; the reason quotes it
            return f"its forward does not run on one tensor with some of its hidden units ({_first_line(error)})"
    if stored:
        return f"its forward keeps {stored}"
    if changed:
        return f"its forward changes the attribute '{changed[0]}'"
    if candidates:
        return why_not_watched(container, attribute_reads(container, mlp)) or candidates[0]
    return f"its forward agrees with none of the activations {', '.join(ACTIVATIONS)}"


def attribute_reads(container: nn.Module, mlp: MlpLayers) -> list[Read]:
    """Return the attributes that the forward of a container reads, besides its linear layers."""
    dim, _ = features(child_of(container, mlp.up))
    layers = set(mlp.children)

    def run() -> None:
        for training in (True, False):
            shell.train(training)
            type(shell).forward(shell, random_input((2, 3, dim), 1.0, 200))

    with isolated_execution():
        shell, _ = _shell_with_hidden(container, mlp, _MAX_HIDDEN)
        reads = reads_of(shell, run)
    return [read for read in reads if (read.path or read.name) not in layers]


def _plain_numbers(shell: nn.Module) -> dict[tuple[str, str], float | str]:
    """Return the numbers and texts in attributes, by (module, attribute), without `training`, which the probe sets."""
    return {
        (path, name): value
        for path, module in shell.named_modules()
        for name, value in module.__dict__.items()
        if name != "training" and isinstance(value, (bool, int, float, str))
    }


def why_not_split(container: nn.Module, mlp: MlpLayers) -> str | None:
    """Return why column and row styles on the layers would change the module's output; None if they would not.

    The code between the layers must compute each hidden unit from that unit alone, and without parameters: a replicated
    parameter there would get only a partial gradient.
    """
    for name, child in container.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return f"'{name}' is a Dropout with p={child.p}, which draws for all hidden units"
    with isolated_execution():
        try:
            for training in (True, False):
                full, hidden = _hidden_values(container, mlp, slice(0, _MAX_HIDDEN), training)
                half = hidden // 2
                for units in (slice(0, half), slice(half, hidden)):
                    partial, _ = _hidden_values(container, mlp, units, training)
                    if not _is_close(partial, full[..., units]):
                        return "it does not compute each hidden unit from that unit alone (a norm or F.dropout?)"
        except _NotSplit as error:
            return str(error)
        except Exception as error:  # the user's forward may raise anything; the reason quotes it
            return f"its forward does not run on one tensor with some of its hidden units ({_first_line(error)})"
    return None


def _stored(shell: nn.Module, before: Mapping[tuple[str, str], Tensor]) -> str:
    """Return a text on the first attribute that holds another tensor than in `before`; "" if none does."""
    names = [name for (module, name), value in plain_tensors(shell).items() if before.get((module, name)) is not value]
    return f"a tensor in the attribute '{names[0]}'" if names else ""


class _NotSplit(Exception):
    """Raised if column and row styles would change the output; its text is the reason."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"


def _shell_with_hidden(container: nn.Module, mlp: MlpLayers, units: int | slice) -> tuple[nn.Module, int]:
    """Return a shell with only some hidden units, and the number of hidden units from which they are chosen.

    That number is at most _MAX_HIDDEN. `units`: how many of the first units, or a slice. Other sizes do not change.
    """
    parameters: dict[int, Tensor] = {}
    hidden = 0
    for position, name in enumerate(mlp.children):
        layer = child_of(container, name)
        fan_in, fan_out = features(layer)
        is_column = name != mlp.down
        hidden = min(fan_out if is_column else fan_in, _MAX_HIDDEN)
        chosen = units if isinstance(units, slice) else slice(0, units)
        rows, columns = (hidden, fan_in) if is_column else (fan_out, hidden)
        with torch.no_grad():
            weight = random_parameter((rows, columns), columns, seed=position)
            weight = weight[chosen] if is_column else weight[:, chosen]
            bias = random_parameter((rows,), 1, seed=10 + position)
            bias = bias[chosen] if is_column else bias
            weight = weight.t() if is_conv1d(layer) else weight
        layer_parameters = layer._parameters
        parameters[id(layer_parameters["weight"])] = weight.clone().requires_grad_()
        if layer_parameters.get("bias") is not None:
            parameters[id(layer_parameters["bias"])] = bias.clone().requires_grad_()
    for position, parameter in enumerate(container.parameters()):
        if id(parameter) not in parameters:
            parameters[id(parameter)] = random_parameter(parameter.shape, 1, seed=100 + position)
    shell = shell_of(container, parameters, buffer_copies(container))
    for name in mlp.children:
        if is_conv1d(child_of(container, name)):
            copy: Any = child_of(shell, name)
            copy.nf = copy._parameters["weight"].shape[1]
    return shell, hidden


def _reference_runs(
    shell: nn.Module, container: nn.Module, mlp: MlpLayers, shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Tensor, list[Tensor], Tensor]]:
    """Yield (input, [output, gradients of input and weights], gradient of the output) of the module's own forward."""
    dim, _ = features(child_of(container, mlp.up))
    for training in (True, False):
        shell.train(training)
        inputs = [*(((2, 3, dim), scale) for scale in _SCALES), *((shape, 1.0) for shape in shapes)]
        for seed, (shape, scale) in enumerate(inputs):
            x = random_input(shape, scale, 200 + seed).requires_grad_()
            y = type(shell).forward(shell, x)
            grad_y = random_input(y.shape, 1.0, 300 + seed)
            yield x, [y.detach(), *_gradients(y, grad_y, [x, *_weights(shell, mlp)])], grad_y


def _weights(shell: nn.Module, mlp: MlpLayers) -> list[Tensor]:
    layers = [child_of(shell, name) for name in sorted(mlp.children)]
    return [p for layer in layers for p in layer._parameters.values() if p is not None]


def _gradients(y: Tensor, grad_y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(y, inputs, grad_y, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(grads, inputs, strict=True)]


def _agrees(
    shell: nn.Module, mlp: MlpLayers, activation: str, x: Tensor, expected: list[Tensor], grad_y: Tensor
) -> bool:
    def weight_and_bias(name: str) -> tuple[Tensor, Tensor | None]:
        layer = child_of(shell, name)
        weight = layer._parameters["weight"]
        assert weight is not None
        return (weight.t() if is_conv1d(layer) else weight), layer._parameters.get("bias")

    w1, b1 = weight_and_bias(mlp.column_layers[0])
    w3, b3 = (None, None) if mlp.gate is None else weight_and_bias(mlp.up)
    w2, b2 = weight_and_bias(mlp.down)
    y = torch.ops.weft.column_row_mlp(x, w1, w2, w3, b1, b2, b3, activation=activation, group_name="")
    if y.shape != expected[0].shape or not _is_close(y.detach(), expected[0]):
        return False
    gradients = _gradients(y, grad_y, [x, *_weights(shell, mlp)])
    return all(_is_close(a, b) for a, b in zip(gradients, expected[1:], strict=True))


def _hidden_values(container: nn.Module, mlp: MlpLayers, units: slice, training: bool) -> tuple[Tensor, int]:
    """Return the input of the down layer if only `units` exist, and the number of hidden units they are chosen from."""
    shell, hidden = _shell_with_hidden(container, mlp, units)
    shell.train(training)
    torch.default_generator.manual_seed(0)
    up_outputs: list[Tensor] = []
    down_inputs: list[Tensor] = []
    for name in mlp.column_layers:
        layer = child_of(shell, name)

        def up(x: Tensor, layer: nn.Module = layer) -> Tensor:
            up_outputs.append(type(layer).forward(layer, x).detach().requires_grad_())
            return up_outputs[-1]

        replace_forward(layer, up)
    down_layer = child_of(shell, mlp.down)

    def down(x: Tensor) -> Tensor:
        down_inputs.append(x)
        output: Tensor = type(down_layer).forward(down_layer, x)
        return output

    replace_forward(down_layer, down)
    dim, _ = features(child_of(container, mlp.up))
    before = plain_tensors(shell)
    type(shell).forward(shell, random_input((2, 3, dim), 1.0, 200))
    if len(down_inputs) != 1 or len(up_outputs) != len(mlp.column_layers):
        raise ValueError("it does not call each of its linear layers once")
    if stored := _stored(shell, before):
        raise _NotSplit(f"its forward keeps {stored}")
    layers = {id(p) for name in mlp.children for p in child_of(shell, name).parameters()}
    others = [(name, p) for name, p in shell.named_parameters() if id(p) not in layers]
    if others:
        grads = torch.autograd.grad(down_inputs[0].sum(), [p for _, p in others], allow_unused=True)
        for (name, _), grad in zip(others, grads, strict=True):
            if grad is not None:
                raise _NotSplit(f"the parameter '{name}' is used between its layers")
    return down_inputs[0].detach(), hidden


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= _TOLERANCE * b.norm().clamp_min(torch.finfo(torch.float64).tiny))
