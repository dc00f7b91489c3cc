"""Checks that the column and row rules of a plan fit together: row layers take the sharded outputs of column layers."""

from __future__ import annotations

from torch import nn

from weft.strategy.recognition.assignments import Assignment, Assignments, display_name, join, parent_name
from weft.strategy.recognition.shell import isolated_execution
from weft.strategy.verification.dataflow import OUTPUT, Flow, flow_of
from weft.strategy.verification.decide import Decision
from weft.strategy.verification.evidence import Evidence
from weft.strategy.verification.weightless import Weightless

_MAX_LAYERS = 64  # calls of layers in one module; the flow of a larger module is not examined


def check_fit(result: Assignments, model: nn.Module, evidence: Evidence) -> None:
    """Check that column and row rules fit together, as far as the forward can be run.

    A remark reports layers whose rules change what their module computes, and layers that were not called in the
    rehearsal (the runs before sharding). Nothing is checked on one rank or with verify="never".

    Raises:
        ValueError: the output of a column layer reaches a layer that is neither row nor replicate_sum_gradients, or
            leaves the model; the input of a row layer comes from a layer that is neither column nor
            replicate_sum_gradients; with verify="always", also what is otherwise a remark, and groups that cannot be
            compared.
    """
    styles = {name: a.style for name, a in result.styles.items() if a.style in ("column", "row") and not a.fused_into}
    if not styles or evidence.tp_size == 1 or evidence.mode == "never":
        return
    modules = dict(model.named_modules())
    with isolated_execution():
        flows = _Flows(model, evidence)
        for name, style in styles.items():
            if name in modules and evidence.is_called(modules[name]):
                (_check_column if style == "column" else _check_row)(name, flows, result)
    layers_with_rules = {id(modules[name]) for name in styles if name in modules}
    uncalled = [name for name in styles if name in modules and not evidence.is_called(modules[name])]
    if uncalled:
        shown = _quoted(tuple(uncalled[:4])) + (f" and {len(uncalled) - 4} more" if len(uncalled) > 4 else "")
        _remark_or_raise(
            f"the column and row rules for {shown} are not compared with the unsharded code ('{uncalled[0]}': "
            f"{evidence.why_unknown(uncalled[0])}); give the module that calls them a forward, and an example if weft "
            "cannot find its arguments.",
            result,
            evidence,
        )
    for decision in evidence.decisions(lambda layer: id(layer) in layers_with_rules):
        if {styles[source] for source in decision.sources} == {"column"} and styles[decision.sink] == "row":
            _check_pair(decision, result, evidence)


def _check_pair(decision: Decision, result: Assignments, evidence: Evidence) -> None:
    """Compare a group that rules shard by column and row; a difference is a remark, with verify="always" an error."""
    verdict, remedy = decision.verdict, "use column_gather_output and row_split_input for them"
    rule_counts: dict[str, dict[str, int]] = {}  # the attributes that the rules divide, by module in the container
    divided = [(name, attribute, value) for (name, attribute), value in result.heads.items()]
    for name, counts in result.counts.items():
        divided += [(name, attribute, value) for attribute, value in counts.items()]
    for name, attribute, value in divided:
        if name == decision.container or name.startswith(f"{decision.container}." if decision.container else ""):
            rule_counts.setdefault(name[len(decision.container) :].lstrip("."), {})[attribute] = value
    if verdict.is_compared and rule_counts != verdict.counts:
        if verdict.is_accepted and verdict.counts:
            attributes = dict.fromkeys(key for counts in verdict.counts.values() for key in counts)
            remedy = f"add heads: {', '.join(attributes)} to the rules of its column layers, or {remedy}"
        verdict = evidence.verdict_with(decision, rule_counts)
    if verdict.is_accepted or not (verdict.is_compared or evidence.mode == "always"):
        return
    text = (
        f"the rules for {_quoted(decision.sources)} and '{decision.sink}' change what "
        f"{display_name(decision.container)} computes: {verdict.reason}; {remedy}."
    )
    _remark_or_raise(text, result, evidence)


