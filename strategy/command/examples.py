"""Command lines that `weft COMMAND --help` prints."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "estimate": (
        "weft estimate --config training.yaml --layout dp8,tp2",
        "weft estimate --module my.module:LitModel --batch my.module:batch --layout dp2,tp2 --precision bf16-mixed",
    ),
    "tune": (
        "weft tune --config training.yaml --devices 64 --cluster h100",
        "weft tune --config training.yaml --devices 64 --memory 70GB --fix tp=8",
        "weft tune --config training.yaml --devices 64 --draw front.svg",
        "weft tune --module my.module:LitModel --batch my.module:batch --devices 4 --cluster cpu.yaml",
    ),
    "profile": (
        "weft profile --devices 4 > cpu.yaml",
        "weft profile --devices 4 --config training.yaml > cpu.yaml",
        "weft profile --config training.yaml --tensor 1,2 --rows 2048,8192 --device cuda >> h100.yaml",
    ),
    "doctor": ("weft doctor", "weft doctor --quick --json"),
    "compare": ("weft compare --module my.module:LitModel --batch my.module:batch --layout dp2,tp2",),
    "convert": ("weft convert checkpoints/last.ckpt my-model --base pretrained-model --dtype bf16",),
    "verify": ("weft verify checkpoints/last.ckpt",),
    "inspect": ("weft inspect checkpoints/last.ckpt", "weft inspect s3://bucket/last.ckpt --json"),
    "flight": ("weft flight records",),
    "report": ("weft report lightning_logs/version_0",),
}
