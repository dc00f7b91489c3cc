"""Runs a script on the tests' warm ranks, with the environment variables that torchrun sets."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path

from lightning_plugin.scripts.plugin_models import set_torchrun_environment


def run_as_main(rank: int, world_size: int, path: str, arguments: list[str], cwd: str) -> str:
    """Run the script at `path` as `__main__` in the folder `cwd` and return its stdout.

    Close the pools of ranks afterwards: a script may change logger levels and warning filters.
    """
    set_torchrun_environment(rank, world_size)
    before, saved_argv, saved_path, saved_cwd = set(sys.modules), sys.argv, list(sys.path), os.getcwd()
    folder = str(Path(path).parent)
    sys.argv, sys.path[:0] = [path, *arguments], [folder]
    os.chdir(cwd)
    stdout, saved_stdout = tempfile.TemporaryFile("w+"), os.dup(1)  # noqa: SIM115 - closed below
    os.dup2(stdout.fileno(), 1)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert end.code in (None, 0), end
    finally:
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
        os.chdir(saved_cwd)
        sys.argv, sys.path[:] = saved_argv, saved_path
        for name in set(sys.modules) - before:  # other scripts may import modules of the same name
            if "." not in name and str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]
    with stdout:
        stdout.seek(0)
        return stdout.read()
