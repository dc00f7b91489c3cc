"""A fault to plant in one file of kernels/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """Replaces the occurrence `which` (from 1) of `text`, which `file` contains `times` times.

    A mutation that the tests do not find has one of two reasons. `equivalent`: the mutated kernel has the same results
    for all inputs, so no test can find it. `unseen`: some inputs would reveal the fault, and the reason says why no
    test uses them.
    """

    name: str
    file: str  # below kernels/
    text: str
    replacement: str
    which: int = 1
    times: int = 1
    cases: str = ""  # a GoogleTest filter for the only tests that may find it; empty: all of the kernel
    equivalent: str = ""
    unseen: str = ""

    @property
    def reason(self) -> str:
        """Return why the tests do not find the mutation; empty if they should."""
        return self.equivalent or self.unseen

    def apply(self, source: str) -> str:
        """Return the mutated `source`, the contents of `file`."""
        parts = source.split(self.text)
        if len(parts) - 1 != self.times or not 1 <= self.which <= self.times:
            raise ValueError(
                f"mutation {self.name} got {len(parts) - 1} occurrences of its text in kernels/{self.file} and expects "
                f"{self.times}; correct the list in tests/soak/mutations."
            )
        before, after = self.text.join(parts[: self.which]), self.text.join(parts[self.which :])
        return before + self.replacement + after
