"""docs/drop_in.md lists Lightning's public tests; each has one of the same name here."""

from __future__ import annotations

import re
from pathlib import Path

from soak.lightning_tests import PAGE, listed_tests

FOLDER = Path(__file__).parent


def test_every_listed_test_has_its_counterpart() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(test_\w+)` \| (fabric|trainer) (unit|integration) \| (\w+)", page, flags=re.MULTILINE)
    assert len(rows) > 40
    failing = listed_tests(page)
    for name, package, kind, result in rows:
        assert (name in failing) == (result != "passes"), name
        file = FOLDER / f"test_{package}_{'strategy' if kind == 'unit' else 'runs'}.py"
        assert name in failing or re.search(rf"^def {name}\(", file.read_text(), flags=re.MULTILINE), (name, file.name)