def _remark_or_raise(text: str, result: Assignments, evidence: Evidence) -> None:
    """Add a sentence to the remarks; with verify="always", raise it as a ValueError."""
    if evidence.mode == "always":
        raise ValueError(f"parallelize: {text}")
    result.remarks.append(text)


class _Flows:
    """Runs the modules around layers, each once, and returns their flows (`dataflow.Flow`)."""

    def __init__(self, model: nn.Module, evidence: Evidence) -> None:
        self._modules = dict(model.named_modules())
        self._calls = evidence.rehearsal.calls
        self._flow_of: dict[str, Flow | None] = {}

    def of_containers(self, layer: str) -> list[tuple[str, Flow]]:
        """Return (name, flow) for the modules around a layer that can be run, innermost first."""
        named_flows = []
        name = layer
        while name:
            name = parent_name(name)
            if name not in self._flow_of:
                self._flow_of[name] = self._run(name)
            flow = self._flow_of[name]
            if flow is not None:
                named_flows.append((name, flow))
        return named_flows

    def _run(self, name: str) -> Flow | None:
        """Return the flow of a module; None: it was not called, cannot be run alone, or is too large."""
        calls = self._calls.get(id(self._modules[name]))
        if not calls:
            return None
        args, kwargs = calls[0].fresh()
        try:
            run = Weightless(self._modules[name]).run(args, kwargs, training=calls[0].training)
            return flow_of(run) if len(run.calls) <= _MAX_LAYERS else None
        except Exception:  # the user's code may raise: it may need state that the parent sets, or fail in a second run
            return None


def _check_column(name: str, flows: _Flows, result: Assignments) -> None:
    containers = flows.of_containers(name)
    for container, flow in containers:
        targets = [
            join(container, target)
            for target in sorted(flow.reaches.get(_relative_name(container, name), set()) - {OUTPUT})
        ]
        wrong = [target for target in targets if not _takes_shards(result, target)]
        if wrong:
            style = _style(result, wrong[0])
            remedy = f"'{name}' column_gather_output"
            if style == "replicate":
                remedy = f"'{wrong[0]}' the style row, or {remedy}"
            raise ValueError(
                f"parallelize: the rule for '{name}' is column, which leaves its output sharded, but the output "
                f"reaches '{wrong[0]}' with the style '{style}'; give {remedy}."
            )
        if targets:
            return
    if not containers:
        return
    # Beyond the outermost module that can be called, only another rule of the plan could take the shards.
    outermost, flow = containers[-1]
    prefix = f"{outermost}." if outermost else ""
    is_taken = any(_takes_shards(result, other) for other in result.styles if not other.startswith(prefix))
    if not is_taken and OUTPUT in flow.reaches.get(_relative_name(outermost, name), set()):
        raise ValueError(
            f"parallelize: the rule for '{name}' is column, which leaves its output sharded, but no row layer follows "
            "and the model returns it; use column_gather_output, or vocab_head for logits."
        )


def _check_row(name: str, flows: _Flows, result: Assignments) -> None:
    for container, flow in flows.of_containers(name):
        layer = _relative_name(container, name)
        sources = [join(container, source) for source, targets in flow.reaches.items() if layer in targets]
        wrong = [source for source in sources if not _gives_shards(result, source)]
        if wrong:
            raise ValueError(
                f"parallelize: the rule for '{name}' is row, which takes a sharded input, but the input comes from "
                f"'{wrong[0]}' with the style '{_style(result, wrong[0])}'; give '{wrong[0]}' the style column, or "
                f"'{name}' row_split_input."
            )
        if sources:
            return


def _relative_name(container: str, name: str) -> str:
    """Return the name of a layer relative to the container that holds it."""
    return name[len(container) + 1 :] if container else name


def _style(result: Assignments, name: str) -> str:
    return result.styles.get(name, Assignment("replicate")).style


def _takes_shards(result: Assignments, name: str) -> bool:
    """Return whether a layer accepts an input that is sharded by features."""
    return _style(result, name) in ("row", "replicate_sum_gradients")


def _gives_shards(result: Assignments, name: str) -> bool:
    """Return whether a layer's output is sharded by features."""
    return _style(result, name) in ("column", "replicate_sum_gradients")


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)
