"""Reads plans from dicts, YAML, JSON and dotted names into `_plan.Plan` or callables; without torch."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from weft.strategy import _plan

Style = str | Mapping[str, Any]
StyleOf = Callable[[str, Any], Style | None]  # the style of a module, from its name and the module
# Weft's styles by the names in transformers' plans: the names of version 5, then the remaining ones of version 4.
HUGGING_FACE_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather_output",
    "rowwise_split_input": "row_split_input",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "replicate_sum_gradients",
    "colwise_rep": "column_gather_output",
    "rowwise_rep": "row_split_input",
    "local_colwise": "column",
    "local_rowwise": "row",
    "moe_tp_experts": "experts",
}
PRESETS = ("auto", "huggingface")
KINDS = (
    "'auto', 'huggingface', the path of a YAML or JSON file, a mapping from pattern to style as YAML or JSON text, or "
    "a callable by its dotted name, such as 'mypackage.plans.llama'"
)
_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
_FILE_ENDINGS = (".yaml", ".yml", ".json")
_ADVICE = "write one 'pattern: style' per line, or pass 'auto'"
_OPTION_TYPES: dict[str, type | tuple[type, ...]] = {
    "heads": (str, type(None)),
    "recompute": bool,
    "offload": bool,
    "precision": (str, type(None)),
}


def load(text: str, what: str, *, owner: str = "plan", key: str = "pattern", advice: str = _ADVICE) -> Any:
    """Return the value of a YAML or JSON text.

    Args:
        what: names the text in errors.
        owner, key, advice: parts of errors: the first word, the noun for a mapping's key, and the remedy.

    Raises:
        ValueError: the text is invalid, empty, or has a key twice.
    """
    import yaml  # JSON is YAML

    class Loader(yaml.SafeLoader):
        """Raises for duplicate keys, of which YAML's own loader silently keeps the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            duplicate = next((key for idx, key in enumerate(keys) if key in keys[:idx]), None)
            if duplicate is not None:
                raise ValueError(f"{owner}: the {what} gives the {key} '{duplicate}' twice; keep one of them.")
            return super().construct_mapping(node, deep)

    # JSON's numbers without a dot, such as 1e-06, which YAML 1.1 reads as text.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))

    try:
        rules = yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{owner}: the {what} is not YAML ({reason}); {advice}.") from error
    if rules is None:
        raise ValueError(f"{owner}: the {what} is empty; {advice}.")
    return rules


def from_text(text: str) -> _plan.Plan | StyleOf:
    """Return the plan of a string other than `PRESETS`: rules from a file or text, or a callable by its dotted name.

    Raises:
        ValueError: the string is none of these.
    """
    name = text.strip()
    has_file_ending = "\n" not in name and name.endswith(_FILE_ENDINGS)
    if has_file_ending and os.path.isfile(name):
        return from_mapping(load(Path(name).read_text(encoding="utf-8"), f"file {name}"))
    if ":" in text or "{" in text:
        return from_mapping(load(text, "text"))
    if has_file_ending:
        raise ValueError(f"plan: there is no file {name!r}; pass {KINDS}.")
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return _named_callable(name)
    raise ValueError(f"plan: got {text!r}{_nearest(name, PRESETS)}; pass {KINDS}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause of an error with the known name nearest to `name`; "" if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f", which is close to {near[0]!r}" if near else ""


def _named_callable(name: str) -> StyleOf:
    """Import the longest prefix of `name` that is a module; return the attribute that the rest of `name` names."""
    parts = name.split(".")
    for num_parts in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:num_parts])
        try:
            value: Any = importlib.import_module(prefix)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{prefix}.".startswith(f"{error.name}."):
                raise  # the module exists, and imports a missing one
            continue
        for idx in range(num_parts, len(parts)):
            if not hasattr(value, parts[idx]):
                raise ValueError(f"plan: {'.'.join(parts[:idx])!r} has no {parts[idx]!r}; pass {KINDS}.")
            value = getattr(value, parts[idx])
        if not callable(value):
            raise ValueError(f"plan: {name!r} is a {type(value).__name__}, which cannot be called; pass {KINDS}.")
        return cast(StyleOf, value)
    raise ValueError(f"plan: there is no module {parts[0]!r} for {name!r}; pass {KINDS}.")


def from_mapping(rules: Any) -> _plan.Plan:
    """Return rules from a dict of pattern to style; raises ValueError for anything else."""
    if not isinstance(rules, Mapping):
        raise ValueError(f"plan: got {rules!r}; pass a mapping from pattern to style, or 'auto'.")
    return _plan.Plan([_rule(pattern, value) for pattern, value in rules.items()])


def _rule(pattern: Any, value: Any) -> _plan.Rule:
    if not isinstance(pattern, str):
        raise ValueError(f"plan: the pattern {pattern!r} is no text; put it in quotes.")
    if isinstance(value, str):
        return _plan.Rule(pattern, HUGGING_FACE_STYLES.get(value, value))
    if isinstance(value, Mapping) and isinstance(value.get("style"), str):
        options = {key: option for key, option in value.items() if key != "style"}
        if str(options.get("precision")).startswith("torch."):  # a torch.dtype, recognised without importing torch
            options["precision"] = str(options["precision"]).removeprefix("torch.")
        for key in options:
            if key not in _OPTION_TYPES:
                raise ValueError(
                    f"plan: pattern '{pattern}' has the option {key!r}{_nearest(str(key), _OPTION_TYPES)}; the options "
                    f"of a rule are {', '.join(_OPTION_TYPES)}."
                )
        if all(isinstance(option, _OPTION_TYPES[key]) for key, option in options.items()):
            return _plan.Rule(pattern, value["style"], **options)
    raise ValueError(
        f"plan: pattern '{pattern}' has the value {value!r}; write a style, "
        '{"style": a style, "heads": an attribute}, or {"style": a style, "recompute": true, "offload": true, '
        '"precision": "float32"}.'
    )
