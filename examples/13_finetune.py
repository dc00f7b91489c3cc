"""Fine-tunes a pretrained model with PEFT's LoRA on several devices, and reads the result back on one.

    python examples/13_finetune.py --model tiny_llama                 # the first run trains a tiny Llama and saves it
    python examples/13_finetune.py --model tiny_llama                 # later runs fine-tune it on 2 devices
    python examples/13_finetune.py --model a/folder --layout dp2,tp2 --save an/adapter

Nothing is downloaded: --model is a folder with a language model that transformers has written. The tiny one reads text
byte by byte: Python's documentation first, and then the source code of argparse. For another model, replace
`Windows` by tokenized text. On CPU a device is a process with one thread.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from pathlib import Path

import lightning as L
import peft
import torch
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import weft
from weft.lightning import WeftModelParallelStrategy

SEED, SEQ_LEN, BATCH_SIZE = 0, 64, 8
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "pad_token_id": None,
}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class LitCausalLM(L.LightningModule):
    """Next-token prediction, without code for sharding. A subclass builds the model in `configure_model`."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(self.model, batch[0])
        self.print(f"step {self.global_step}: loss {loss.item():.5f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-3)


class Pretraining(LitCausalLM):
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))


class FineTuning(LitCausalLM):
    """The base model and its adapters are made here, so that each rank reads only its shards of the weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            base = AutoModelForCausalLM.from_pretrained(self.folder, local_files_only=True)
            self.model = peft.get_peft_model(base, peft.LoraConfig(**LORA))


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels itself


def source_bytes() -> Tensor:
    """Return the source code of argparse, one uint8 per byte."""
    return torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def trainer_of(args: argparse.Namespace) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=torch.tensor([int(size) for size in re.findall(r"\d+", args.layout)]).prod().item(),
        strategy=WeftModelParallelStrategy(plan="auto", layout=args.layout),
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def loader(text: Tensor, steps: int) -> DataLoader:
    return DataLoader(Windows(text, steps * BATCH_SIZE, SEQ_LEN, SEED), BATCH_SIZE)


def pretrain(args: argparse.Namespace) -> None:
    """Train the tiny model, and write it as transformers does."""
    module = Pretraining()
    trainer_of(args).fit(module, loader(documentation_bytes(), args.steps))
    weft.save_pretrained(module, args.model)
    module.print(f"{args.model} has a pretrained model now; the next run fine-tunes it")


def fine_tune(args: argparse.Namespace) -> None:
    """Train the adapters, save them in PEFT's format, and compute a loss with what PEFT loads on one device."""
    module = FineTuning(args.model)
    trainer = trainer_of(args)
    trainer.fit(module, loader(source_bytes(), args.steps))
    weft.save_pretrained(module, args.save)
    if not trainer.is_global_zero:
        return
    tokens = next(iter(loader(source_bytes(), 1)))[0]
    base = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
    before = loss_of(base, tokens).item()
    after = loss_of(peft.PeftModel.from_pretrained(base, args.save), tokens).item()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in module.parameters()):,} parameters are trained: {args.save}")
    print(f"on one device: loss {before:.5f} of the pretrained model, {after:.5f} with the adapters")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("tiny_llama"), help="a folder; made if it does not exist")
    parser.add_argument("--save", type=Path, help="the folder of the adapters, which must not exist")
    parser.add_argument("--layout", default="tp2", help="the axes of the mesh, such as tp2 or dp2,tp2")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    args = parser.parse_args()
    args.save = args.save or args.model.parent / f"{args.model.name}_adapter"
    if args.steps < 1:
        parser.error("--steps takes numbers from 1 up.")
    if args.model.exists() and args.save.exists():
        parser.error(f"{args.save} exists; remove it, or name another folder with --save.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated.*")  # Lightning's own use of torch
    L.seed_everything(SEED, verbose=False)
    (fine_tune if arguments.model.exists() else pretrain)(arguments)
