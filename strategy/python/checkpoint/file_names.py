"""The names of the files of a checkpoint.

In a directory, each save has a folder of its own until it is complete, and the names are fixed. At a URL, all saves of
a checkpoint write below the same URL, and the names of a save begin with its token: 16 hexadecimal digits.
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
OBJECTS = "objects.pickle"
REST_TENSORS = "rest.safetensors"

_TOKEN = "[0-9a-f]{16}-"
_FIXED = r"(?:rank-[0-9]{5,}\.safetensors|rest\.safetensors|objects\.pickle)"
_OF_SAVE = re.compile(_TOKEN + _FIXED)
_OF_CHECKPOINT = re.compile(f"(?:{_TOKEN})?{_FIXED}")
_OF_OBJECTS = re.compile(rf"(?:{_TOKEN})?objects\.pickle")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")


def rank_file(rank: int) -> str:
    """Return the name of the file to which a rank writes its chunks."""
    return f"rank-{rank:05}.safetensors"


def with_token(token: str, name: str) -> str:
    """Return the name that a file of the save `token` has at a URL."""
    return f"{token}-{name}"


def is_of_save(name: str) -> bool:
    """Return whether a save to a URL may have written a file of this name, which is not the manifest."""
    return _OF_SAVE.fullmatch(name) is not None


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file of this name, which is not the manifest, may be of a checkpoint, also of a copied one."""
    return _OF_CHECKPOINT.fullmatch(name) is not None


def is_of_objects(name: str) -> bool:
    """Return whether a file of this name has pickled objects."""
    return _OF_OBJECTS.fullmatch(name) is not None


def may_be_listed(name: str) -> bool:
    """Return whether a manifest may list this name: it is that of a file beside the manifest."""
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST
