"""Rules of a plan as dicts, YAML and JSON, read into `_plan.Plan`; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.strategy import _plan

Style = str | Mapping[str, str | bool]
_ADVICE = "write one 'pattern: style' a line, or pass 'auto'"
_OPTION_TYPES = {"heads": (str, type(None)), "recompute": bool}


def load(text: str, what: str, *, owner: str = "plan", key: str = "pattern", advice: str = _ADVICE) -> Any:
    """The value of a YAML or JSON text; ValueError, naming `what` it is, for one that is neither, or is empty.

    So are keys that come twice, of which YAML's own loader silently keeps the last value.
    """
    import yaml  # JSON is YAML

    class Loader(yaml.SafeLoader):
        """Refuses a key that comes twice, of which YAML's own loader silently keeps the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for idx, key in enumerate(keys) if key in keys[:idx]), None)
            if twice is not None:
                raise ValueError(f"{owner}: the {what} gives the {key} '{twice}' twice; keep one of them.")
            return super().construct_mapping(node, deep)

    try:
        rules = yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{owner}: the {what} is no YAML ({reason}); {advice}.") from error
    if rules is None:
        raise ValueError(f"{owner}: the {what} is empty; {advice}.")
    return rules


def from_text(text: str) -> _plan.Plan:
    """Rules from YAML or JSON text, or from the file that a line with such an ending names."""
    if "\n" not in text and text.strip().endswith((".yaml", ".yml", ".json")):
        path = Path(text.strip())
        if not path.is_file():
            raise ValueError(f"plan: there is no file {text!r}; pass the path of a plan, a dict, or 'auto'.")
        return from_mapping(load(path.read_text(encoding="utf-8"), f"file {text}"))
    return from_mapping(load(text, "text"))


def from_mapping(rules: Any) -> _plan.Plan:
    """Rules from a dict of pattern to style; ValueError for anything else."""
    if not isinstance(rules, Mapping):
        raise ValueError(f"plan: got {rules!r}; pass a mapping from pattern to style, or 'auto'.")
    return _plan.Plan([_rule(pattern, value) for pattern, value in rules.items()])


def _rule(pattern: Any, value: Any) -> _plan.Rule:
    if not isinstance(pattern, str):
        raise ValueError(f"plan: the pattern {pattern!r} is no text; put it in quotes.")
    if isinstance(value, str):
        return _plan.Rule(pattern, value)
    if isinstance(value, Mapping) and isinstance(value.get("style"), str):
        options = {key: option for key, option in value.items() if key != "style"}
        if all(isinstance(option, _OPTION_TYPES.get(key, ())) for key, option in options.items()):
            return _plan.Rule(pattern, value["style"], **options)
    raise ValueError(
        f"plan: pattern '{pattern}' has the value {value!r}; write a style, "
        '{"style": a style, "heads": an attribute}, or {"style": "column_row_mlp", "recompute": true}.'
    )
