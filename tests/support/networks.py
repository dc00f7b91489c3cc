"""Two network namespaces joined by a veth pair, which simulate two hosts with their own addresses and identities."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.processes import ProcessTree, run_process

ADDRESSES = ("10.87.0.1", "10.87.0.2")
INTERFACES = ("weft0", "weft1")
# The namespaces and the veth pair exist until the shell that runs this script ends.
SETUP = """
set -e
ip link set lo up
unshare --net sleep 600 &
other=$!
trap 'kill $other' EXIT
for _ in $(seq 100); do
  [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
  sleep 0.02
done
ip link add weft0 type veth peer name weft1 netns $other
ip address add 10.87.0.1/24 dev weft0
ip link set weft0 up
nsenter --net=/proc/$other/ns/net sh -c '
  ip link set lo up; ip address add 10.87.0.2/24 dev weft1; ip link set weft1 up'
echo "networks of $$ $other"
wait $other
"""

# Enters the network namespace of the process of the first argument, then runs the script of the second.
ENTER = """
import ctypes, os, runpy, sys
fd = os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
    raise OSError(ctypes.get_errno(), "setns failed")
os.close(fd)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def namespace_error() -> str:
    """Return why network namespaces cannot be created on this machine; "" if they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)}"
    attempt = run_process(["unshare", "--net", "true"])
    return attempt.stderr.strip() if attempt.returncode != 0 else ""


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Yield the pids of two processes in separate network namespaces; skip the test if these cannot be created."""
    if error := namespace_error():
        pytest.skip(f"needs network namespaces: {error}")
    with ProcessTree(["unshare", "--net", "sh", "-c", SETUP]) as tree:
        pids = tree.wait_for_text("networks of").split()[-2:]
        yield pids[0], pids[1]


def in_network_namespace(pid: str) -> list[str]:
    """Return a command prefix: the command after it runs in the network namespace of process `pid`."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def script_in_network_namespace(pid: str) -> list[str]:
    """Return a command of Python: it runs the script after it in the network namespace of process `pid`.

    Unlike the command of `in_network_namespace`, it can be a program in a warm process, without children.
    """
    return [sys.executable, "-c", ENTER, pid]
