"""Real text that every Python has: the documentation topics of `help()`, as bytes.

The windows of a training step depend only on the seed and the step, not on the number of devices.
"""

from __future__ import annotations

from pydoc_data import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset


def documentation_bytes() -> Tensor:
    """Return all topics in the order of their names, one uint8 per byte of UTF-8."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """`num_windows` random windows of the text: (tokens, next tokens), int64 `[seq_len]` each.

    Window i starts at the i-th number of a generator seeded with `seed`, so item i is the same on every rank. Read the
    items in order (no shuffling sampler).
    """

    def __init__(self, text: Tensor, num_windows: int, seq_len: int, seed: int) -> None:
        if len(text) <= seq_len:
            raise ValueError(
                f"Windows: got a text of {len(text)} bytes for windows of {seq_len} + 1; "
                "pass a longer text or a smaller seq_len."
            )
        generator = torch.Generator().manual_seed(seed)
        self.text = text
        self.seq_len = seq_len
        self.starts = torch.randint(len(text) - seq_len, (num_windows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        start = self.starts[idx]
        window = self.text[start : start + self.seq_len + 1].long()
        return window[:-1], window[1:]
