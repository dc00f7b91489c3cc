"""Collects the evidence on a model before it is sharded: calls of its modules, and verdicts on its groups of layers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weft.strategy.deferred import materialize_buffers
from weft.strategy.recognition.adapters import hidden_adapters
from weft.strategy.recognition.assignments import Assignment, Assignments, InputShapes, display_name, join
from weft.strategy.sharding.remote_layers import RemoteLayer
from weft.strategy.verification.decide import Decision, decide, verdict_with
from weft.strategy.verification.heads import Counts, Verdict
from weft.strategy.verification.rehearsal import Rehearsal, rehearse
from weft.strategy.verification.samples import Sample, example_of, sample_of

MODES = ("auto", "always", "never")


_REHEARSAL = "_weft_rehearsal"


def store_rehearsal(model: nn.Module, example: Any = None) -> Rehearsal:
    """Return the rehearsal of a full model (the calls of its modules), and store it on the model.

    A plan that is applied later, when the model has only the layers of some pipeline stages, uses the stored rehearsal.
    If one is stored already, no other is made.
    """
    materialize_buffers(model)
    if model.__dict__.get(_REHEARSAL) is None:
        model.__dict__[_REHEARSAL] = StoredRehearsal(model, None if example is None else sample_of(example))
    stored: StoredRehearsal = model.__dict__[_REHEARSAL]
    return stored.rehearsal


class StoredRehearsal:
    """The rehearsal of a full model, for the layers of the model that remain on a rank.

    A rehearsal refers to modules and parameters by their ids. Objects made later may reuse the ids of those that are
    gone, so modules and parameters are found again by their names.
    """

    def __init__(self, model: nn.Module, example: Sample | None) -> None:
        with hidden_adapters(model):  # as while plans are made
            self.rehearsal = rehearse(model, example)
            self._modules = {name: id(m) for name, m in model.named_modules(remove_duplicate=False)}
            self._parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: copies of the model, such as a pipeline's skeleton, have no stored rehearsal."""

    def for_model(self, model: nn.Module) -> Rehearsal:
        """Return the rehearsal for a model that has lost the layers of other pipeline stages."""
        full = self.rehearsal
        module_ids = {
            self._modules[name]: id(module)
            for name, module in model.named_modules(remove_duplicate=False)
            if name in self._modules and not isinstance(module, RemoteLayer)
        }
        parameter_ids = {
            self._parameters[name]: id(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name in self._parameters
        }
        # Calls of a module that is gone are kept for remaining modules like it, under a key that is no id.
        keys = {key: module_ids.get(key, -1 - number) for number, key in enumerate(full.calls)}
        return Rehearsal(
            calls={keys[key]: calls for key, calls in full.calls.items()},
            like={module_ids[key]: keys[like] for key, like in full.like.items() if key in module_ids},
            called={module_ids[key] for key in full.called if key in module_ids},
            read={parameter_ids[key] for key in full.read if key in parameter_ids},
            covered={module_ids[key] for key in full.covered if key in module_ids},
            why_not=full.why_not,
        )


def drop_rehearsal(model: nn.Module) -> None:
    """Drop the rehearsals that `store_rehearsal` stored on a model and the modules inside it."""
    for module in model.modules():
        module.__dict__.pop(_REHEARSAL, None)


class Evidence:
    """The rehearsal of a model, made on first use, and the conclusions from it.

    Args:
        mode: "auto" or "always": groups are compared; "always" also rejects groups whose modules keep tensors in
            attributes; "never": groups are accepted without a comparison.
        example: arguments of a call of the model, as in `Plan`; None: see `samples.samples_for`.
    """

    def __init__(self, model: nn.Module, tp_size: int, mode: str = "auto", example: Any = None) -> None:
        self.model, self.tp_size, self.mode = model, tp_size, mode
        self._example = None if example is None else sample_of(example)

    @functools.cached_property
    def rehearsal(self) -> Rehearsal:
        stored: StoredRehearsal | None = self.model.__dict__.get(_REHEARSAL)
        return rehearse(self.model, self._example) if stored is None else stored.for_model(self.model)

    def remarks(self) -> list[str]:
        """Return a sentence on an `example_input_array` with which the model cannot be called; else []."""
        is_verified = self.tp_size > 1 and self.mode != "never"
        if not is_verified or self._example is not None or example_of(self.model) is None:
            return []
        reason = self.rehearsal.why_not.get("")
        if reason is None:
            return []
        return [
            f"the example_input_array is not used, because {type(self.model).__name__} cannot be called with it "
            f"({reason}); its modules are called one by one with other inputs: give it a forward, such as "
            "def forward(self, x): return self.model(x)."
        ]

    def input_shapes(self, module: nn.Module) -> InputShapes | None:
        """Return the shapes of the tensor with which an example calls a module; [] if they are unknown or not needed.

        None: a recorded call has other arguments than one tensor. Shapes are unknown without an example, and not needed
        on one rank or in the mode "never".
        """
        has_example = self._example is not None or example_of(self.model) is not None
        if self.tp_size == 1 or self.mode == "never" or (not has_example and _takes_one_argument(module)):
            return []
        shapes = []
        for call in self.rehearsal.calls_of(module):
            if len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], Tensor):
                return None
            shapes.append(tuple(call.args[0].shape))
        return list(dict.fromkeys(shapes)) if has_example else []

    def decisions(self, is_free: Callable[[nn.Module], bool]) -> list[Decision]:
        """Return decisions on the groups among the free layers; empty on one rank, where nothing is sharded.

        `is_free`: as in `decide`.
        """
        if self.tp_size == 1:
            return []
        return decide(
            self.model,
            self.rehearsal,
            self.tp_size,
            is_free,
            trust=self.mode == "never",
            rejects_stored=self.mode == "always",
        )

    def verdict_with(self, decision: Decision, counts: Counts) -> Verdict:
        """See `decide.verdict_with`."""
        return verdict_with(self.model, self.rehearsal, self.tp_size, decision, counts)

    def is_called(self, module: nn.Module) -> bool:
        """Return whether the rehearsal called a layer."""
        return id(module) in self.rehearsal.called

    def is_covered(self, module: nn.Module) -> bool:
        """Return whether a module, or one around it, could be called as a whole."""
        return id(module) in self.rehearsal.covered

    def is_read(self, module: nn.Module) -> bool:
        """Return whether code read a layer's weights without calling it."""
        return any(id(p) in self.rehearsal.read for p in module._parameters.values() if p is not None)

    def why_unknown(self, name: str) -> str:
        """Return why the rehearsal did not call a module, as the end of a sentence."""
        above = [root for root in self.rehearsal.why_not if name == root or name.startswith(f"{root}.") or not root]
        if not above:
            return "the forward did not call it"
        root = max(above, key=len)
        return f"weft could not call it ({display_name(root)}: {self.rehearsal.why_not[root]})"


