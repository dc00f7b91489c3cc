"""Records the logs of a step that runs once for each micro-batch, and logs them combined, once, on every stage."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weft._plugin.step_outputs import weighted_mean


@dataclasses.dataclass
class Logged:
    """One call of `log`.

    name: the name under which the value is logged.
    value: a scalar; None: a metric was logged whose value for the step is not a single number.
    metric: the module's attribute that holds the logged metric object; None: no metric was logged.
    arguments: the other arguments of the call.
    """

    name: str
    value: Tensor | None
    metric: str | None
    arguments: dict[str, Any]


class StepLogs:
    """Records a module's calls of `log` for each micro-batch (inside `recording`), and combines them (`combine`).

    module: a LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._calls: list[Logged] = []
        self._calls_by_micro_batch: dict[int, list[Logged]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls of `log` inside, without logging them."""
        self._calls_by_micro_batch.clear()
        before = vars(self._module).get("log")
        object.__setattr__(self._module, "log", self._record)
        try:
            yield
        finally:
            del self._module.__dict__["log"]
            if before is not None:
                object.__setattr__(self._module, "log", before)

    def run_micro_batch(self, micro_batch_idx: int, step: Callable[[], Any]) -> Any:
        """Call a step and return its result; store its logs if the step runs to the end.

        On every stage but the last, an exception ends the step at the call of the divided module.
        """
        self._calls = []
        result = step()
        self._calls_by_micro_batch[micro_batch_idx] = self._calls
        return result

    def _record(self, *args: Any, **kwargs: Any) -> None:
        base: Any = next(cls for cls in type(self._module).__mro__ if cls.__name__ == "LightningModule")
        bound = inspect.signature(base.log).bind(self._module, *args, **kwargs)
        arguments = dict(list(bound.arguments.items())[1:])
        arguments.update(arguments.pop("kwargs", {}))
        name, value = arguments.pop("name"), arguments.pop("value")
        if arguments.get("sync_dist_group") is not None:
            raise ValueError(
                f"pipeline: self.log({name!r}) got a sync_dist_group, which ranks of other stages do not have; leave "
                "it out: sync_dist=True reduces over the data-parallel ranks."
            )
        metric = None
        if hasattr(value, "_forward_cache") and hasattr(value, "compute"):
            metric = arguments.get("metric_attribute") or self._name_of(value, name)
            value = value._forward_cache
            value = value if isinstance(value, Tensor) and value.numel() == 1 else None
        elif not isinstance(value, Tensor):
            default = torch.get_default_dtype()  # may be a half type, inside a precision plugin's context
            value = torch.tensor(float(value), dtype=default if default.itemsize >= 4 else torch.float32)
        if value is not None and value.numel() != 1:
            raise ValueError(f"pipeline: self.log({name!r}) got {value.numel()} numbers; log one number at a time.")
        self._calls.append(
            Logged(name, None if value is None else value.detach().clone().reshape(()), metric, arguments)
        )

    def _name_of(self, metric: Any, name: str) -> str:
        attribute: str
        for attribute, module in self._module.named_modules():
            if module is metric:
                return attribute
        raise ValueError(
            f"pipeline: self.log({name!r}) got a metric that is no attribute of {type(self._module).__name__}; assign "
            "the metric to an attribute in __init__."
        )

    def combine(self, weights: Sequence[float], sizes: Sequence[int | None]) -> list[Logged]:
        """Return the calls for the batch, in order: each combines, by `reduce_fx`, one call of every micro-batch.

        Args:
            weights: the weight of each micro-batch in means.
            sizes: the number of samples of each micro-batch; None: unknown.

        Raises:
            ValueError: an unknown `reduce_fx`.
        """
        # The key: a name, and the number of earlier calls with this name in the same micro-batch.
        calls_by_key: dict[tuple[str, int], list[tuple[Logged, float, int | None]]] = {}
        for idx in sorted(self._calls_by_micro_batch):
            num_calls: dict[str, int] = {}
            for call in self._calls_by_micro_batch[idx]:
                key = (call.name, num_calls.get(call.name, 0))
                num_calls[call.name] = key[1] + 1
                calls_by_key.setdefault(key, []).append((call, weights[idx], sizes[idx]))
        return [_combine_calls(calls) for calls in calls_by_key.values()]

    def replay(self, logged: Sequence[Logged]) -> None:
        """Log these calls as the step would on one device; every rank of the pipeline logs the same."""
        for call in logged:
            value: Any = None if call.value is None else call.value.to(self._module.device)
            if call.metric is not None:
                metric = self._module.get_submodule(call.metric)
                metric._forward_cache = value
                value = metric
            self._module.log(call.name, value, **call.arguments)


def _combine_calls(calls: list[tuple[Logged, float, int | None]]) -> Logged:
    first = calls[0][0]
    arguments = dict(first.arguments)
    batch_sizes = [call.arguments.get("batch_size") for call, _, _ in calls]
    if batch_sizes[0] is not None:
        # A number of samples is summed over micro-batches; a constant is not.
        counts_samples = batch_sizes == [size for _, _, size in calls] or len(set(batch_sizes)) > 1
        arguments["batch_size"] = sum(batch_sizes) if counts_samples else batch_sizes[0]
    weighted_values = [(call.value, weight) for call, weight, _ in calls if call.value is not None]
    if not weighted_values:
        return Logged(first.name, None, first.metric, arguments)
    reduction = arguments.get("reduce_fx", "mean")
    reduction = str(getattr(reduction, "__name__", reduction)).lower()
    if reduction not in ("mean", "sum", "min", "max", "amin", "amax"):
        raise ValueError(
            f"pipeline: self.log({first.name!r}) got reduce_fx={arguments['reduce_fx']!r}; pass 'mean', 'sum', 'min' "
            "or 'max'."
        )
    values = [value for value, _ in weighted_values]
    if reduction != "mean":
        value = getattr(torch.stack(values), {"min": "amin", "max": "amax"}.get(reduction, reduction))()
    else:
        value = weighted_mean(values, [weight for _, weight in weighted_values])
    return Logged(first.name, value.cpu(), first.metric, arguments)
