"""The styles that a plan gives to the modules of one model, before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from weft.strategy import _plan
from weft.strategy.recognition import probe
from weft.strategy.recognition.attribute_reads import Watched, watch
from weft.strategy.recognition.module_signatures import signature
from weft.strategy.sharding.shard_dropout import ShardedDim
from weft.strategy.sharding.state import MlpLayers


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The style of one module.

    mlp, activation, recompute: of a fused MLP, whose forward is replaced by one operator.
    fused_into: for a layer of a fused MLP, the name of the MLP.
    rule: the pattern that gave the style, several of them joined by ", ", or "auto".
    container: for column and row layers, the name of the module in whose forward the column layers return shards and
        the row layers take them. In calls from other code, column layers return full tensors, and row layers take them.
        None, or sequence parallelism: column layers return shards, and row layers take them, in all calls.
    watched: the attributes of a fused MLP that must keep their values.
    """

    style: str
    note: str = ""
    mlp: MlpLayers | None = None
    activation: str = ""
    fused_into: str | None = None
    recompute: bool = False
    rule: str = ""
    container: str | None = None
    watched: tuple[Watched, ...] = ()


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that a rule gives to one module. `rule`: its pattern; `precision`: the name of a dtype, or ""."""

    recompute: bool = False
    offload: bool = False
    precision: str = ""
    rule: str = ""

    def __str__(self) -> str:
        parts = ["recompute"] * self.recompute + ["offload"] * self.offload
        return ", ".join(parts + [f"precision {self.precision}"] * bool(self.precision))


@dataclasses.dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer with adapters (see `recognition.adapters`), by the names of its modules in the model.

    in_features: of the layer.
    base: the layer without its adapters.
    factors: (A, B) of each adapter.
    dropouts: those that adapters apply to their input, with p > 0.
    """

    in_features: int
    base: str
    factors: tuple[tuple[str, str], ...]
    dropouts: tuple[str, ...]


# The shapes of the tensors with which a module is known to be called; empty: unknown. Where None is
# allowed, it means that the module is called with other arguments than one tensor.
InputShapes = Sequence[tuple[int, ...]]
_EXPOSED = (
    "it keeps tensors in attributes, which have one rank's features now; code outside of the model that reads them "
    "computes with a shard: return them from the forward instead."
)


