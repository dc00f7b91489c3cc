"""Decides how the linear layers of a model are sharded: finds groups (`dataflow.Group`) and gives a verdict on each.

Modules are examined from the inside out, each with the arguments of its recorded calls, so that a group is found in the
smallest module that contains all of it. Modules of equal code, configuration and arguments are examined once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from weft.strategy.recognition.assignments import display_name, join
from weft.strategy.recognition.attention import counts_heads
from weft.strategy.recognition.linears import features
from weft.strategy.recognition.shell import isolated_execution
from weft.strategy.verification.dataflow import Flow, Group, flow_of
from weft.strategy.verification.heads import Counts, Verdict, verdict_on
from weft.strategy.verification.rehearsal import Call, Rehearsal
from weft.strategy.verification.weightless import Layers, Weightless

_MAX_CALLS_OF_LAYERS = 64  # in an examined module; with more calls, only the modules inside it are examined
_MAX_CANDIDATES = 12  # sets of attributes that are tried for one group


@dataclasses.dataclass(frozen=True)
class Decision:
    """One group of a model, the smallest module that contains all of it, and the verdict on sharding it by heads."""

    container: str
    group: Group
    verdict: Verdict

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the source layers in the model."""
        return tuple(join(self.container, layer) for layer in self.group.sources)

    @property
    def sink(self) -> str:
        """The name of the sink layer in the model."""
        return join(self.container, self.group.sink)


def decide(
    model: nn.Module,
    rehearsal: Rehearsal,
    num_ranks: int,
    is_free: Callable[[nn.Module], bool],
    *,
    trust: bool = False,
    rejects_stored: bool = False,
) -> list[Decision]:
    """Return the groups among the linear layers that are free to be sharded, with a verdict on each.

    Args:
        is_free: returns whether a linear layer may be sharded and is not sharded yet.
        trust: accept groups without comparing them.
        rejects_stored: do not accept a group whose modules keep tensors of one rank's features in attributes.
    """
    examiner = _Examiner(model, rehearsal, num_ranks, is_free, trust, rejects_stored)
    with isolated_execution():
        examiner.visit("", model)
    return examiner.decisions


def verdict_with(model: nn.Module, rehearsal: Rehearsal, num_ranks: int, decision: Decision, counts: Counts) -> Verdict:
    """Return the verdict on a group with the attributes in `counts`, and no others, set to a rank's values.

    `counts`: by name of a module inside the group's container, then by attribute.
    """
    module = model.get_submodule(decision.container)
    with isolated_execution():
        return verdict_on(module, decision.group, rehearsal.calls_of(module), num_ranks, [counts])


@dataclasses.dataclass(frozen=True)
class _Ungrouped:
    """The free layers of a module (itself included) that are in no group.

    layers: their ids.
    is_blocked: whether some of them would be a group if a module did not also return the sources' outputs.
    """

    layers: set[int] = dataclasses.field(default_factory=set)
    is_blocked: bool = False


