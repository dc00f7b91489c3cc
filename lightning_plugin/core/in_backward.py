"""Finds settings of a Trainer that do not work with an optimizer that steps inside the backward."""

from __future__ import annotations

from typing import Any

# Overrides of these hooks could read gradients after the backward, when all gradients have been freed.
_MODULE_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def check_optimizer_in_backward(trainer: Any, has_stages: bool = False) -> None:
    """Raise ValueError for settings that need all gradients, or the old weights, after the backward.

    has_stages: whether the model is divided into the stages of a pipeline, which step before the Trainer's backward.
    """
    if (reason := _reason(trainer, has_stages)) is not None:
        raise ValueError(
            f"optimizer_in_backward: {reason}, but each gradient is freed as soon as it is complete and used; "
            "change this setting, or pass optimizer_in_backward=False."
        )


def _reason(trainer: Any, has_stages: bool) -> str | None:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimizes manually"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "a gradient scaler decides after the backward whether to step"
    # Clipping by norm runs the backward twice, and the stages of a pipeline step before it.
    needs_own_backward = has_stages or (trainer.gradient_clip_val and clips_by_norm(trainer))
    for hook in (*_MODULE_HOOKS, "backward") if needs_own_backward else _MODULE_HOOKS:
        if is_overridden(hook, module, "LightningModule"):
            return f"{type(module).__name__} overrides {hook}"
    for callback in trainer.callbacks:
        for hook in _CALLBACK_HOOKS:
            if is_overridden(hook, callback, "Callback"):
                return f"the callback {type(callback).__name__} overrides {hook}"
    return None


def clips_by_norm(trainer: Any) -> bool:
    """Return whether the Trainer's clipping, if any, is by norm, which is the default."""
    algorithm = trainer.gradient_clip_algorithm
    return algorithm is None or str(getattr(algorithm, "value", algorithm)) == "norm"


def is_overridden(hook: str, instance: Any, base_name: str) -> bool:
    """Return whether a module or a callback overrides the method `hook` of Lightning's class `base_name`."""
    if hook in vars(instance):
        return True
    base = next(cls for cls in type(instance).__mro__ if cls.__name__ == base_name)
    return getattr(type(instance), hook, None) is not getattr(base, hook, None)
