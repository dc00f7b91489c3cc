"""Predicted against measured steps of a small Llama on one CPU rank: from rates, and from measured layer times.

    python benchmarks/layer_times.py [--precision 32-true] [--checkpointing none] [--rounds 5] [--json]

Each round runs `weft profile --devices 1 --config`, predicts the step of one device from its rates and from its layer
times, and trains the model under the Trainer with weft's strategy, all in fresh processes, one after another. The
measured time is the median over the steps of a round. The result has the medians over the rounds of predicted /
measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import yaml
from common import machine_facts

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
SEQUENCES, TOKENS = 4, 128
NUM_WARM_UP, NUM_STEPS = 3, 30
LAYER_KEYS = ("layers_of", "layers")  # of the profile


def measured_seconds(path: Path) -> float:
    """Return the median time of a step of the training that a configuration describes, on this process."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    from transformers import AutoConfig, AutoModelForCausalLM

    from weft.lightning import WeftModelParallelStrategy

    config = yaml.safe_load(path.read_text())
    sizes = {key: value for key, value in MODEL.items() if key != "model_type"}

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", use_cache=False, **sizes))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Batches(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                yield torch.randint(MODEL["vocab_size"], (SEQUENCES, TOKENS))

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    checkpointing, clock = config["activation_checkpointing"], Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision=config["precision"],
        strategy=WeftModelParallelStrategy(plan="auto", layout="tp1", activation_checkpointing=checkpointing),
        max_steps=NUM_WARM_UP + NUM_STEPS,
        logger=False,
        callbacks=[clock],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Task(), DataLoader(Batches(), batch_size=None))
    ends = clock.ends[NUM_WARM_UP - 1 :]
    return statistics.median(ends[i + 1] - ends[i] for i in range(NUM_STEPS))


def predicted_seconds(path: Path, cluster: dict[str, Any]) -> float:
    from weft.strategy.tuning import tune_file

    [layout] = tune_file(path, 1, cluster=cluster, fixed="accumulate=1", memory="1TB").layouts
    return layout.step_seconds


def round_of(path: Path) -> dict[str, float]:
    """Return the seconds of a step: from rates, from layer times, and measured."""
    profile = ["-m", "weft_command", "profile", "--devices", "1", "--config", str(path), "--tensor", "1", "--json"]
    cluster = json.loads(_output(profile))
    rates = {key: value for key, value in cluster.items() if key not in LAYER_KEYS}
    return {
        "from_rates": predicted_seconds(path, rates),
        "from_layer_times": predicted_seconds(path, cluster),
        "measured": float(_output([__file__, "--train", str(path)]).splitlines()[-1]),
    }


def _output(arguments: list[str]) -> str:
    return subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(precision: str, checkpointing: str, num_rounds: int) -> dict[str, Any]:
    config = {
        "model": MODEL,
        "batch": {"sequences": SEQUENCES, "tokens": TOKENS},
        "precision": precision,
        "activation_checkpointing": checkpointing,
        "optimizer_in_backward": False,
    }
    with tempfile.TemporaryDirectory(prefix="weft-benchmark-") as folder:
        path = Path(folder, "llama.yaml")
        path.write_text(yaml.safe_dump(config))
        rounds = [round_of(path) for _ in range(num_rounds)]
    ratios = {
        name: statistics.median(each[name] / each["measured"] for each in rounds)
        for name in ("from_rates", "from_layer_times")
    }
    return {"machine": machine_facts(), "config": config, "rounds": rounds, "predicted_by_measured": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="32-true", choices=("32-true", "bf16-mixed", "bf16-true"))
    parser.add_argument("--checkpointing", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--train", metavar="FILE", help="train, and print the seconds of a step")
    args = parser.parse_args()
    if args.train is not None:
        print(measured_seconds(Path(args.train)))
        return 0
    report = measure(args.precision, args.checkpointing, args.rounds)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}, {machine['date']}")
    for each in report["rounds"]:
        print("  ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in each.items()))
    ratios = report["predicted_by_measured"]
    print("predicted / measured:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
