"""Hooks that tag the memory of a training loop for `weft.memory`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from weft.memory.counter import begin_phase, is_tracking, storages, tag
from weft.memory.source import counts_this_process, source


class Watch:
    """Hooks on a model and its optimizers; see `watch`."""

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._mark = 0
        self._model_tensors = WeakIdKeyDictionary(dict.fromkeys((*model.parameters(), *model.buffers())))
        self._num_states: dict[torch.optim.Optimizer, int] = {}
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]
        tag_parameters(model)
        for parameter in model.parameters():
            tag([parameter.grad], "gradients")
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(_after_accumulation))
        for optimizer in optimizers:
            self.add_optimizer(optimizer)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch another optimizer of the model, too."""
        self._num_states[optimizer] = 0
        self._tag_states(optimizer)
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Remove the hooks; tagged memory stays tagged."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward_begins(self, inputs: Any = ()) -> None:
        """Begin the phase "forward", or "inference" if gradients are not recorded.

        `inputs`: a batch, of nested lists, tuples and dicts. If gradients are recorded, the batch's tensors are tagged
        "saved_activations", because the first layers save them for the backward; the model's parameters and buffers
        in the batch keep their category.
        """
        if torch.is_grad_enabled():
            tensors = (each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor))
            tag((each for each in tensors if each not in self._model_tensors), "saved_activations")
        begin_phase("forward" if torch.is_grad_enabled() else "inference", "scratch")
        self._mark = source().mark()

    def forward_ends(self) -> None:
        """Tag the "scratch" memory that was allocated since the forward began and is alive as "saved_activations"."""
        source().set_category_since(self._mark, "scratch", "saved_activations")

    def backward_begins(self) -> None:
        """Begin the phase "backward"; tensors that the loss saved for the backward are tagged "saved_activations"."""
        self.forward_ends()
        begin_phase("backward", "scratch")
        self._mark = source().mark()

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward_begins((args, kwargs))

    def _after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.forward_ends()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.backward_begins())
                break

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        begin_phase("step", "scratch")

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._tag_states(optimizer)
        begin_phase("between steps")

    def _tag_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Tag the optimizer's states if a step has created new ones: a parameter's first step creates its states."""
        num_states = sum(map(len, optimizer.state.values()))
        if num_states == self._num_states[optimizer]:
            return
        self._num_states[optimizer] = num_states
        states = tree_leaves(list(optimizer.state.values()))
        tag((state for state in states if isinstance(state, torch.Tensor)), "optimizer_state")


def tag_parameters(model: torch.nn.Module) -> int:
    """Tag a model's parameters and buffers in CPU memory as "parameters"; return the bytes that are not counted.

    Storages made before `track()`, or without torch's allocator (shared memory, mapped files), are not counted. In the
    result, a storage that several tensors use counts once, and a DTensor counts as its local shard.
    """
    if not counts_this_process():
        tag((*model.parameters(), *model.buffers()), "parameters")
        return 0
    tensors = storages((*model.parameters(), *model.buffers()))
    return sum(
        tensor.untyped_storage().nbytes()
        for tensor in tensors.values()
        if not (is_tracking() and source().set_category(tensor, "parameters"))
    )


def _after_accumulation(parameter: torch.Tensor) -> None:
    tag([parameter.grad], "gradients")


@contextlib.contextmanager
def saving(inputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the phase is "forward"; used for a pipeline stage, which runs several forwards before their backwards.

    `inputs` and the memory that is allocated inside and still alive at the end are tagged "saved_activations". If
    gradients are not recorded, the phase is "inference" and nothing is tagged. Does nothing if memory is not counted.
    """
    if not is_tracking():
        yield
        return
    is_training = torch.is_grad_enabled()
    begin_phase("forward" if is_training else "inference", "scratch")
    mark = source().mark()
    yield
    if is_training:
        tag(inputs, "saved_activations")
        source().set_category_since(mark, "scratch", "saved_activations")


def watch(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> Watch:
    """Tag the memory of `model` and `optimizers`, and record their forwards, backwards and steps in the timeline.

    Parameters and buffers are tagged "parameters". If a forward records gradients, its inputs and its allocations that
    stay alive are tagged "saved_activations". Gradients are tagged "gradients" when they are accumulated, optimizer
    states "optimizer_state" after the step that creates them. Other allocations from a forward to the end of the
    optimizer's step are "scratch", and those between an optimizer's step and the next forward "other".

    Returns a handle whose `remove()` removes the hooks. Call `watch` after the parameters have been sharded and moved
    to their device.
    """
    return Watch(model, *optimizers)
