"""Handles a LightningModule that is itself divided into stages: its skeleton, and the state that each rank saves."""

from __future__ import annotations

from typing import Any, NoReturn

from weft._plugin.stage_metrics import names_of_metrics


def attach_trainer(module: Any) -> None:
    """Give the module's skeleton, a copy whose forward weft records, the Trainer and a `log` that raises."""
    from weft.strategy.pipeline import staged_model_of
    from weft.strategy.sharding.state import original_class

    def log(name: str, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ValueError(
            f"pipeline: the forward of {original_class(module).__name__} logs {name!r}, which only one stage computes; "
            "log it in a step, after the call of self(...)."
        )

    staged = staged_model_of(module)
    assert staged is not None
    skeleton: Any = staged.skeleton
    skeleton.trainer = module.trainer
    object.__setattr__(skeleton, "log", log)


def without_step_state(module: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without the module's own buffers and metrics, which steps change after the forward."""
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    metrics = tuple(f"{name}." for name in names_of_metrics(module))
    return {name: value for name, value in state.items() if name not in buffers and not name.startswith(metrics)}
