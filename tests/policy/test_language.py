"""Documentation and source files contain no phrase that CONTRIBUTING.md replaces by the field's terms."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".pyi", ".md", ".h", ".cpp", ".cu", ".cuh"}
QUOTING = {"CONTRIBUTING.md", "tests/policy/test_language.py"}

# A pattern, and what to write instead. A sentence begins after a full stop, a colon, a comment sign or quotes.
BANNED = {
    r"(?:^|[.:] |\"\"\"|// |# |\* |- )Of (?!course)": "a sentence with a subject",
    r"\b[Oo]n (?:its|their) way\b": "in flight",
    r"\bfor ever\b": "hang, deadlock, endlessly",
    r"\b(?:is|are) refused\b": "raises ValueError, is not supported",
    r"\b[Pp]ieces?\b(?! of (?:text|code))": "chunk, segment, shard or block",
    r"\blearns\b": "requires a gradient",
    r"\b(?:left|built|stays?|kept) whole\b": "full, unsharded",
    r"\bthe whole (?:model|tensor|weight|batch|sequence)\b": "full, unsharded",
    r"\b(?:[Ww]hoever|[Nn]obody|[Ss]omebody)\b": "the name of the actor",
}


def violations(text: str) -> list[tuple[int, str, str]]:
    """Return the line number, the phrase and its replacement for each banned phrase."""
    return [
        (number, found.group().strip(), instead)
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, instead in BANNED.items()
        if (found := re.search(pattern, line)) is not None
    ]


def _tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no git checkout: the list of files is git's")
    return [name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]


def test_files_contain_no_banned_phrase() -> None:
    found = [
        f"{name}:{number}: '{phrase}'; write {instead}"
        for name in _tracked()
        if name not in QUOTING
        for number, phrase, instead in violations((ROOT / name).read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ("// Of all ranks.", "// Of"),
        ('    """Of two states."""', '"""Of'),
        ("It is kept. Of x a shard is sent.", ". Of"),
        ("while the reduction is on its way", "on its way"),
        ("Ranks wait for ever.", "for ever"),
        ("Whoever waits drives it.", "Whoever"),
        ("while nobody waits", "nobody"),
    ],
)
def test_banned_phrases_are_found(line: str, phrase: str) -> None:
    [(number, found, _)] = violations(f"# A good line.\n{line}")
    assert (number, found) == (2, phrase)


def test_other_phrases_are_allowed() -> None:
    text = "the sum of all; OF_PRODUCTS = 1\n# 2 of 3. Often it is.\nwait forever\nHalf Of Fame\n"
    assert violations(text) == []
