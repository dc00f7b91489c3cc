"""Runs in which a LightningModule calls `generate` of a language model: in steps and in a hook."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_plugin.drop_in.models import Run
from torch import Tensor
from torch.utils.data import DataLoader

from support.hugging_face import VOCAB, language_model

PAD = 0
LENGTH, NEW_TOKENS = 5, 6
STOP = list(range(20, 40))  # a sample ends with one of these
IN_PREDICT, IN_VALIDATION = "generate() in predict_step", "generate() in validation_step"
IN_HOOK, BEAMS = "generate() in on_predict_batch_end", "generate(num_beams=2)"
FEATURES = (IN_PREDICT, IN_VALIDATION, IN_HOOK, BEAMS)


class Writer(L.LightningModule):
    """Trains a Llama of transformers and generates with it; `hook` has the tokens that a hook generates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model: Any = language_model("llama", initializer_range=0.5)
        self.options: dict[str, Any] = {"do_sample": False}
        self.hook: list[list[int]] = []

    def generate(self, batch: Tensor, **options: Any) -> Tensor:
        options |= {"pad_token_id": PAD, "max_new_tokens": NEW_TOKENS, **self.options}
        tokens: Tensor = self.model.generate(batch, attention_mask=(batch != PAD).long(), **options)
        return tokens

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        tokens = self.generate(batch, eos_token_id=VOCAB)
        self.log("mean_token", tokens.double().mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.generate(batch, eos_token_id=STOP)

    def on_predict_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if not self.hook:
            prompt = torch.arange(3, 8).unsqueeze(0)
            self.hook = self.generate(prompt, eos_token_id=VOCAB).tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _texts(batches: list[Tensor]) -> list[tuple[int, ...]]:
    """Return the prompts of all ranks with the tokens generated up to the first in STOP, in order."""
    rows = []
    for row in [row for batch in batches for row in batch.tolist()]:
        prompt, new = row[:LENGTH], row[LENGTH:]
        end = next((i + 1 for i, token in enumerate(new) if token in STOP), len(new))
        rows.append((*prompt, *new[:end]))
    gathered: list[Any] = [rows]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rows)
    return sorted({row for rows in gathered for row in rows})


def generation(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """Train, validate and predict; prompts of a batch have different lengths and end after different numbers."""
    run = Run(rank, world_size, folder, layout)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (2, 4, LENGTH), generator=generator)
    prompts[:, ::3, :2] = PAD
    if "dp2" in layout:
        prompts = prompts.chunk(2, dim=1)[rank // 2]
    loader = DataLoader(prompts.flatten(0, 1), batch_size=prompts.shape[1])
    options: dict[str, Any] = {"plan": "auto"}
    if run.is_pipeline:
        options |= {"pipeline_cuts": ["model.layers.1"]}
    model = Writer()
    trainer = run.trainer(options, max_steps=2)
    trainer.fit(model, loader)
    run.attempt(IN_VALIDATION, lambda: trainer.validate(model, loader, verbose=False)[0]["mean_token"])
    run.attempt(IN_PREDICT, lambda: _texts(trainer.predict(model, loader)))
    run.found[IN_HOOK] = model.hook
    model.options["num_beams"] = 2
    run.attempt(BEAMS, lambda: _texts(trainer.predict(model, loader)))
    return run.found
