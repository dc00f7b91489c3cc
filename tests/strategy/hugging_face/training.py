"""Runs of transformers' Trainer and of Accelerate, on one process and on ranks that share a sharded model."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Dataset, IterableDataset

import weft
from support.hugging_face import VOCAB, language_model
from support.parity import full
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.hugging_face import prepare_accelerator, prepare_trainer

ROWS, LENGTH = 4, 6  # of the batch of all data-parallel ranks
MESHES = {"tp2": {"tp": 2}, "dp2": {"dp_shard": 2}, "dp2,tp2": {"dp_shard": 2, "tp": 2}}


class Sentences(Dataset[dict[str, Tensor]]):
    """Random tokens; the rows have different numbers of labels."""

    def __init__(self, num_rows: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (num_rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        labels = self.tokens[idx].clone()
        labels[: idx % 4] = -100
        return {"input_ids": self.tokens[idx], "labels": labels}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, rows: Sentences) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[idx] for idx in range(len(self.rows)))


def join(rank: int, layout: str) -> DeviceMesh | None:
    """Set the variables of torchrun and return the layout's mesh; one process trains without either."""
    warnings.simplefilter("ignore")
    if not layout:
        return None
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    if layout not in MESHES:  # DistributedDataParallel
        return None
    axes = MESHES[layout]
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def model_on(mesh: DeviceMesh | None, has_adapters: bool = False, **changes: Any) -> nn.Module:
    """Return a model with the same values for every mesh, sharded over the mesh; `changes`: of its config."""
    torch.manual_seed(3)
    model = language_model("llama", **changes)
    if has_adapters:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and "tp" in axes:
        weft.parallelize(model, mesh["tp"], "auto")
    if mesh is not None and "dp_shard" in axes:
        apply_fsdp(model, mesh["dp_shard"])
    return model


def trainer_on(
    mesh: DeviceMesh | None, model: nn.Module, folder: str, num_data: int = 1, is_stream: bool = False, **options: Any
) -> Any:
    """Return a Trainer whose batch of all data-parallel ranks has ROWS rows."""
    from transformers import Trainer, TrainingArguments

    settings = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_steps": 4,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": ROWS // num_data,
        "per_device_eval_batch_size": ROWS // num_data,
        "logging_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "linear",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 5,
        "remove_unused_columns": False,
        "accelerator_config": {"dispatch_batches": False} if is_stream else None,
    }
    args = TrainingArguments(output_dir=folder, **{**settings, **options})
    rows = Sentences(16)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Stream(rows) if is_stream else rows,
        eval_dataset=Sentences(7, seed=2),
        compute_metrics=_metrics,
    )
    return trainer if mesh is None else prepare_trainer(trainer, mesh)


def _metrics(predictions: Any) -> dict[str, float]:
    return {"rows": float(len(predictions.label_ids)), "logits": float(abs(predictions.predictions).sum())}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def train(
    rank: int,
    folder: str,
    layout: str,
    resume: str = "",
    has_adapters: bool = False,
    tie_word_embeddings: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train and evaluate by the Trainer; return what it logs, the metrics, and the weights."""
    mesh = join(rank, layout)
    num_data = 2 if "dp2" in layout or layout == "ddp2" else 1
    model = model_on(mesh, has_adapters, tie_word_embeddings=tie_word_embeddings)
    trainer = trainer_on(mesh, model, folder, num_data, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    evaluated = trainer.evaluate()
    history = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "logged": [[row["loss"], row["grad_norm"], row["learning_rate"]] for row in history],
        "evaluated": [evaluated[f"eval_{name}"] for name in ("rows", "logits", "loss")],
        "samples": trainer.get_total_train_batch_size(trainer.args),
        "weights": weights(trainer.model),
    }


def accelerate(rank: int, folder: str, layout: str, saves: bool) -> dict[str, Any]:
    """Train by Accelerate with clipping, for two steps before a save (`saves`), or for two after it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader

    mesh = join(rank, layout)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    if mesh is not None:
        prepare_accelerator(accelerator, mesh)
    model = model_on(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Sentences(8), batch_size=ROWS // (2 if "dp2" in layout else 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    path = str(Path(folder, "state"))
    if not saves:
        accelerator.load_state(path)
    seen, norms = [], []
    for batch in loader:
        seen.append(accelerator.gather_for_metrics(batch["input_ids"]))
        labels = batch["labels"].masked_fill(torch.arange(LENGTH) < 3, -100)  # the same number in each row
        accelerator.backward(model(input_ids=batch["input_ids"], labels=labels).loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        accelerator.save_state(path)
        accelerator.save_model(model, str(Path(folder, "model")))
    return {"seen": seen, "norms": norms, "weights": weights(model)}
