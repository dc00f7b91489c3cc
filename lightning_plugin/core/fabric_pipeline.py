"""Implements `pipeline_step` and `pipeline_evaluate`, which the user's code calls for each batch under Fabric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weft._plugin.checkpoint import without_none

if TYPE_CHECKING:
    from weft._plugin.engine import Engine


def train_batch(engine: Engine, batch: Any, loss_fn: Callable[[Any, Any], Tensor], **arguments: Any) -> Tensor:
    """Run forward and backward of one batch; return the loss. `arguments`: of `Pipeline.step`, or None."""
    stages, pipeline = engine.stages, engine.stages.existing_pipeline()
    stages.check_batch("training", batch)
    model = _PrecisionWrapper(engine.precision, pipeline.model)
    with pipeline.failures.report_failures():
        with engine.data_axes.without_sync([pipeline.model]):
            if engine.scaler is not None:
                arguments["scale"] = engine.loss_scale * (arguments.get("scale") or 1)
            arguments["stepper"] = engine.in_backward.stepper
            loss = pipeline.step(batch, lambda micro_batch: loss_fn(model, micro_batch), **without_none(**arguments))
        engine.data_axes.after_backward()
    engine.first_gradients.check([pipeline.model])
    return loss


def evaluate_batch(
    engine: Engine,
    batch: Any,
    step: Callable[[Any, Any], Any],
    split: Callable[[Any, int], Sequence[Any]] | None,
) -> list[Any]:
    """Run forwards only; return the result of `step` for each micro-batch; [] except on the last stage."""
    engine.stages.check_batch("evaluation", batch)
    pipeline = engine.stages.existing_pipeline()
    model = _PrecisionWrapper(engine.precision, pipeline.model)
    return pipeline.evaluate(batch, lambda micro_batch: step(model, micro_batch), **without_none(split=split))


class _PrecisionWrapper:
    """Calls a model in a precision plugin's context, like Fabric's wrapper of the model."""

    def __init__(self, precision: Any, model: nn.Module) -> None:
        self._precision = precision
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._precision.convert_input((args, kwargs))
        with self._precision.forward_context():
            output = self._model(*args, **kwargs)
        return self._precision.convert_output(output)
