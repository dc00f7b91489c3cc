"""Trains a language model of Hugging Face's transformers, from its configuration, sharded by a registered strategy.

    python examples/05_huggingface.py --devices 2                       # a tiny Llama, on 2 devices
    python examples/05_huggingface.py --devices 2 --config qwen3 --strategy weft_fsdp
    python examples/05_huggingface.py --devices 8 --config a/folder     # with a config.json
    python examples/05_huggingface.py --devices 2 --new-tokens 32       # continues a text after the training
    python examples/05_huggingface.py --devices 2 --stages --new-tokens 32  # the same in two pipeline stages

Nothing is downloaded: weights are random, the text is Python's documentation, byte by byte. On CPU a device is a
process with one thread. strategy="weft" is tensor parallelism inside a host, so on one host its losses are those of
one device.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import lightning as L
import torch
from text import Windows, documentation_bytes
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import weft.lightning  # registers the strategy "weft"
import weft.strategy
from weft.lightning import WeftModelParallelStrategy

SEED, SEQ_LEN, BATCH_SIZE = 0, 128, 8
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": SEQ_LEN,
    "pad_token_id": None,
}


class LitCausalLM(L.LightningModule):
    """Next-token prediction with any causal language model, without code for sharding."""

    def __init__(self, config: PretrainedConfig, new_tokens: int) -> None:
        super().__init__()
        self.config = config
        self.new_tokens = new_tokens

    def configure_model(self) -> None:
        if not hasattr(self, "model"):  # built here, so that each rank materializes only its shards
            self.model = AutoModelForCausalLM.from_config(self.config)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, _ = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels itself
        self.print(f"step {self.global_step}: loss {loss.item():.6f}")
        return loss

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        prompts, _ = batch
        mask = torch.ones_like(prompts)
        tokens: Tensor = self.model.generate(
            prompts, attention_mask=mask, do_sample=False, max_new_tokens=self.new_tokens, pad_token_id=0
        )
        return tokens[:, prompts.shape[1] :]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def config_of(name: str) -> PretrainedConfig:
    """Return the configuration in the folder `name`; if no folder has this name, a tiny one of the family `name`."""
    if os.path.isdir(name):
        return AutoConfig.from_pretrained(name, local_files_only=True)
    return AutoConfig.for_model(name, **TINY)


def train(args: argparse.Namespace) -> None:
    """Train on this rank; Lightning starts the other ranks' processes with the same command line."""
    L.seed_everything(SEED, verbose=False)
    module = LitCausalLM(config_of(args.config), args.new_tokens)
    windows = Windows(documentation_bytes(), args.steps * BATCH_SIZE, SEQ_LEN, SEED)
    strategy: Any = args.strategy
    if args.stages:
        strategy = WeftModelParallelStrategy(plan="auto", layout=f"pp{args.devices}", pipeline_cuts="auto")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=strategy,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(windows, batch_size=BATCH_SIZE))
    if trainer.is_global_zero and not args.stages:
        print(weft.strategy.report(module))
    if args.new_tokens > 0:
        prompts = Windows(documentation_bytes(), 2, SEQ_LEN // 2, SEED + 1)
        [continued] = trainer.predict(module, DataLoader(prompts, batch_size=2))
        if trainer.is_global_zero:
            for row in continued.tolist():
                print(f"continuation: {bytes(row)!r}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="llama", help="a folder with a config.json, or a family, such as qwen3")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--strategy", default="weft", help="weft, weft_tp, weft_fsdp or weft_2d")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--stages", action="store_true", help="pipeline stages, instead of --strategy")
    parser.add_argument("--new-tokens", type=int, default=0, help="bytes to generate after the training, at most 64")
    args = parser.parse_args()
    if min(args.devices, args.steps) < 1:
        parser.error("--devices and --steps take numbers from 1 up.")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated.*")  # Lightning's own use of torch
    train(arguments)
