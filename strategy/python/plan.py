"""Plan: a mapping of modules to styles, as a value that parses, prints and is applied by `parallelize`."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from weft.strategy import _plan
from weft.strategy.planning.auto import assign_auto
from weft.strategy.planning.hugging_face import assign_hugging_face
from weft.strategy.planning.plan_text import KINDS, PRESETS, Style, from_mapping, from_text, load
from weft.strategy.planning.rules import assign_explicit
from weft.strategy.planning.torch_styles import replace_torch_styles
from weft.strategy.recognition.adapters import expand, hidden_adapters
from weft.strategy.recognition.assignments import Assignments
from weft.strategy.reports.report_table import Report, report
from weft.strategy.verification.evidence import MODES

Rules = Mapping[str, Style] | Callable[[str, nn.Module], Style | None] | str | os.PathLike[str]
AUTO, HUGGING_FACE = PRESETS


class Plan:
    """Rules from module-name patterns to styles.

    Args:
        rules: one of
            - a dict from pattern to style, `{"layers.*.attention.wq": {"style": "column", "heads": "n_heads"}}`;
              styles are those of weft.strategy.STYLES, Hugging Face's names for them, or torch's ParallelStyle
              objects (see `planning.torch_styles`); `*` in a pattern matches any characters within one level, "" is the
              model itself;
            - a callable that is called with each module's name and the module, and returns its style or None;
            - a string, which is tried in this order: "auto", which recognises transformer blocks;
              "huggingface", the plan that a model of transformers brings with it; the path of a file (.yaml, .yml,
              .json) with such a dict; such a dict as YAML or JSON text; the dotted name of such a callable,
              "mypackage.plans.llama", which is imported;
            - the path of a file as an os.PathLike;
            - another Plan, whose options apply where an argument below is not given.
        sequence_parallel: in repeated blocks, shard activations along the sequence, the last dim but one of a block's
            first input, between the layers that the plan shards. The other modules of the blocks must treat each
            token by itself: norms, dropout, residual sums.
        verify: "auto" (default): layers that "auto", "huggingface" or the style `attention` would shard by heads are
            compared with the unsharded code (`weft.strategy.verification`), and their activations are gathered if the
            results differ; explicit column and row rules are compared, too, and a difference is a warning. "always": a
            difference under an explicit rule, or a layer that cannot be compared, raises ValueError. "never": none of
            these comparisons is made; an MLP's forward is still compared with the fused operator that replaces it.
        example: the arguments with which verification calls the model: a tensor, a tuple of positional or a dict of
            keyword arguments. None: the model's `example_input_array`, or inputs that follow from its Hugging Face
            config or its first layers.

    Raises:
        ValueError: an unknown style, a malformed pattern, two values for one pattern, a string that is none of these.
        TypeError: rules of another type.
    """

    def __init__(
        self, rules: Rules | Plan, *, sequence_parallel: bool = False, verify: str | None = None, example: Any = None
    ) -> None:
        if verify is not None and verify not in MODES:
            raise ValueError(f"plan: verify is {verify!r}; pass one of {', '.join(map(repr, MODES))}.")
        inherited = rules if isinstance(rules, Plan) else None
        self.verify: str = verify or ("auto" if inherited is None else inherited.verify)
        self.example: Any = inherited.example if inherited is not None and example is None else example
        self.sequence_parallel: bool = sequence_parallel or (inherited is not None and inherited.sequence_parallel)
        self._model: weakref.ref[nn.Module] | None = None
        self._callable: Callable[[str, nn.Module], Style | None] | None = None
        self._rules: _plan.Plan | None = None
        self.preset = ""
        if isinstance(rules, Plan):
            self._callable, self._rules, self.preset = rules._callable, rules._rules, rules.preset
        elif isinstance(rules, _plan.Plan):
            self._rules = rules
        elif isinstance(rules, Mapping):
            self._rules = from_mapping(replace_torch_styles(rules))
        elif isinstance(rules, os.PathLike):
            self._rules = from_mapping(load(Path(rules).read_text(encoding="utf-8"), f"file {rules}"))
        elif isinstance(rules, str):
            self._read(rules)
        elif callable(rules):
            self._callable = rules
        else:
            raise TypeError(
                f"plan: got a {type(rules).__name__}; pass a dict from pattern to style, a callable, or as a string "
                f"{KINDS}."
            )

    def _read(self, text: str) -> None:
        if text.strip() in (AUTO, HUGGING_FACE):
            self.preset = text.strip()
            return
        rules = from_text(text)
        if isinstance(rules, _plan.Plan):
            self._rules = rules
        else:
            self._callable = rules

    @classmethod
    def from_yaml(cls, text: str) -> Plan:
        """Return a plan from a YAML mapping of pattern to style; raises ValueError for other text."""
        return cls(cast("Rules", from_mapping(load(text, "YAML text"))))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return a plan from a JSON object of pattern to style; raises ValueError for other text."""
        try:
            return cls(cast("Rules", from_mapping(json.loads(text))))
        except json.JSONDecodeError as error:
            raise ValueError(f"plan: the text is not JSON ({error}); pass an object from pattern to style.") from error

    @property
    def is_auto(self) -> bool:
        """Whether the rules are the preset "auto"."""
        return self.preset == AUTO

    def to_dict(self) -> dict[str, str | dict[str, str | bool]]:
        """Return the rules as a dict. Raises ValueError for a preset or callable, whose rules depend on the model."""
        rules: dict[str, str | dict[str, str | bool]] = json.loads(self.to_json())
        return rules

    def to_yaml(self) -> str:
        """Return the rules as YAML text; raises ValueError like `to_dict`."""
        return str(self._fixed_rules())

    def to_json(self) -> str:
        """Return the rules as JSON text; raises ValueError like `to_dict`."""
        return self._fixed_rules().to_json()

    def report(self) -> Report:
        """Return the current report of the model that this plan was last applied to.

        Raises:
            ValueError: the plan was not applied yet, or its model no longer exists.
        """
        model = None if self._model is None else self._model()
        if model is None:
            what = "was not applied yet" if self._model is None else "was applied to a model that is gone"
            raise ValueError(f"plan.report: this plan {what}; pass it to weft.parallelize first.")
        return report(model)

    def _applied_to(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def assign(self, model: nn.Module, tp_size: int) -> Assignments:
        """Return the styles of the modules; raises ValueError, naming modules, for rules that do not fit the model."""
        with hidden_adapters(model) as adapted:
            assignments = self._assign(model, tp_size)
        expand(assignments, adapted)
        return assignments

    def _assign(self, model: nn.Module, tp_size: int) -> Assignments:
        if self.preset:
            if self.is_auto:
                return assign_auto(model, tp_size, self.verify, self.example, shards_sequence=self.sequence_parallel)
            return assign_hugging_face(model, tp_size, self.verify, self.example)
        return assign_explicit(model, self.rules_for(model), tp_size, self.verify, self.example)

    def key(self) -> Any:
        """Return a key of the rules and of `sequence_parallel`; `verify` and `example` do not change the key."""
        return self.preset or self._callable or self._rules, self.sequence_parallel

    def offloads(self, model: nn.Module) -> bool:
        """Return whether a rule has the option offload; False for a preset."""
        return not self.preset and any(rule.offload for rule in self.rules_for(model).rules)

    def rules_for(self, model: nn.Module) -> _plan.Plan:
        """Return the rules of this plan on a model; raises ValueError for a preset."""
        if self._callable is None:
            return self._fixed_rules()
        styles = {name: self._callable(name, module) for name, module in model.named_modules()}
        return from_mapping(replace_torch_styles({name: style for name, style in styles.items() if style is not None}))

    def _fixed_rules(self) -> _plan.Plan:
        if self._rules is None:
            what = f"'{self.preset}'" if self.preset else "a callable"
            raise ValueError(f"plan: the rules of {what} depend on the model; apply it and read plan.report().")
        return self._rules

    def __str__(self) -> str:
        if self._rules is not None:
            return str(self._rules)
        return self.preset or f"<rules of {self._callable!r}>"

    def __repr__(self) -> str:
        return f"Plan({self.to_dict()!r})" if self._rules is not None else f"Plan({str(self)!r})"
