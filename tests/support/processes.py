"""Fresh process trees for tests: a time limit, captured output, and proof that nothing survives."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4
_TREE_VARIABLE = "WEFT_TEST_TREE"
_POLL_SECONDS = 0.02

# Becomes the command, after asking the kernel for what `die_with_parent` asks. (A preexec_fn would run Python
# between fork and exec of a process that has threads.) A shell starts what it runs in the background with SIGINT
# ignored, and that is inherited: a tree takes signals as if it were started at a terminal.
_LAUNCHER = f"""
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

# Process group id -> the token every descendant carries in its environment. It finds descendants that
# made a session of their own, which the process group id alone would miss.
_tokens: dict[int, str] = {}


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; `parent_pid` is who made it."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the request was in force
        os._exit(1)


@dataclass(frozen=True)
class ProcessResult:
    """How a tree ended: the root's exit status (negative: a signal), the tree's output, the time it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    pgid: int


class ProcessTree:
    """A command running in a process group of its own. Use as a context manager: leaving it kills the tree.

    Output goes to files, not pipes: a grandchild that outlives the root cannot block the reader.
    """

    def __init__(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-tree-")
        self._out_path = Path(self._folder.name, "stdout")
        self._err_path = Path(self._folder.name, "stderr")
        token = uuid.uuid4().hex
        self._start = time.monotonic()
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env={**os.environ, **(env or {}), _TREE_VARIABLE: token},
                start_new_session=True,
            )
        self._command = " ".join(map(str, command))
        self.pgid = self._process.pid
        _tokens[self.pgid] = token

    def __enter__(self) -> ProcessTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()
        _tokens.pop(self.pgid, None)

    @property
    def stdout(self) -> str:
        """What the tree has written to stdout so far."""
        return self._out_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What the tree has written to stderr so far."""
        return self._err_path.read_text(errors="replace")

    def send_signal(self, signum: int, *, whole_group: bool = False) -> None:
        """Signal the root alone, or (as a terminal's Ctrl-C does) the whole process group."""
        if whole_group:
            os.killpg(self.pgid, signum)
        else:
            self._process.send_signal(signum)

    def wait_for_text(self, text: str, timeout: float = 60.0) -> str:
        """Return the tree's stdout as soon as it holds `text`; TimeoutError names the text otherwise."""
        deadline = time.monotonic() + timeout
        while text not in (stdout := self.stdout):
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"ended with status {self._process.returncode}" if ended else f"ran {timeout:g} s"
                raise TimeoutError(f"the process {why} without printing {text!r}\n{self._output()}")
            time.sleep(_POLL_SECONDS)
        return stdout

    def wait(self, timeout: float = 60.0) -> ProcessResult:
        """Wait for the root to end. REQUIRES: nothing of the descendants: ask `children_left` about them.

        Raises TimeoutError, with the output so far, after killing the whole tree.
        """
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"{self._command!r} ran longer than {timeout:g} s\n{self._output()}") from None
        seconds = time.monotonic() - self._start
        return ProcessResult(returncode, self.stdout, self.stderr, seconds, self.pgid)

    def kill(self) -> None:
        """Kill every process of the tree that is still there, and reap the root."""
        deadline = time.monotonic() + 10.0
        while left := children_left(self.pgid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes survived SIGKILL for 10 s: {left}")
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended between the listing and the signal
            time.sleep(_POLL_SECONDS)
        self._process.wait(10.0)

    def _output(self) -> str:
        return f"--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"


def run_process(
    command: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> ProcessResult:
    """Run `command` in a fresh process tree. What outlives the root is an AssertionError, and is killed."""
    with ProcessTree(command, env=env, cwd=cwd) as tree:
        result = tree.wait(timeout)
        assert_nothing_left(tree.pgid)
        return result


def run_script(script: str | Path, *arguments: str, **options: object) -> ProcessResult:
    """`run_process` for Python: a Path is a script file, a str is source text as after `python -c`."""
    source = [str(script)] if isinstance(script, Path) else ["-c", script]
    return run_process([sys.executable, *source, *arguments], **options)  # type: ignore[arg-type]


def assert_nothing_left(pgid: int, *, within: float = 2.0) -> None:
    """Assert that the tree of `pgid` is gone within `within` seconds."""
    deadline = time.monotonic() + within
    while left := children_left(pgid):
        assert time.monotonic() < deadline, f"processes still running after {within:g} s: {left}"
        time.sleep(_POLL_SECONDS)


def children_left(pgid: int) -> dict[int, str]:
    """The living processes (pid -> command line) of process group `pgid`, and of the tree started as it.

    Zombies do not count: they hold nothing, and the process that adopted them may never reap them. Nor does a process
    that is being torn down: it has lost its environment, which would make the answer depend on the instant.
    """
    token = _tokens.get(pgid)
    marker = f"{_TREE_VARIABLE}={token}".encode() if token else None
    left = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if not is_running(int(entry.name)):
                continue
            group, session = _stat(int(entry.name))[2:4]
            member = pgid in (int(group), int(session))
            if not member and marker is not None:
                member = marker in (entry / "environ").read_bytes().split(b"\0")
            if member:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                left[int(entry.name)] = command.strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to another user
    return left


def forked_text(body: Callable[[], object]) -> str:
    """What `body` raises in a child forked from this process now, as "Class: text"; "" for nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
            text = ""
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return text if status == 0 else f"the child ended with status {status}: {text}"


def is_running(pid: int) -> bool:
    """Whether `pid` is a living process; a zombie, or one that is past running any code, is not."""
    try:
        state, *_, flags = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and not int(flags) & _PF_EXITING


def _stat(pid: int) -> list[str]:
    # What follows the command in parentheses: state, parent, process group, session, tty, its group, flags.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:7]
