"""Verifies, before a model is split, that the stages of a pipeline compute together what the full model computes.

Every stage of a pipeline runs the model's forward up to the first layer of the next stage and computes only its own
layers; the outputs of earlier layers are received from their stages. So tensors must pass from layer to layer as
arguments or outputs. If a layer stores a tensor in an attribute that a layer of another stage reads, or changes its
input in place, the other stage uses an old value, and no error is raised.

The reference is one run of the model's own code without weights (`verification.weightless`), in eval mode. The
candidate, for each stage, is the same run, in which layers of other stages return copies of their outputs in the
reference. The stage is correct if the inputs of its linear layers and the outputs of its layers are close to those of
the reference; for the last stage, the model's output must be close, too. The linear layers themselves need no check, so
no weights are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.strategy.pipeline.stages import ANY_STAGE, Layers
from weft.strategy.recognition.shell import isolated_execution
from weft.strategy.verification.rehearsal import Call, Rehearsal, copied
from weft.strategy.verification.weightless import Run, Weightless

_TOLERANCE = 1e-9
Outputs = dict[str, list[Any]]  # of each layer, in the order of its calls


def verify_cuts(model: nn.Module, layers: Layers, rehearsal: Rehearsal) -> None:
    """Compare each stage with the full model, except a stage whose run raises.

    rehearsal: recorded calls of the model and its modules. If it has no call of the full model in eval mode, nothing is
    compared.

    Raises:
        ValueError: a stage computes other values than the full model.
    """
    call = next((call for call in rehearsal.calls.get(id(model), []) if not call.training), None)
    if call is None:
        return
    with isolated_execution(), torch.no_grad():
        runs = _Runs(model, layers, call)
        full, outputs = runs.run(None, {})
        for stage in range(layers.num_stages):
            try:
                stage_run, stage_outputs = runs.run(stage, outputs)
            except Exception:  # the pipeline's own run of this code raises as well, and names the layer
                continue
            difference = runs.difference(stage, full, stage_run, outputs, stage_outputs)
            if difference:
                raise ValueError(
                    f"pipeline: with these cuts, the model computes other values: on stage {stage} {difference}; "
                    "have layers take all tensors as arguments and return them, without attributes that layers of "
                    "other stages read and without changing their inputs in place, or move the cut."
                )


class _Runs:
    def __init__(self, model: nn.Module, layers: Layers, call: Call) -> None:
        self._weightless = Weightless(model, call.scale)
        self._layers, self._call = layers, call

    def run(self, stage: int | None, outputs: Outputs) -> tuple[Run, Outputs]:
        """Run the model in full (stage None) or as one stage runs it; return the run and copies of the layers' outputs.

        outputs: the layers' outputs in the full run, which the layers of other stages return.
        """
        returned: Outputs = {}

        def wrap(name: str, copy: nn.Module, own_forward: Callable[..., Any]) -> Callable[..., Any]:
            if name not in self._layers.stage_of:
                return own_forward
            is_own = stage is None or self._layers.stage_of[name] in (stage, ANY_STAGE)
            reference_outputs = outputs.get(name, [])

            def forward(*args: Any, **kwargs: Any) -> Any:
                calls = returned.setdefault(name, [])
                result = own_forward(*args, **kwargs) if is_own else copied(reference_outputs[len(calls)], {})
                calls.append(copied(result, {}))
                return result

            return forward

        args, kwargs = self._call.fresh()
        torch.default_generator.manual_seed(0)
        return self._weightless.run(args, kwargs, training=False, wrap=wrap), returned

    def difference(self, stage: int, full: Run, stage_run: Run, outputs: Outputs, stage_outputs: Outputs) -> str:
        """Return the first difference of a stage's run from the full run, as a clause; "": there is none."""
        own_layers = [name for name, layer_stage in self._layers.stage_of.items() if layer_stage == stage]

        def is_inside(layer: str) -> bool:
            return any(layer == name or layer.startswith(f"{name}.") for name in own_layers)

        expected, found = ([c for c in run.calls if is_inside(c.layer)] for run in (full, stage_run))
        if [c.layer for c in expected] != [c.layer for c in found]:
            return "other layers are called"
        for reference, call in zip(expected, found, strict=True):
            if _differs(call.input, reference.input):
                return f"the input of '{call.layer}' differs"
        for name in own_layers:
            if _differs(stage_outputs.get(name), outputs.get(name)):
                return f"the output of '{name}' differs"
        if stage == self._layers.num_stages - 1 and _differs(stage_run.output, full.output):
            return "the model's output differs"
        return ""


def _differs(actual: Any, reference: Any) -> bool:
    pairs = [[leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in (actual, reference)]
    return len(pairs[0]) != len(pairs[1]) or not all(map(_is_close, *pairs))


def _is_close(actual: Tensor, reference: Tensor) -> bool:
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        return False
    close = functools.partial(torch.allclose, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    return close(actual, reference) if actual.is_floating_point() else torch.equal(actual, reference)
