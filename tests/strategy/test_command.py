"""The command `weft`: its help."""

from __future__ import annotations

import shlex

import pytest

from weft_command import make_parser
from weft_command.examples import EXAMPLES


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        make_parser().parse_args([command, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for example in EXAMPLES[command]:
        assert example in lines
        name, *arguments = shlex.split(example.partition(">")[0])
        assert name == "weft" and make_parser().parse_args(arguments).command == command
