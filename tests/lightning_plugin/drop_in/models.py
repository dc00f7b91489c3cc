"""The model, the data and the strategy with which features of Lightning run on each layout."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support.models import Llama, LlamaArgs
from weft.lightning import WeftModelParallelStrategy

# The layouts of the page, with their numbers of ranks; "" is one device with Lightning's own strategy.
LAYOUTS = {"tp2": 2, "dp2,tp2": 4, "pp2": 2}
ARGS = LlamaArgs(dtype=torch.float64)
ROWS, LENGTH = 4, 6
PLAN = {
    "model.tok_embeddings": "vocab_embedding",
    "model.layers.*.attention": "attention",
    "model.layers.*.feed_forward": "column_row_mlp",
    "model.output": "vocab_head",
}


class Text(L.LightningModule):
    """Predicts the next token with a Llama; `seen` records what hooks observe."""

    def __init__(self, args: LlamaArgs = ARGS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Llama(args)
        self.lr = 0.05
        self.seen: dict[str, Any] = {}

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch[:, :-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Run:
    """One rank's run of some features: makes trainers, and collects what each feature has done, by its name."""

    def __init__(self, rank: int, world_size: int, folder: str, layout: str) -> None:
        set_torchrun_environment(rank, world_size)
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.rank, self.world_size, self.folder, self.layout = rank, world_size, folder, layout
        self.is_pipeline = "pp" in layout
        self.found: dict[str, Any] = {}

    def strategy(self, **options: Any) -> Any:
        """Return the strategy of the layout; `options`: of weft, which one device leaves out."""
        if not self.layout:
            return "auto"
        settings: dict[str, Any] = {"plan": PLAN, "layout": self.layout}
        if self.is_pipeline:
            settings |= {"pipeline_cuts": ["layers.1"], "pipeline_module": "model", "num_micro_batches": 2}
        return WeftModelParallelStrategy(**{**settings, **options})

    def trainer(self, options: dict[str, Any] | None = None, **settings: Any) -> L.Trainer:
        return trainer(self.world_size, self.strategy(**(options or {})), self.folder, **settings)

    def rows(self, num_batches: int = 4) -> Tensor:
        """Return this data-parallel rank's samples, those of each batch one after the other."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(ARGS.vocab_size, (num_batches, ROWS, LENGTH + 1), generator=generator)
        if "dp2" in self.layout:
            tokens = tokens.chunk(2, dim=1)[self.rank // 2]
        return tokens.flatten(0, 1)

    def loader(self, num_batches: int = 4, cls: type[DataLoader] = DataLoader, dataset: Any = None) -> DataLoader:
        rows = self.rows(num_batches)
        return cls(rows if dataset is None else dataset(rows), batch_size=len(rows) // num_batches)

    def attempt(self, names: str | tuple[str, ...], run: Callable[[], Any]) -> None:
        """Store the result of `run` for the features `names`, or the text of its error."""
        try:
            result = run()
        except (ValueError, RuntimeError, AttributeError, UserWarning) as error:
            result = f"{type(error).__name__}: {error}"
        for name in (names,) if isinstance(names, str) else names:
            self.found[name] = result


def digest(module: nn.Module) -> dict[str, float]:
    """Return for each parameter its product with random numbers, which are the same on all ranks; collective."""
    numbers = {}
    for name, value in weights(module).items():
        generator = torch.Generator().manual_seed(len(name))
        numbers[name] = (
            (value.double() * torch.randn(value.shape, dtype=torch.float64, generator=generator)).sum().item()
        )
    return numbers


@dataclasses.dataclass
class Rounded:
    """A value whose numbers depend on the rounding of half precision or of float32 sums."""

    value: Any


def assert_same(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    """Assert that nested values are equal, numbers up to a relative difference; a rank that has none reports None."""
    if found is None:
        return
    if isinstance(found, Rounded):
        assert_same(found.value, expected.value, 1e-2)
    elif isinstance(found, dict):
        assert_same([found[key] for key in found], [expected[key] for key in found], rtol)
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected), f"{found} instead of {expected}"
        for own, other in zip(found, expected, strict=True):
            assert_same(own, other, rtol)
    elif isinstance(found, (float, Tensor)):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=rtol, atol=rtol)
    else:
        assert found == expected
