"""`weft doctor`: the facts of a host, and what it says about problems."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest
import torch

import weft_command
from weft.strategy import doctor
from weft.strategy.doctor import Examination, Fact

MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:         100000 kB\nMemAvailable:   {available} kB\nHugePages_Total: 0\n"
)
CPUINFO = "processor\t: 0\nmodel name\t: Fast CPU @ 2.5: GHz\nflags\t\t: fpu avx {flags}\n"


def test_processor() -> None:
    fact = doctor.processor_fact(CPUINFO.format(flags="avx2 avx512f"), 8)
    assert (fact.value, fact.problem) == ("Fast CPU @ 2.5: GHz, 8 cores, AVX2, AVX-512", None)
    slow = doctor.processor_fact(CPUINFO.format(flags=""), 8)
    assert slow.problem is not None and "no AVX2" in slow.problem


def test_threads() -> None:
    assert doctor.threads_fact({"OMP_NUM_THREADS": "2"}, 8) == Fact("threads", "2")
    assert doctor.threads_fact({}, 8).value.startswith("8 of each rank that is started without a launcher")


def test_memory() -> None:
    fact = doctor.memory_fact(MEMINFO.format(available=8_000_000), 4 * 10**9)
    assert (fact.value, fact.problem) == ("16.4 GB, 8.2 GB free, 4.0 GB for this control group", None)
    problem = doctor.memory_fact(MEMINFO.format(available=1_000_000), 10**11).problem
    assert problem == "Only 1.0 GB of the host's memory is free; end other processes."


def test_open_files() -> None:
    assert doctor.open_files_fact(-1) == Fact("open files", "unlimited")
    assert doctor.open_files_fact(1024).problem is None
    problem = doctor.open_files_fact(256).problem
    assert problem is not None and "may open 256 files" in problem and "ulimit -n 1024" in problem


def test_network_interfaces() -> None:
    assert doctor.interface_fact({}, ["lo", "eth0"]) == Fact("network", "lo, eth0; GLOO_SOCKET_IFNAME: not set")
    assert doctor.interface_fact({"GLOO_SOCKET_IFNAME": "lo"}, ["lo"]).problem is None
    problem = doctor.interface_fact({"GLOO_SOCKET_IFNAME": "ib0"}, ["lo", "eth0"]).problem
    assert problem == "GLOO_SOCKET_IFNAME names ib0, and the interfaces are lo, eth0; set it to one of these."


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions, lightning = doctor.version_facts()
    assert f"torch {torch.__version__}" in versions.value and lightning.problem is None

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    problem = doctor.version_facts()[1].problem
    assert problem is not None and problem.endswith("install lightning.")


def test_ranks_that_fail_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(num_ranks: int) -> None:
        raise RuntimeError("no shared memory\nwith a traceback")

    monkeypatch.setattr(doctor, "profile_host", fail)
    found = doctor.examine()
    assert found.facts[-1] == Fact("backend weft", "failed", "Two CPU ranks cannot compute together: no shared memory.")
    assert str(found).splitlines()[-1] == found.facts[-1].problem


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "doctor", "--json"])
    status = weft_command.main()
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["problems"] else 0)
    assert list(found["facts"])[:3] == ["versions", "Lightning", "processor"]
    assert "between two CPU ranks" in found["facts"]["backend weft"]


def test_command_without_measurements(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = (Fact("memory", "none", "There is no memory; buy some."), Fact("a core", "fast"))
    monkeypatch.setattr(doctor, "examine", lambda measures: Examination(facts[: 1 + measures]))
    monkeypatch.setattr(sys, "argv", ["weft", "doctor", "--quick"])
    assert weft_command.main() == 1
    assert capsys.readouterr().out == "memory  none\n\nThere is no memory; buy some.\n"
    monkeypatch.setattr(doctor, "examine", lambda measures: Examination((Fact("memory", "enough"),)))
    assert weft_command.main() == 0
    assert capsys.readouterr().out == "memory  enough\n\nNo problem was found.\n"