def _takes_one_argument(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters
    return len(parameters) == 2  # with self


def assign_group(result: Assignments, decision: Decision, note: str = "") -> list[str]:
    """Give a group column and row styles if its verdict is accepted, else styles with gathered activations.

    Returns:
        The names of the group's layers and, if its verdict is accepted, of the modules whose gradients are summed.
    """
    verdict, name = decision.verdict, decision.container
    if verdict.is_accepted:
        for source in decision.sources:
            result.styles[source] = Assignment("column", note, container=name)
        result.styles[decision.sink] = Assignment("row", note, container=name)
        summed = [join(name, module) if module else name for module in verdict.summed]
        for module in summed:
            summed_note = "each rank uses it for its own heads"
            result.styles[module] = Assignment("replicate_sum_gradients", summed_note)
        for module, dims in verdict.dropouts.items():
            result.dropouts[join(name, module)] = tuple(sorted(dims, key=dataclasses.astuple))
        for module, counts in verdict.counts.items():
            result.counts.setdefault(join(name, module) if module else name, {}).update(counts)
        if verdict.has_stored_tensors:
            result.exposed.append(name)
        return [*decision.sources, decision.sink, *summed]
    advice = ""
    if verdict.difference and verdict.counts:
        read = sorted({attribute for counts in verdict.counts.values() for attribute in counts})
        quoted = " and ".join(f"'{attribute}'" for attribute in read)
        advice = (
            f"; its forward reads {quoted}, has an entry for each head in a buffer or parameter, or computes across "
            "heads: store values derived from a number of heads in attributes of their own and view heads by -1, or "
            "keep the gathered activations, which give the same results"
        )
    assign_gathered(result, decision.sources, decision.sink, name, verdict.reason + advice)
    return [*decision.sources, decision.sink]


def assign_gathered(result: Assignments, sources: tuple[str, ...], sink: str | None, name: str, reason: str) -> None:
    """Give layers the styles with gathered activations, which are exact for any code between them.

    `name`, `reason`: the module around the layers, and why its activations are gathered, for a warning.
    """
    note = "gathered, because its module does not compute the same on one rank's heads"
    for source in sources:
        result.styles[source] = Assignment("column_gather_output", note)
    if sink is not None:
        result.styles[sink] = Assignment("row_split_input", note)
    result.gathered.append((name, reason))
