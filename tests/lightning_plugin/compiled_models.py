"""Runs of modules that the user's code compiles: all of it, its model or its blocks, at different times."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.drop_in.models import ARGS, Run, Text
from lightning_plugin.scripts.plugin_models import set_torchrun_environment
from torch import Tensor, nn

from support.models import Llama
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy

PLACES = ("module", "model in __init__", "model in place", "model in configure_model", "model in setup", "blocks")


class Compiled(Text):
    """Compiles its model at one of PLACES; `num_graphs` counts what the backend gets."""

    def __init__(self, place: str = "", backend: Any = "eager") -> None:
        super().__init__(ARGS)
        self.place, self.num_graphs, self.inner = place, 0, backend
        if place == "model in __init__":
            self.model = self._compiled(self.model)
        elif place == "model in place":
            self.model.compile(backend=self._backend)
        elif place == "blocks":
            for idx, block in enumerate(self.model.layers):
                self.model.layers[idx] = self._compiled(block)

    def _compiled(self, module: nn.Module) -> Any:
        return torch.compile(module, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward if self.inner == "eager" else torch._dynamo.lookup_backend(self.inner)(graph, inputs)

    def configure_model(self) -> None:
        if self.place == "model in configure_model" and not hasattr(self.model, "_orig_mod"):
            self.model = self._compiled(self.model)

    def setup(self, stage: str) -> None:
        if self.place == "model in setup":
            self.model.compile(backend=self._backend)


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters as full tensors, by their names without those of wrappers; collective."""
    found = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        found[name.replace("_orig_mod.", "")] = (
            value.full_tensor() if hasattr(value, "full_tensor") else value
        ).clone()
    return found


def fit(rank: int, world_size: int, folder: str, layout: str, places: tuple[str, ...], backend: str) -> dict[str, Any]:
    """Train and validate; return for each place the weights, the loss and the number of graphs, or the error."""
    run = Run(rank, world_size, folder, layout)
    for place in places:
        torch._dynamo.reset()

        def train(place: str = place) -> Any:
            module = Compiled(place, backend)
            compiled = module if place != "module" else torch.compile(module, backend=module._backend)
            trainer = run.trainer({"plan": "auto"})
            trainer.fit(compiled, run.loader())
            [validated] = trainer.validate(compiled, run.loader(2), verbose=False)
            return [plain_weights(module), validated["val_loss"], module.num_graphs]

        run.attempt(place, train)
    return run.found


def fabric_losses(rank: int, world_size: int, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model that is compiled before `fabric.setup`, or without a layout an eager one."""
    set_torchrun_environment(rank, world_size)
    torch._dynamo.reset()
    options = {"strategy": FabricStrategy(plan="auto", layout=layout)} if layout else {}
    fabric = Fabric(accelerator="cpu", devices=world_size, **options)
    fabric.launch()
    torch.manual_seed(3)
    model: Any = Llama(ARGS)
    model = fabric.setup(torch.compile(model, backend="aot_eager") if layout else model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05))
    rows = Run(rank, world_size, "", layout).rows()
    losses = []
    for batch in rows.chunk(4):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    return losses, plain_weights(model)
