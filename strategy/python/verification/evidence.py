"""What is known of one model before it is sharded: its calls, and which groups of layers compute the same by heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.strategy.assignments import Assignment, Assignments, join, shown
from weft.strategy.verification.decide import Decision, decide
from weft.strategy.verification.rehearsal import Rehearsal, rehearse
from weft.strategy.verification.samples import sample_of

MODES = ("auto", "always", "never")


_REHEARSAL = "_weft_rehearsal"


def remember_rehearsal(model: nn.Module, example: Any = None) -> None:
    """Rehearse a model that is still complete, for a plan that is applied when this rank has some of its layers.

    What is remembered already stays.
    """
    if _REHEARSAL not in model.__dict__:
        model.__dict__[_REHEARSAL] = rehearse(model, None if example is None else sample_of(example))


def forget_rehearsal(model: nn.Module) -> None:
    """Drop what `remember_rehearsal` has kept of a model and those inside it."""
    for module in model.modules():
        module.__dict__.pop(_REHEARSAL, None)


class Evidence:
    """The rehearsal of a model, made when it is first asked for, and what follows from it.

    Args:
        mode: "auto" or "always": groups are compared; "never": those that are found count as right.
        example: a call of the model, as `Plan` takes it; None: what its first layer takes is tried.
    """

    def __init__(self, model: nn.Module, tp_size: int, mode: str = "auto", example: Any = None) -> None:
        self.model, self.tp_size, self.mode = model, tp_size, mode
        self._example = None if example is None else sample_of(example)

    @functools.cached_property
    def rehearsal(self) -> Rehearsal:
        known = self.model.__dict__.get(_REHEARSAL)
        return known if known is not None else rehearse(self.model, self._example)

    def decisions(self, is_free: Callable[[nn.Module], bool]) -> list[Decision]:
        """The groups among the layers that are free; none on one rank, where nothing is sharded."""
        if self.tp_size == 1:
            return []
        return decide(self.model, self.rehearsal, self.tp_size, is_free, trust=self.mode == "never")

    def is_called(self, module: nn.Module) -> bool:
        """Whether a layer was seen to be called."""
        return id(module) in self.rehearsal.called

    def is_seen(self, module: nn.Module) -> bool:
        """Whether a module is part of what was tried as a whole."""
        return id(module) in self.rehearsal.seen

    def is_read(self, module: nn.Module) -> bool:
        """Whether code was seen to read a layer's weights without calling it."""
        return any(id(p) in self.rehearsal.read for p in module._parameters.values() if p is not None)

    def why_unknown(self, name: str) -> str:
        """Why a module was not seen to be called."""
        above = [root for root in self.rehearsal.why_not if name == root or name.startswith(f"{root}.") or not root]
        if not above:
            return "no call of it was seen"
        root = max(above, key=len)
        return f"no call of it could be tried ({shown(root)}: {self.rehearsal.why_not[root]})"


def place(result: Assignments, decision: Decision, note: str = "") -> list[str]:
    """Give the layers of a group their styles: column and row if it agrees by heads, gathered otherwise.

    Returns:
        The names of the layers, and of the modules whose gradients are summed.
    """
    verdict, name = decision.verdict, decision.container
    if verdict.is_accepted:
        for source in decision.sources:
            result.styles[source] = Assignment("column", note)
        result.styles[decision.sink] = Assignment("row", note)
        summed = [join(name, module) if module else name for module in verdict.summed]
        for module in summed:
            note = "each rank uses it for its own heads"
            result.styles[module] = Assignment("replicate_sum_gradients", note)
        for module, dims in verdict.dropouts.items():
            result.dropouts[join(name, module)] = tuple(sorted(dims, key=dataclasses.astuple))
        for module, counts in verdict.counts.items():
            result.counts.setdefault(join(name, module) if module else name, {}).update(counts)
        return [*decision.sources, decision.sink, *summed]
    advice = ""
    if verdict.difference and verdict.counts:
        read = sorted({attribute for counts in verdict.counts.values() for attribute in counts})
        advice = f"; its code computes with {' and '.join(read)} or across heads: keep what follows from a number of "
        advice += "heads in an attribute of its own, and view heads by -1"
    gather(result, decision.sources, decision.sink, name, verdict.reason + advice)
    return [*decision.sources, decision.sink]


def gather(result: Assignments, sources: tuple[str, ...], sink: str | None, name: str, reason: str) -> None:
    """Shard weights and gather what comes out, which is exact whatever the code between the layers does."""
    note = "gathered, as one rank's heads are not enough"
    for source in sources:
        result.styles[source] = Assignment("column_gather_output", note)
    if sink is not None:
        result.styles[sink] = Assignment("row_split_input", note)
    result.gathered.append((name, reason))
