"""Runs of LightningModules whose code reads parameters, keeps state, or computes in several dtypes."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from lightning_plugin.drop_in.models import PLAN, Rounded, Run, Text, digest
from torch import Tensor, nn

from support.models import LlamaArgs

NORM = "model.norm.weight"
FLOAT32 = LlamaArgs(dtype=torch.float32)


class Penalized(Text):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Before the call of the model, so that the error of a pipeline is raised on every stage.
        penalty = 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())
        return self.loss(batch) + penalty


class Measured(Text):
    """Reads norms and values of parameters and gradients in hooks, and clips gradients."""

    def _record(self, name: str, *values: Any) -> None:
        self.seen.setdefault(name, []).extend(float(value) for value in values)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self._record("grad_norm", norms["grad_2.0_norm_total"], norms[f"grad_2.0_norm/{NORM}"])
        gradients = [parameter.grad for parameter in self.parameters()]
        vector = nn.utils.parameters_to_vector(self.parameters())
        self._record("norms", nn.utils.get_total_norm(gradients), vector.norm(), vector.abs().max())
        self._record("clipped", nn.utils.clip_grad_norm_(self.parameters(), 0.5))
        nn.utils.clip_grad_value_(self.parameters(), 0.05)

    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            values = parameter.detach()
            self._record("histograms", *torch.histc(values, bins=4, min=-1, max=1).tolist(), values.cpu().numpy().sum())
        self._record("histograms", sum(parameter.detach().norm() for parameter in self.parameters()))

    def on_validation_epoch_end(self) -> None:
        self._record("histograms", copy.deepcopy(self.model.norm.weight).norm())


def parameters(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """Code that computes with all parameters, in steps and hooks."""
    run = Run(rank, world_size, folder, layout)

    def fit(model: Text) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "weft: a hook called")
            run.trainer().fit(model, run.loader(), run.loader(2))
        return digest(model)

    run.attempt("L2 term over self.parameters()", lambda: fit(Penalized()))
    model = Measured()
    run.attempt("grad_norm", lambda: fit(model))
    trained = run.found["grad_norm"]
    for name, key in FEATURES_OF_HOOKS.items():
        run.found[name] = trained if isinstance(trained, str) else [model.seen[key], trained]
    return run.found


FEATURES_OF_HOOKS = {
    "grad_norm": "grad_norm",
    "torch.nn.utils: norms": "norms",
    "torch.nn.utils: clipping": "clipped",
    "histograms of parameters": "histograms",
}


class Stateful(Text):
    """Has buffers of its own, forward hooks, a state_dict hook that changes values, and entries in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("factor", torch.full((3,), 0.5, dtype=torch.float64), persistent=False)
        self.model.register_state_dict_post_hook(functools.partial(_note_save, self.seen))
        for name in ("model.layers.0.feed_forward", "model.layers.0.attention.wq"):
            self.get_submodule(name).register_forward_hook(self._observe)
        self.model.layers[0].register_full_backward_hook(self._observe_gradient)
        self.is_watched = True

    def _observe(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.setdefault("outputs", []).append([*output.shape[1:], len(output.shape)])

    def _observe_gradient(self, module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        self.seen.setdefault("gradients", []).append([*grad_output[0].shape[1:]])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * self.factor.sum()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        loss = self.trainer.strategy.reduce(outputs["loss"].detach())
        self.mean.mul_(0.9).add_(loss, alpha=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"values": torch.arange(3), "names": ["a", "b"], "mean": float(self.mean)}
        entry = checkpoint["state_dict"].get(NORM)  # another rank or stage may have it
        checkpoint["has_numbers"] = entry is None or bool(entry.double().norm().isfinite())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint["own"]
        self.seen["loaded"] = [own["values"].tolist(), own["names"], own["mean"], checkpoint["has_numbers"]]


def state(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """State that a module keeps besides parameters, and what it adds to checkpoints."""
    run = Run(rank, world_size, folder, layout)
    path = Path(folder, "state")
    first, second = Stateful(), Stateful()
    trainer = run.trainer()
    trainer.fit(first, run.loader())
    trainer.save_checkpoint(path)
    run.trainer(max_epochs=2).fit(second, run.loader(), ckpt_path=path)
    trained = digest(second)
    run.found |= {
        "register_buffer": [first.mean.item(), second.mean.item(), second.factor.tolist(), trained],
        "on_save_checkpoint, on_load_checkpoint": second.seen["loaded"],
        "state_dict hooks that keep the entries": first.seen["saves"],
        # Stages run a forward, and its hooks, once for each micro-batch of their own layers.
        "forward and backward hooks of modules": None
        if run.is_pipeline
        else [first.seen[k] for k in ("outputs", "gradients")],
    }
    adding = Text()
    adding.model.register_state_dict_post_hook(_add_entry)
    trainer = run.trainer()
    trainer.fit(adding, run.loader(1))
    run.attempt("state_dict hooks that add entries", lambda: trainer.save_checkpoint(path))

    run.attempt("weight tying in setup", lambda: _fitted(run, TiedInSetup()))
    if not run.is_pipeline:  # where each stage has only one of the weights
        run.attempt("weight tying in on_fit_start", lambda: _fitted(run, TiedLater()))
    return run.found


def _fitted(run: Run, model: Text) -> dict[str, float]:
    run.trainer().fit(model, run.loader())
    trained = digest(model)
    trained.pop("model.output.weight", None)  # the name of the last stage's copy
    return trained


def _note_save(seen: dict[str, Any], *_: Any) -> None:
    seen["saves"] = True


def _add_entry(module: nn.Module, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
    entries[f"{prefix}note"] = torch.tensor(5.0)


class TiedInSetup(Text):
    def setup(self, stage: str) -> None:
        self.model.output.weight = self.model.tok_embeddings.weight


class TiedLater(Text):
    def on_fit_start(self) -> None:
        self.model.output.weight = self.model.tok_embeddings.weight


class Autocast(Text):
    """Computes one MLP, and the loss, in bfloat16 with float32 parameters."""

    def __init__(self) -> None:
        super().__init__(FLOAT32)
        self.model.layers[0].feed_forward = InBfloat16(self.model.layers[0].feed_forward)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.seen.setdefault("losses", []).append(self.trainer.strategy.reduce(outputs["loss"].detach()).item())


class InBfloat16(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result = self.inner(x)
        self.dtype = result.dtype
        return result.float()


class Sparse(Text):
    """Its embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        old = self.model.tok_embeddings
        self.model.tok_embeddings = nn.Embedding(*old.weight.shape, sparse=True, dtype=torch.float64)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = getattr(getattr(self.model.tok_embeddings, "weight", None), "grad", None)
        self.seen.setdefault("layouts", set()).add(str(getattr(gradient, "layout", "torch.sparse_coo")))


def dtypes(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    """Regions of other dtypes, settings of products, and sparse gradients."""
    run = Run(rank, world_size, folder, layout)
    plan = {name: style for name, style in PLAN.items() if "feed_forward" not in name}
    plan["model.layers.0.feed_forward.inner"] = plan["model.layers.1.feed_forward"] = "column_row_mlp"
    model = Autocast()
    run.trainer({"plan": plan}).fit(model, run.loader())
    block = model.model.layers[0]
    dtype = str(block.feed_forward.dtype) if hasattr(block, "feed_forward") else None  # a layer of another stage
    run.found["torch.autocast in a module"] = [dtype, Rounded(model.seen["losses"])]

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = Text(FLOAT32)
        run.trainer().fit(model, run.loader())
        precision = torch.get_float32_matmul_precision()
        run.found["torch.set_float32_matmul_precision"] = [precision, Rounded(digest(model))]
    finally:
        torch.set_float32_matmul_precision(before)

    plan = {name: style for name, style in PLAN.items() if "tok_embeddings" not in name}
    for stage in (0, 1, 3) if "dp2" in layout else (0,):
        options = {"plan": plan, **({"zero_stage": stage} if "dp2" in layout else {})}
        run.attempt(f"nn.Embedding(sparse=True), zero_stage={stage}", functools.partial(_fit_sparse, run, options))
    return run.found


def _fit_sparse(run: Run, options: dict[str, Any]) -> list[Any]:
    model = Sparse()
    run.trainer(options, gradient_clip_val=0.5, accumulate_grad_batches=2).fit(model, run.loader())
    return [sorted(model.seen["layouts"]), digest(model)]
