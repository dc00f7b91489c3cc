"""The page of a run's report: one HTML file without links to other files, from the data of `run_data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.strategy.reports.charts import areas, bars, escape, lines, num_bytes, number, seconds, timeline
from weft.strategy.reports.page_style import SCRIPT, STYLE

_KINDS = {"F": ("forward", 0), "B": ("backward", 1), "I": ("backward of inputs", 2), "W": ("backward of weights", 3)}
_TIMES = ("compute", "wait", "loader")
_SPEED = "throughput/"
_MONITORS = (_SPEED, "memory/", "health/")


def page(data: dict[str, Any]) -> str:
    """Return the page for the data of `weft.strategy.reports.run_data`; parts without data are left out."""
    parts: list[tuple[str, str]] = [
        ("Warnings", _warnings(data)),
        ("Mesh", _mesh(data)),
        ("Memory", _memory(data)),
        ("Pipeline", _pipeline(data)),
        ("Speed", _speed(data)),
        ("Communication", _communication(data)),
        ("Logged values", _logged(data)),
        ("Plan", _plan(data)),
        ("Run", _facts(data)),
    ]
    parts = [(title, body) for title, body in parts if body]
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, _ in parts)
    sections = "".join(
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{body}</section>' for title, body in parts
    )
    title = f"{data['run']['module']} on {data['run']['num_ranks']} ranks"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><header><h1>{escape(title)}</h1>"
        f"<p>{escape(data['run']['status'])}</p>{_cards(data)}<nav>{links}</nav></header><main>{sections}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _cards(data: dict[str, Any]) -> str:
    cards = [("layout", data["run"]["layout"]), ("steps", number(data["run"]["num_steps"]))]
    for name, label, form in (
        ("mean loss", "loss, last", number),
        ("seconds", "step", seconds),
        (f"{_SPEED}tokens_per_second", "tokens/s", number),
        ("samples_per_second", "samples/s", number),
        (f"{_SPEED}mfu", "MFU", lambda value: f"{value:.1%}"),
    ):
        if found := _series(data, name):
            cards.append((label, form(found[-1][1])))
    if peaks := _peaks(data):
        cards.append(("peak memory of a rank", num_bytes(max(peaks))))
        if data["memory"]["predicted"] is not None:
            cards.append(("predicted", num_bytes(data["memory"]["predicted"])))
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in cards) + "</dl>"


def _peaks(data: dict[str, Any]) -> list[float]:
    return [sum(rank["memory"]["peak"].values()) for rank in data["ranks"]]


def _warnings(data: dict[str, Any]) -> str:
    texts = data["warnings"]
    return "<ul class='warnings'>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>" if texts else ""


def _mesh(data: dict[str, Any]) -> str:
    """Draw a box for each rank: pipeline stages from left to right, replicas below each other, tensor ranks inside."""
    axes = data["run"]["mesh"]
    num_stages = next((size for name, size in axes if name == "pipeline_parallel"), 1)
    inner = next((size for name, size in axes if name == "tensor_parallel"), 1)
    per_stage = data["run"]["num_ranks"] // num_stages
    columns = []
    for stage in range(num_stages):
        groups = []
        for first in range(stage * per_stage, (stage + 1) * per_stage, inner):
            ranks = "".join(f"<span>rank {rank}</span>" for rank in range(first, first + inner))
            groups.append(f'<div class="group">{ranks}</div>')
        head = f"<b>{_stages_text(data, stage, stage * per_stage)}</b>" if num_stages > 1 else ""
        columns.append(f'<div class="stage">{head}{"".join(groups)}</div>')
    named = ", ".join(f"{name} {size}" for name, size in axes)
    legend = "Ranks in one box compute each layer together." if inner > 1 else "Each rank computes full layers."
    lines_of_start = "".join(f"<li>{escape(line)}</li>" for line in data["run"]["summary"])
    return (
        f'<p>{escape(named)}. {legend}</p><div class="mesh">{"".join(columns)}</div>'
        f"{f'<ul>{lines_of_start}</ul>' if lines_of_start else ''}"
    )


def _stages_text(data: dict[str, Any], position: int, rank: int) -> str:
    """Return "stage 0", or "stages 0, 2", for a position of the pipeline and one of its ranks."""
    stages: list[int] = next((each["stages"] for each in data["ranks"] if each["rank"] == rank), [])
    if not stages:
        return f"position {position}"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _memory(data: dict[str, Any]) -> str:
    if not data["ranks"]:
        return ""
    rows = [(f"rank {each['rank']}", _nonzero(each["memory"]["peak"])) for each in data["ranks"]]
    predicted = data["memory"]["predicted"]
    marks = [predicted] * len(rows) if predicted is not None else []
    body = bars("Peak of each rank, by category", rows, num_bytes, marks, "predicted" if marks else "")
    largest = max(data["ranks"], key=lambda each: sum(each["memory"]["peak"].values()))
    phases = largest["memory"]["phases"]
    if len(phases) > 1:
        names = [name for name in phases[0][1] if any(values[name] for _, values in phases)]
        layers = {name: [values[name] for _, values in phases] for name in names}
        title = f"Rank {largest['rank']} during a step, at the times named below"
        if "total" in phases[0][1]:
            title = (
                f"Rank {largest['rank']} after each computation of a step, such as 0F1: stage 0, forward, micro-batch 1"
            )
        body += areas(title, [label for label, _ in phases], layers, num_bytes)
    return body


def _nonzero(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value}


def _pipeline(data: dict[str, Any]) -> str:
    found = data["pipeline"]
    if found is None:
        return ""
    used = {span[0] for name in ("planned", "measured") for spans in found[name] for span in spans}
    entries = "".join(
        f'<span><i class="b{color}"></i>{name}</span>' for kind, (name, color) in _KINDS.items() if kind in used
    )
    body = f'<div class="legend">{entries}</div>'
    forms: dict[str, Callable[[float], str]] = {"planned": lambda value: f"{value:.4g} units", "measured": seconds}
    for name, form in forms.items():
        ranks = found[name]
        title = f"{name.capitalize()}: {idle_fraction(ranks):.0%} idle"
        if name == "planned":
            title += ", if a forward takes 1 and a backward 2"
        several = any(len({span[1] for span in spans}) > 1 for spans in ranks)
        rows = [
            (f"position {i}", [_box(span, several) for span in spans if span[0] in _KINDS])
            for i, spans in enumerate(ranks)
        ]
        body += timeline(title, rows, form)
    return body


def _box(span: list[Any], has_several_stages: bool) -> tuple[float, float, str, str, int]:
    kind, stage, micro_batch, start, end = span
    name, color = _KINDS[kind]
    text = f"{stage}:{micro_batch}" if has_several_stages else str(micro_batch)
    return start, end, text, f"{name} of micro-batch {micro_batch}, stage {stage}", color


def idle_fraction(ranks: list[list[list[Any]]]) -> float:
    """Return the fraction of the time until the last span's end in which ranks compute nothing, 0 to 1."""
    spans = [span for each in ranks for span in each if span[0] in _KINDS]
    end = max((span[4] for span in spans), default=0.0)
    return 1 - sum(span[4] - span[3] for span in spans) / (end * len(ranks)) if end else 0.0


