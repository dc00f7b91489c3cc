"""The mixin of NonFiniteCheck, a callback that ends a run before a step with NaN; `factory.py` adds the base class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._plugin.meshes import PIPELINE_AXIS
from weft._plugin.monitors import check_at_least_one, num_steps, ranks_text
from weft._plugin.strategy_mixin import StrategyMixin
from weft.strategy.parameter_names import parameter_names, unwrapped

if TYPE_CHECKING:
    from weft.strategy.faults import ModuleWatch, Source

_MOST_GROUPS = 4  # of ranks with the same report, in a message


@dataclasses.dataclass(frozen=True)
class _Report:
    """The findings of one rank.

    loss: (step, such as "the loss is nan") of the first loss that is not finite; None: all are, or this rank has none.
    gradients: such as "the gradient of 'weight' and of 2 more of 5 parameters is not finite"; "": all are finite.
    source: where a value that is not finite came first; None: unknown.
    replica, stage: the data-parallel and the pipeline rank. Ranks with the same ones have the same modules and data.
    """

    loss: tuple[int, str] | None
    gradients: str
    source: Source | None
    replica: int
    stage: int


class NonFiniteMixin:
    """Raises RuntimeError on all ranks, before the optimizer steps, if a loss or a gradient has NaN or infinity.

    If each step is checked, the weights and the optimizer's state are those before the step; with manual optimization,
    other optimizers may have stepped. The error is the same on all ranks. It names the step and, for each rank, the
    loss and the first parameter, in the model's order, whose gradient is not finite.

    A check reads each gradient once, and takes one all-reduce of one number, for which the host of a GPU waits. If
    gradients are averaged over data-parallel ranks, one rank's NaN is in the gradients of all by then. The losses show
    the rank at which it began unless only the backward went wrong; `find_module=True` names the rank in both cases.

    With a gradient scaler ("16-mixed"), which leaves out steps with infinite gradients, only losses are checked. Raises
    ValueError with `optimizer_in_backward`, whose gradients are used and freed before all of them exist.

    Args:
        every_n_steps: the optimizer steps between two checks; with manual optimization, the batches, after which the
            next step of each optimizer is checked. With more than 1, a step that is not checked may change weights to
            NaN; the losses of all steps are checked, and the first that is not finite is named.
        find_module: also name the first module, on each rank, whose output is not finite although its inputs are; if
            there is none, the first module's output or parameter whose gradient is not finite before it is averaged.
            Hooks then read each input and output of each module, and the gradients of outputs and parameters: one small
            reduction for each, without waiting for the device. Infinite outputs with a minus sign are ignored, because
            masks have them. Modules in a fused MLP, in a module compiled by `torch.compile` and in a compiled block are
            not seen, nor are the logits of a `vocab_head`.
    """

    def __init__(self, every_n_steps: int = 1, find_module: bool = False) -> None:
        super().__init__()
        check_at_least_one("NonFiniteCheck", "every_n_steps", every_n_steps)
        self._every_n_steps = every_n_steps
        self._find_module = find_module
        self._names: dict[Tensor, str] = {}  # the parameters, in the model's order
        self._losses: list[tuple[int, Tensor]] = []  # (step, loss) since the last check
        self._is_due = False  # whether any rank has a loss since the last check
        self._first_step = 0
        self._checked_steps: dict[Any, int] = {}  # optimizer -> the step of its last check
        self._watch: ModuleWatch | None = None
        self._has_loss = True
        self._replica = self._stage = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise TypeError for a strategy that is not weft's; begin to watch the modules."""
        strategy = trainer.strategy
        if not isinstance(strategy, StrategyMixin):
            raise TypeError(f"NonFiniteCheck got a Trainer with a {type(strategy).__name__}; pass strategy='weft'.")
        self._forget()
        self._first_step = num_steps(trainer, pl_module)
        self._names = parameter_names(pl_module)
        # Steps give all stages the loss that the last stage has computed.
        has_stages = PIPELINE_AXIS in (strategy.device_mesh.mesh_dim_names or ())
        self._has_loss = not has_stages or strategy.pipeline.has_last_stage
        self._stage = strategy.pipeline_group.rank() if has_stages else 0
        self._replica = strategy.data_group.rank()
        if self._find_module:
            from weft.strategy.faults import ModuleWatch

            parameters = {name: parameter for parameter, name in self._names.items()}
            self._watch = ModuleWatch(_watched_modules(pl_module), parameters)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.is_active = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.is_active = False

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Keep the loss, one number, for the next check."""
        from weft.strategy.data_parallel.local import local_shard

        self._is_due = True
        if self._has_loss:
            self._losses.append((_current_step(trainer, pl_module), local_shard(loss)))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Raise RuntimeError, on all ranks, if a loss or a gradient of any rank is not finite. Collective."""
        from weft.strategy.data_parallel.local import local_shard

        step = _current_step(trainer, pl_module)
        checked = self._checked_steps.get(optimizer, self._first_step)
        # Manual optimization may leave out steps, and step an optimizer several times in one.
        if step == checked or step // self._every_n_steps > checked // self._every_n_steps:
            gradients = {}
            if getattr(trainer.precision_plugin, "scaler", None) is None:
                gradients = {name: local_shard(grad) for name, grad in self._gradients(optimizer)}
            automatic = pl_module.automatic_optimization
            weights = "the weights are those before this step" if automatic else "this optimizer has not stepped"
            self._check(step, gradients, trainer.strategy.root_device, weights)
            self._checked_steps[optimizer] = step
        if self._watch is not None:
            self._watch.clear()

    def _check(self, step: int, gradients: dict[str, Tensor], device: torch.device, weights: str) -> None:
        """Raise RuntimeError if a value is not finite; `weights`: the text if the loss of no earlier step is bad."""
        from weft.strategy.faults import are_finite, is_set_on_any_rank

        seen = [*gradients.values(), *(loss for _, loss in self._losses)]
        if is_set_on_any_rank(~are_finite(seen), device):
            raise RuntimeError(self._error_text(step, self._report(step, gradients), weights))
        self._losses.clear()
        self._is_due = False

    def _gradients(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """Return the gradients of an optimizer's parameters, with names, in the model's order."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stepped = {parameter: f"parameter {idx} of the optimizer" for idx, parameter in enumerate(parameters)}
        ordered = {parameter: name for parameter, name in self._names.items() if parameter in stepped}
        ordered |= {parameter: name for parameter, name in stepped.items() if parameter not in ordered}
        return [(name, parameter.grad) for parameter, name in ordered.items() if parameter.grad is not None]

    def _report(self, step: int, gradients: dict[str, Tensor]) -> _Report:
        from weft.strategy.faults import largest_values

        losses = ((at, loss.cpu()) for at, loss in self._losses)
        bad_loss = next(((at, value) for at, value in losses if not torch.isfinite(value).all()), None)
        loss = None
        if bad_loss is not None:
            at, value = bad_loss
            loss = (at, f"the loss{'' if at == step else f' of step {at}'} is {value.flatten()[0].item()}")
        is_finite = largest_values(list(gradients.values())).isfinite().tolist()
        bad = [name for name, finite in zip(gradients, is_finite, strict=True) if not finite]
        gradient_text = ""
        if bad:
            others = f" and of {len(bad) - 1} more of {len(gradients)} parameters" if len(bad) > 1 else ""
            gradient_text = f"the gradient of {bad[0]!r}{others} is not finite"
        source = None if self._watch is None else self._watch.first()
        return _Report(loss, gradient_text, source, self._replica, self._stage)

    def _error_text(self, step: int, report: _Report, weights: str) -> str:
        """Return the text, equal on all ranks; collective. `weights`: their state if no earlier loss is bad."""
        reports: list[Any] = [report]
        if dist.is_initialized() and dist.get_world_size() > 1:
            reports = [None] * dist.get_world_size()
            dist.all_gather_object(reports, report)
        first_step = min((each.loss[0] for each in reports if each.loss is not None), default=step)
        losses = [each.loss[1] if each.loss is not None and each.loss[0] == first_step else "" for each in reports]
        sources = _earliest_sources(reports) if first_step == step else []
        texts = [_by_rank(losses), _by_rank([each.gradients for each in reports]), _by_rank(sources)]
        hint = ""
        if not any(losses) and not any(sources) and len({each.replica for each in reports if each.gradients}) > 1:
            hint = " (after averaging over data-parallel ranks: pass find_module=True to find the rank)"
        if first_step < step:
            weights = _changed_since(first_step)
        return (
            f"NonFiniteCheck: in step {step}, {'; '.join(text for text in texts if text)}{hint}; {weights}: "
            "check the batch, the learning rate and the device, and resume from a checkpoint."
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Check the losses since the last check. Collective."""
        step = num_steps(trainer, pl_module)
        if self._is_due:
            self._check(step, {}, trainer.strategy.root_device, _changed_since(step))
        self._forget()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._forget()

    def _forget(self) -> None:
        self._losses.clear()
        self._is_due = False
        self._checked_steps.clear()
        self._names = {}
        if self._watch is not None:
            self._watch.remove()
        self._watch = None


def _current_step(trainer: Any, pl_module: Any) -> int:
    """Return the number of the step that is running, from 1 on; with manual optimization that of the batch."""
    return num_steps(trainer, pl_module) + (1 if pl_module.automatic_optimization else 0)


def _changed_since(step: int) -> str:
    return f"the weights may have changed to such values since step {step}"


def _watched_modules(pl_module: nn.Module) -> dict[str, nn.Module]:
    """Return modules by name, without metrics, whose values need not be finite, and compiled ones, and their parts."""
    if _is_compiled(pl_module):
        return {}
    from weft.strategy.modules.compiled_blocks import is_compiled_block

    modules = {f"{name}.": module for name, module in pl_module.named_modules()}
    left_out = tuple(name for name, module in modules.items() if _is_metric(module) or _is_compiled(module))
    # The hooks of a compiled block itself run outside of its compiled code.
    blocks = {name: module for name, module in modules.items() if is_compiled_block(module)}
    left_out += tuple(f"{name}{child}." for name, block in blocks.items() for child, _ in block.named_children())
    watched = {name: module for name, module in modules.items() if not name.startswith(left_out)}
    return {unwrapped(name).removesuffix("."): module for name, module in watched.items()}


def _is_metric(module: nn.Module) -> bool:
    return any(cls.__name__ == "Metric" for cls in type(module).__mro__)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def _earliest_sources(reports: Sequence[_Report]) -> list[str]:
    """Return a text for each rank, "" if another rank that computes with the same data has an earlier source.

    Ranks of one stage run the same modules, so that positions are comparable. A stage gets values from earlier stages,
    as inputs of its modules, and gradients from later ones.
    """
    found = [(rank, each, each.source) for rank, each in enumerate(reports) if each.source is not None]
    texts = [""] * len(reports)
    for replica in {each.replica for each in reports}:
        first_of: dict[int, tuple[bool, int]] = {}  # stage -> (in the backward, position)
        inputs: dict[int, bool] = {}
        for _, each, source in found:
            key = (source.in_backward, source.position)
            if each.replica == replica and (each.stage not in first_of or key < first_of[each.stage]):
                first_of[each.stage], inputs[each.stage] = key, source.is_input
        if not first_of:
            continue
        earliest = min(first_of, key=lambda s: (first_of[s][0], inputs[s], -s if first_of[s][0] else s))
        for rank, each, source in found:
            is_first = (source.in_backward, source.position) == first_of[earliest]
            if each.replica == replica and each.stage == earliest and is_first:
                texts[rank] = f"{source.text} was the first"
    return texts


def _by_rank(texts: Sequence[str]) -> str:
    """Return "text on rank 0, other text on ranks 1 and 2"; `texts`: by rank, "" for a rank without."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    parts = [f"{text} on {ranks_text(ranks)}" for text, ranks in ranks_of.items()]
    if len(parts) > _MOST_GROUPS:
        parts = [*parts[:_MOST_GROUPS], f"and {len(parts) - _MOST_GROUPS} further findings on other ranks"]
    return ", ".join(parts)