@dataclasses.dataclass
class Assignments:
    """The styles of one model's modules, and all else that a plan decides about them, by the names of the modules.

    heads: the values on a rank, by (module, attribute), of the attributes that the option `heads` of a rule names; they
        are set when the plan is applied, and stay.
    counts: by module, then by attribute, values on a rank that are set only while the module's forward runs.
    dropouts: by the name of an nn.Dropout, the dims along which its input is sharded.
    options: for the modules whose rule gives any. The recompute of a fused MLP is not here, but in its Assignment.
    unread_aliases: names of tied parameters in modules that hold them and do not read them; they are sharded as in the
        module that reads them.
    adapted: linear layers with adapters, and the assignments of these layers; `styles` has those of the modules inside.
    gathered: (module, reason) for each warning that a module's weights are sharded and its activations gathered.
    exposed: modules that keep tensors of one rank's features in attributes.
    styles_elsewhere: the styles that rules give to modules of other pipeline stages, by the modules' names; None: they
        are not known here, because a preset chooses them on those stages.
    notes: lines of the report, such as on modules that stay replicated.
    remarks: sentences that the user must read.
    """

    tp_size: int
    styles: dict[str, Assignment] = dataclasses.field(default_factory=dict)
    heads: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    dropouts: dict[str, tuple[ShardedDim, ...]] = dataclasses.field(default_factory=dict)
    options: dict[str, Options] = dataclasses.field(default_factory=dict)
    unread_aliases: set[str] = dataclasses.field(default_factory=set)
    adapted: dict[str, tuple[AdaptedLayer, Assignment]] = dataclasses.field(default_factory=dict)
    gathered: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    exposed: list[str] = dataclasses.field(default_factory=list)
    styles_elsewhere: dict[str, str] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    _probe_results: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def has_sequence_rules(self) -> bool:
        """Return whether a rule has the style sequence_parallel, for a module of any pipeline stage."""
        own = (assignment.style for assignment in self.styles.values())
        return "sequence_parallel" in (*own, *(self.styles_elsewhere or {}).values())

    def precision_of(self, module_name: str) -> str:
        """Return the name of the dtype in the rule of a module, else of the nearest parent; "" if no rule names one."""
        own = self.options.get(module_name, Options()).precision
        return own or (self.precision_of(parent_name(module_name)) if module_name else "")

    def keep_replicated(self, module_name: str, reason: str) -> None:
        self.notes.append(f"{display_name(module_name)}: left replicated: {reason}")

    def divide_heads(self, module_name: str, attribute: str, num_heads: int) -> None:
        """Record num_heads / tp_size as the attribute's value on a rank; raises ValueError if it is no whole number."""
        _plan.check_heads(module_name, attribute, num_heads, self.tp_size)
        self.heads[module_name, attribute] = num_heads // self.tp_size

    def find_activation(
        self, container: nn.Module, mlp: MlpLayers, shapes: InputShapes | None
    ) -> tuple[MlpLayers, str] | str:
        """Return the result of `probe.find_activation`, called once for modules with equal signatures and shapes.

        If `shapes` is None, the probe is not called, and the result is a reason.
        """
        if shapes is None:
            return "it is called with other arguments than one tensor"
        found: tuple[MlpLayers, str] | str = self._cached(probe.find_activation, container, mlp, tuple(shapes))
        return found

    def why_not_split(self, container: nn.Module, mlp: MlpLayers) -> str | None:
        """Return the result of `probe.why_not_split`, called once for modules with equal signatures."""
        reason: str | None = self._cached(probe.why_not_split, container, mlp)
        return reason

    def _cached(self, function: Callable[..., Any], container: nn.Module, mlp: MlpLayers, *args: Any) -> Any:
        key = (function, signature(container), mlp, *args)
        if key not in self._probe_results:
            self._probe_results[key] = function(container, mlp, *args)
        return self._probe_results[key]

    def warnings(self) -> list[str]:
        """Return the remarks, and sentences on problems of modules.

        Modules with the same problem whose names differ only in indices get one sentence.
        """
        names_by_problem: dict[tuple[str, str], list[str]] = {}  # by pattern and sentence
        for name, reason in self.gathered:
            sentence = f"its weights are sharded and its activations gathered: {reason}."
            names_by_problem.setdefault((_as_pattern(name), sentence), []).append(name)
        for name in self.exposed:
            names_by_problem.setdefault((_as_pattern(name), _EXPOSED), []).append(name)
        sentences = [*self.remarks]
        for (pattern, sentence), names in names_by_problem.items():
            which = display_name(names[0]) if len(names) == 1 else f"'{pattern}' ({len(names)} modules)"
            sentences.append(f"{which}: {sentence}")
        return sentences

    def record_rule(self, rule: str) -> None:
        """Record the rule that gave the styles added since the last call."""
        for name, assignment in self.styles.items():
            if not assignment.rule:
                self.styles[name] = dataclasses.replace(assignment, rule=rule)

    def split_layers(self, container_name: str, mlp: MlpLayers, note: str) -> None:
        """Give the layers of an MLP column and row styles; the MLP keeps its own forward."""
        for child in mlp.children:
            style = "row" if child == mlp.down else "column"
            self.styles[join(container_name, child)] = Assignment(style, note, container=container_name)

    def fuse(self, container_name: str, container: nn.Module, mlp: MlpLayers, activation: str, recompute: bool) -> None:
        """Give an MLP the fused style, and its layers the styles by which their parameters are sharded."""
        note = f"{activation}, {'gated' if mlp.gate is not None else 'plain'}{', recompute' if recompute else ''}"
        self.styles[container_name] = Assignment(
            "column_row_mlp",
            note,
            mlp,
            activation,
            recompute=recompute,
            watched=watch(container, self._cached(probe.attribute_reads, container, mlp)),
        )
        for child in mlp.children:
            style = "row" if child == mlp.down else "column"
            self.styles[join(container_name, child)] = Assignment(
                style, note, fused_into=container_name, container=container_name
            )


def _as_pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def join(module_name: str, child: str) -> str:
    return f"{module_name}.{child}" if module_name else child


def display_name(module_name: str) -> str:
    return f"'{module_name}'" if module_name else "the model itself"


def parent_name(module_name: str) -> str:
    return module_name.rpartition(".")[0]


def assign_mlp(
    result: Assignments,
    name: str,
    container: nn.Module,
    mlp: MlpLayers,
    shapes: InputShapes | None,
    recompute: bool = False,
) -> str | None:
    """Give an MLP the fused style, or its layers column and row styles; return the reason if neither is correct.

    Raises:
        ValueError: `recompute` is set for an MLP that cannot be fused.
    """
    reason = probe.why_not_fused(container, mlp)
    if reason is None:
        found = result.find_activation(container, mlp, shapes)
        if not isinstance(found, str):
            result.fuse(name, container, *found, recompute)
            return None
        reason = found
    if recompute:
        raise ValueError(
            f"parallelize: the rule for {display_name(name)} says recompute, which for this style is an option of "
            f"the fused operator, and the MLP cannot be fused: {reason}; remove recompute from the rule."
        )
    not_split = result.why_not_split(container, mlp)
    if not_split is None:
        result.split_layers(name, mlp, f"not fused: {reason}")
    return not_split


def assign_gate_up_mlp(result: Assignments, name: str, layers: tuple[str, str]) -> None:
    """Shard the weights of an MLP whose gate and up projections are one layer, and gather that layer's output."""
    note = f"gathered, as '{layers[0]}' is gate and up in one"
    result.styles[join(name, layers[0])] = Assignment("column_gather_output", note)
    result.styles[join(name, layers[1])] = Assignment("row_split_input")