def _series(data: dict[str, Any], name: str) -> list[tuple[float, float]]:
    return [(p["step"], p["values"][name]) for p in data["points"] if p["values"].get(name) is not None]


def _speed(data: dict[str, Any]) -> str:
    body = lines("Time of a step", {"step": _series(data, "seconds")}, "step", seconds)
    if rates := _series(data, "samples_per_second"):
        body += lines("Samples per second of all ranks", {"samples/s": rates}, "step")
    for name, label in (("tokens_per_second", "Tokens per second of all ranks"), ("mfu", "Model FLOPs utilization")):
        body += lines(label, {name: _series(data, _SPEED + name)}, "step")
    rows = [each for each in data["ranks"] if each["times"]["compute"] is not None]
    if rows:
        parts = [(f"rank {each['rank']}", {name: each["times"][name] for name in _TIMES}) for each in rows]
        body += bars("Mean time of a step, by what each rank does: computes, waits for others, loads", parts, seconds)
    return body


def _communication(data: dict[str, Any]) -> str:
    if not any(each["communication"]["axes"] or each["communication"]["is_truncated"] for each in data["ranks"]):
        return ""
    names = list(dict.fromkeys(name for each in data["ranks"] for name in each["communication"]["axes"]))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for each in data["ranks"]:
        cells = ""
        for name in names:
            calls, size = each["communication"]["axes"].get(name, (0, 0))
            cells += f"<td>{escape(num_bytes(size))} in {calls} calls</td>" if calls else "<td>–</td>"
        body += f"<tr><td>rank {each['rank']}</td>{cells}</tr>"
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"
    note = (
        "Tensors that each rank passed to the backend weft in one step, by the axis of the mesh; with those of the "
        "Trainer and of callbacks."
    )
    if any(each["communication"]["is_truncated"] for each in data["ranks"]):
        note += " The step had more calls than the record holds, so that its first calls are missing."
    return f"<p>{note}</p><div class='wide'>{table}</div>"


def _logged(data: dict[str, Any]) -> str:
    own = {"seconds", "samples_per_second"}
    names = list(dict.fromkeys(name for point in data["points"] for name in point["values"]))
    users = [name for name in names if name not in own and not name.startswith(_MONITORS)]
    monitors = [name for name in names if name.startswith(_MONITORS)]
    body = "".join(lines(name, {name: _series(data, name)}, "step") for name in users)
    if monitors:
        drawn = "".join(lines(name, {name: _series(data, name)}, "step") for name in monitors)
        body += f"<details><summary>Values of monitors</summary>{drawn}</details>"
    return body


def _plan(data: dict[str, Any]) -> str:
    if not data["plan"]:
        return ""
    rows = ""
    for part in data["plan"]:
        ranks = _ranks(part["ranks"])
        for row in part["parameters"]:
            over = " ".join(f"{axis}:{dim}" for axis, dim in row["axes"].items())
            shape = "×".join(map(str, row["local_shape"])) or "scalar"
            cells = (row["parameter"], row["style"], row["rule"], shape, over, num_bytes(row["num_bytes"]), ranks)
            note = f' title="{escape(row["note"])}"' if row["note"] else ""
            rows += f"<tr{note}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    heads = ("parameter", "style", "rule", "local shape", "sharded over", "bytes", "ranks")
    notes = dict.fromkeys(note for part in data["plan"] for note in part["notes"])
    listed = "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else ""
    return (
        f"{listed}<input type='search' id='search' placeholder='Search parameters, styles, ranks' "
        "aria-label='Search the plan'><div class='wide'><table id='parameters'><thead><tr>"
        f"{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _ranks(ranks: list[int]) -> str:
    """Return ranks as ranges, such as "0-3, 6"."""
    texts: list[str] = []
    first = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            texts.append(str(ranks[first]) if first == i - 1 else f"{ranks[first]}-{ranks[i - 1]}")
            first = i
    return ", ".join(texts)


def _facts(data: dict[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in data["run"]["facts"].items())
    return f"<div class='wide'><table class='facts'><tbody>{rows}</tbody></table></div>"