class _Examiner:
    def __init__(
        self,
        model: nn.Module,
        rehearsal: Rehearsal,
        num_ranks: int,
        is_free: Callable[[nn.Module], bool],
        trust: bool,
        rejects_stored: bool,
    ) -> None:
        self.model, self.rehearsal, self.num_ranks, self.trust = model, rehearsal, num_ranks, trust
        self.rejects_stored = rejects_stored
        self.signatures = rehearsal.signatures
        self.free = {
            id(m) for m in model.modules() if id(m) in rehearsal.called and not _is_read(m, rehearsal) and is_free(m)
        }
        self.decisions: list[Decision] = []
        self._seen: set[int] = set()
        self._flows: dict[Any, Flow | None] = {}
        self._verdicts: dict[Any, Verdict] = {}
        self._num_alike = 0  # modules compared on two ranks only, so far

    def visit(self, name: str, module: nn.Module) -> _Ungrouped:
        """Decide on the groups inside a module and return its ungrouped layers."""
        if id(module) in self._seen:
            return _Ungrouped()
        self._seen.add(id(module))
        results = [self.visit(join(name, key), child) for key, child in module.named_children()]
        layers = set[int]().union(*(each.layers for each in results))
        if id(module) in self.free:
            layers.add(id(module))
        # A group that no child contains has layers in several children, or a child returns outputs of the sources.
        may_have_more = sum(bool(each.layers) for each in results) > 1 or any(each.is_blocked for each in results)
        calls = self._calls(module)
        ungrouped = _Ungrouped(layers, any(each.is_blocked for each in results))
        if len(layers) < 2 or not may_have_more or not calls:
            return ungrouped
        names = {name: layer for layer, name in Layers.of(module).linears.items() if layer in layers}
        key = (
            self.signatures.of(module, self._has_own_calls(module)),
            *(call.kind() for call in calls),
            tuple(sorted(names)),
        )
        if key not in self._flows:
            self._flows[key] = self._flow(module, calls)
        flow = self._flows[key]
        if flow is None:
            return ungrouped
        for group in flow.groups():
            if names.keys() >= {*group.sources, group.sink}:
                verdict = self._confirm(name, group, self._verdict_on(module, group, calls))
                self.decisions.append(Decision(name, group, verdict))
                layers -= {names.pop(layer) for layer in (*group.sources, group.sink)}
        blocked = any(names.keys() >= {*group.sources, group.sink} for group in flow.blocked_groups())
        return _Ungrouped(layers, blocked)

    def _confirm(self, name: str, group: Group, verdict: Verdict) -> Verdict:
        """Return the verdict after a second comparison, in the outermost module that was called.

        Only groups whose modules keep tensors in attributes need a second comparison: modules around them may use these
        tensors. Such a group is rejected with `rejects_stored`, or if its own container is the outermost module that
        was called: the code outside, such as a training_step, cannot be compared.
        """
        if not verdict.is_accepted or not verdict.has_stored_tensors or self.trust:
            return verdict
        outermost = next(
            (n for n, m in self.model.named_modules() if _is_or_contains(n, name) and self._calls(m)), name
        )
        if outermost == name or self.rejects_stored:
            reason = "it keeps tensors in attributes, which code outside may read; return them from its forward instead"
            return dataclasses.replace(verdict, is_accepted=False, reason=reason)
        prefix = name[len(outermost) + 1 :] if outermost else name
        outer_group = Group(tuple(join(prefix, layer) for layer in group.sources), join(prefix, group.sink))
        counts = {join(prefix, module) if module else prefix: values for module, values in verdict.counts.items()}
        module = self.model.get_submodule(outermost)
        outer = verdict_on(module, outer_group, self._calls(module), self.num_ranks, [counts])
        if outer.is_accepted:
            return verdict
        return dataclasses.replace(verdict, is_accepted=False, reason=f"{outer.reason} in {display_name(outermost)}")

    def _has_own_calls(self, module: nn.Module) -> bool:
        return id(module) in self.rehearsal.calls

    def _calls(self, module: nn.Module) -> list[Call]:
        """See `Rehearsal.calls_of`."""
        return self.rehearsal.calls_of(module)

    def _verdict_on(self, module: nn.Module, group: Group, calls: Sequence[Call]) -> Verdict:
        """Return the verdict on a group, from all calls.

        - A module equal to an earlier one gets the earlier verdict, and so does a module without recorded calls that
          differs from an earlier one only in its index, such as `layer_idx`.
        - A module with recorded calls that differs only in its index from an accepted one is compared on one call and
          the shards of two ranks, which rotate from module to module; a module that is rejected is compared in full.
        - All other modules are compared in full.
        """
        arguments = tuple(call.kind() for call in calls)
        exact = (self.signatures.of(module, self._has_own_calls(module)), arguments, group)
        alike = (self.signatures.of(module, False), arguments, group)
        verdict = self._verdicts.get(exact)
        if verdict is None and not self._has_own_calls(module):
            verdict = self._verdicts.get(alike)
        if verdict is None and (earlier := self._verdicts.get(alike)) is not None and earlier.is_accepted:
            first = 2 * self._num_alike % self.num_ranks
            ranks = sorted({first, (first + 1) % self.num_ranks})
            self._num_alike += 1
            verdict = self._compare(module, group, calls[:1], [earlier.counts], ranks)
            verdict = verdict if verdict.is_accepted else None
        if verdict is None:
            verdict = self._compare(module, group, calls)
        self._verdicts[exact] = verdict
        self._verdicts.setdefault(alike, verdict)
        return verdict

    def _flow(self, module: nn.Module, calls: Sequence[Call]) -> Flow | None:
        weightless = Weightless(module, calls[0].scale)
        args, kwargs = calls[0].fresh()
        try:
            run = weightless.run(args, kwargs, training=calls[0].training)
            return flow_of(run) if len(run.calls) <= _MAX_CALLS_OF_LAYERS else None
        except Exception:  # the user's code may raise: it may need state that the parent sets, or fail in a second run
            return None

    def _compare(
        self,
        module: nn.Module,
        group: Group,
        calls: Sequence[Call],
        candidates: Sequence[Counts] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Verdict:
        modules = dict(module.named_modules())
        for layer in (*group.sources, group.sink):
            size = features(modules[layer])[0 if layer == group.sink else 1]
            if size % self.num_ranks:
                reason = f"the {size} features of '{layer}' do not divide by {self.num_ranks}"
                return Verdict(False, reason=reason, is_compared=False)
            if modules[layer]._forward_hooks or modules[layer]._forward_pre_hooks:
                return Verdict(
                    False, reason=f"'{layer}' has hooks, which would see one rank's heads", is_compared=False
                )
        if self.num_ranks == 1:
            return Verdict(True)
        if candidates is None:
            candidates = list(itertools.islice(_candidates(module, group, self.num_ranks), _MAX_CANDIDATES))
        if self.trust:
            return Verdict(True, candidates[min(1, len(candidates) - 1)])
        verdict = verdict_on(module, group, calls, self.num_ranks, candidates, ranks)
        indivisible = _indivisible_counts(module, group, self.num_ranks)
        if verdict.is_accepted or not indivisible:
            return verdict
        return dataclasses.replace(verdict, reason=f"{verdict.reason}, and {indivisible}")


def _is_or_contains(name: str, other: str) -> bool:
    return not name or name == other or other.startswith(f"{name}.")


def _is_read(module: nn.Module, rehearsal: Rehearsal) -> bool:
    return any(id(p) in rehearsal.read for p in module._parameters.values() if p is not None)


# ---- attributes that may count heads -------------------------------------------------------------------------


def _indivisible_counts(container: nn.Module, group: Group, num_ranks: int) -> str:
    """Return a text on the first attribute that seems to count heads and does not divide by `num_ranks`; "" if none."""
    modules = dict(container.named_modules())
    sizes = {features(modules[layer])[1] for layer in group.sources}
    for module in modules.values():
        for attribute, value in module.__dict__.items():
            is_count = (
                type(value) is int and counts_heads(attribute) and any(size % value == 0 for size in sizes if value)
            )
            if is_count and value % num_ranks:
                return f"'{attribute}' = {value} does not divide by {num_ranks}"
    return ""


def _candidates(container: nn.Module, group: Group, num_ranks: int) -> Iterator[Counts]:
    """Yield sets of attributes with their divided values, likeliest first.

    The order: no attributes, attributes whose names suggest a number of heads, attributes equal to the width of a
    layer, others that divide such a width. The comparison rejects wrong sets; names only decide the order.
    """
    yield {}
    modules = dict(container.named_modules())
    sizes = {features(modules[layer])[1] for layer in group.sources} | {features(modules[group.sink])[0]}
    counts: dict[tuple[str, str], int] = {}
    widths: dict[tuple[str, str], int] = {}
    others: dict[tuple[str, str], int] = {}
    for name, module in modules.items():
        if type(module).forward is nn.Module.forward or name in (*group.sources, group.sink):
            continue
        for attribute, value in module.__dict__.items():
            if type(value) is not int or value < 2 or value % num_ranks:
                continue
            location = (name, attribute)
            if value in sizes:
                widths[location] = value
            elif any(size % value == 0 for size in sizes):
                (counts if counts_heads(attribute) else others)[location] = value
    by_value: dict[int, list[tuple[str, str]]] = {}
    for location, value in others.items():
        by_value.setdefault(value, []).append(location)
    choices = [[*counts], [*counts, *widths], [*widths]]
    for locations in by_value.values():
        choices += [[*locations], [*locations, *widths]]
    choices += [[location, *widths] for location in counts] + [[location] for location in counts]
    values = {**counts, **widths, **others}
    yielded: list[Counts] = [{}]
    for choice in choices:
        divided: dict[str, dict[str, int]] = {}
        for name, attribute in choice:
            divided.setdefault(name, {})[attribute] = values[name, attribute] // num_ranks
        if divided not in yielded:
            yielded.append(divided)
            yield divided
