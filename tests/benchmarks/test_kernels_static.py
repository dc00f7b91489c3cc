"""The static figures of CUDA kernels are read correctly, faults are detected, and the built kernels pass the check."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

with pytest.MonkeyPatch.context() as search_path:
    search_path.syspath_prepend(str(BENCHMARKS))
    import kernels_binary
    import kernels_occupancy
    import kernels_static
    from kernels_golden import golden_text
    from kernels_sass import innermost_loops

GOLDEN = json.loads(kernels_static.GOLDEN.read_text())
JOB = "ENS0_6detail13ActivationJobEEEvT1_"
RELU = "_ZN4weft7kernels4cuda18elementwise_kernelINS1_53_GLOBAL__N__7bdb82fd_20_activation_launch_cu_3275834f"
RELU += f"19ActivationOperationIfLNS0_10ActivationE3EEELi4{JOB}"
NORM_FILE = "_ZN4weft7kernels4cuda47_GLOBAL__N__9186ab41_14_norm_launch_cu_ae33b02a"
NORM = f"{NORM_FILE}20norm_backward_kernelIN3c108BFloat16EfLi8ELi1EEEvNS0_6detail15NormBackwardJobEibPv"
SUM = f"{NORM_FILE}17sum_blocks_kernelIfEEvPKT_PS4_ll"

# Shortened output of cuobjdump 13.1 for code of nvcc 13.0.
RESOURCES = f"""
Fatbin elf code:
================
arch = sm_80
Resource usage:
 Common:
  GLOBAL:28 CONSTANT[4]:224
 Function {RELU}:
  REG:48 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:424 TEXTURE:0 SURFACE:0 SAMPLER:0
arch = sm_90
 Function {RELU}:
  REG:45 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {NORM}:
  REG:56 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:624 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin ptx code:
================
arch = sm_90
"""

# A branch in a loop, a remainder outside of the loop, a call, and padding.
ELEMENTWISE = """
0000 LDC R1, c[0x0][0x28]
0010 BSSY B0, 0x0100
0020 @P0 BRA 0x00f0
0030 LDG.E.128 R16, desc[UR6][R16.64]
0040 @P0 LDG.E.128 R12, desc[UR6][R20.64]
0050 @!P1 BRA 0x0090
0060 LDG.E.128 R20, desc[UR6][R20.64]
0070 STG.E.128 desc[UR6][R40.64], R24
0080 BRA 0x00a0
0090 STG.E.128 desc[UR6][R34.64], R20
00a0 CALL.REL.NOINC 0x0150
00b0 IADD3 R34, P1, R34, R0, RZ
00c0 @!P1 BRA P2, 0x0030
00f0 BSYNC B0
0100 @P0 EXIT
0110 LDG.E R0, desc[UR6][R4.64]
0120 STG.E desc[UR6][R2.64], R5
0130 EXIT
0140 BRA 0x0140
0150 RET.REL.NODEC R2 0x0
0160 NOP
0170 NOP
"""

# Two loops over packs in a loop over rows. The block at 00d0 is behind the kernel's end and branches back, but it is
# not in a loop over packs.
ROWS = """
0000 LDC R1, c[0x0][0x28]
0010 LDG.E R30, desc[UR4][R2.64]
0020 LDG.E.128.CONSTANT R4, desc[UR4][R8.64]
0030 LDG.E.U16 R5, desc[UR4][R8.64+0x10]
0040 LD.E R6, desc[UR4][R10.64]
0050 ST.E desc[UR4][R10.64], R6
0060 @P1 BRA 0x0020
0070 @P3 BRA 0x00d0
0080 LDG.E.128 R4, desc[UR4][R8.64]
0090 STG.E.128 desc[UR4][R8.64], R4
00a0 @P1 BRA 0x0080
00b0 @P2 BRA 0x0010
00c0 EXIT
00d0 STG.E desc[UR4][R2.64], R30
00e0 BRA 0x0080
"""
ELEMENTWISE_COUNTS = kernels_binary.Code(20, 0, loads_128=3, stores_128=2, narrow=0, generic=0)
ROWS_COUNTS = kernels_binary.Code(15, 0, loads_128=2, stores_128=1, narrow=1, generic=2)


def sass_of(functions: dict[tuple[str, str], str]) -> str:
    """Return these functions in the form of cuobjdump, in which each instruction has a second line."""
    lines = []
    for (arch, name), body in functions.items():
        lines += [f"\tcode for {arch}", f"\t.target\t{arch}", "", f"\t\tFunction : {name}", '\t.headerflags\t@"EF"']
        for line in body.split("\n")[1:-1]:
            address, _, text = line.partition(" ")
            lines += [f"        /*{address}*/  {text} ;  /* 0x00000a00ff017624 */", "  /* 0x000fe400078e00ff */"]
        lines.append("\t\t..........")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (RELU, "activation relu float32 x4"),
        (NORM, "norm_backward bfloat16 float32 k1 x8"),
        (SUM, "sum_blocks float32"),
        (NORM.replace("EfLi8ELi1E", "ES5_Li1ELi0E"), "norm_backward bfloat16 bfloat16 k0 x1"),
        (
            "_ZN4weft7kernels4cuda56_GLOBAL__N__9d5a98f6_23_cross_entropy_launch_cu_3e13ed4d"
            "17statistics_kernelIN3c104HalfEEEvNS0_6detail25CrossEntropyStatisticsJobE",
            "cross_entropy_statistics float16",
        ),
        (
            "_ZN4weft7kernels4cuda12_GLOBAL__N_121optimizer_step_kernelINS0_6detail11AdamStepJobELNS3_11StateFormatE2ELi8E"
            "EEvT_",
            "adam_step codes x8",
        ),
        (
            "_ZN4weft7kernels4cuda12_GLOBAL__N_122quantize_blocks_kernelILb0ELi1EEEvNS0_6detail13FloatCodesJobE",
            "quantize_blocks uint8 x1",
        ),
    ],
)
def test_mangled_names_become_kernel_names(mangled: str, name: str) -> None:
    assert kernels_binary.kernel_name(kernels_binary.demangle(mangled)) == name


def test_resources_exclude_reserved_shared_memory() -> None:
    assert kernels_binary.parse_resources(RESOURCES) == {
        ("sm_80", RELU): (48, 0, 0),
        ("sm_90", RELU): (45, 0, 0),
        ("sm_90", NORM): (56, 0, 128),
    }


@pytest.mark.parametrize(("body", "counts"), [(ELEMENTWISE, ELEMENTWISE_COUNTS), (ROWS, ROWS_COUNTS)])
def test_instructions_of_main_loops_are_counted(body: str, counts: kernels_binary.Code) -> None:
    [instructions] = kernels_binary.parse_sass(sass_of({("sm_90", "f"): body}).splitlines()).values()
    assert kernels_binary.analyse(instructions) == counts


@pytest.mark.parametrize(
    ("successors", "loops"),
    [
        ([[1], [2], []], []),
        ([[1], [1, 2], []], [{1}]),
        ([[1], [2], [2, 3], [1, 4], []], [{2}]),  # nested
        ([[1], [2, 3], [4], [4], [1, 5], [5, 6], []], [{1, 2, 3, 4}, {5}]),  # a branch in the first of two
        ([[1], [2, 4], [3], [2, 1], []], [{2, 3}]),
    ],
)
def test_innermost_loops_are_found(successors: list[list[int]], loops: list[set[int]]) -> None:
    assert sorted(innermost_loops(successors), key=min) == loops


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared_bytes", "blocks", "limit"),
    [  # as computed by cudaOccMaxActiveBlocksPerMultiprocessor() of CUDA 13.0's cuda_occupancy.h
        ("sm_80", 25, 256, 0, 8, "warps"),
        ("sm_80", 40, 256, 0, 6, "registers"),
        ("sm_80", 48, 256, 0, 5, "registers"),
        ("sm_80", 58, 256, 128, 4, "registers"),
        ("sm_80", 40, 512, 128, 3, "registers"),
        ("sm_80", 40, 512, 82048, 2, "shared memory"),
        ("sm_80", 25, 512, 114816, 1, "shared memory"),
        ("sm_90", 25, 512, 114816, 2, "shared memory"),
        ("sm_90", 16, 32, 0, 32, "blocks"),
    ],
)
def test_occupancy_is_that_of_cuda(
    arch: str, registers: int, threads: int, shared_bytes: int, blocks: int, limit: str
) -> None:
    limits = kernels_occupancy.LIMITS[arch]
    expected = kernels_occupancy.Occupancy(blocks, blocks * threads / 2048, limit)
    assert kernels_occupancy.occupancy_of(registers, threads, shared_bytes, limits) == expected


@pytest.mark.parametrize(
    ("file", "constant", "families"),
    [
        ("elementwise.cuh", "kElementwiseThreads", {"activation", "dropout"}),
        ("norm_rows.cuh", "kMaxThreads", {"norm_forward", "norm_backward"}),
        ("cross_entropy_launch.cu", "kMaxStatisticsThreads", {"cross_entropy_statistics"}),
        ("cross_entropy_launch.cu", "kGradientThreads", {"cross_entropy_gradient"}),
        (
            "code_blocks.cuh",
            "kCodeThreads",
            {"adam_step", "momentum_step", "split_float", "quantize_blocks", "dequantize_blocks"},
        ),
    ],
)
def test_threads_are_those_of_the_launches(file: str, constant: str, families: set[str]) -> None:
    found = re.search(rf"constexpr int {constant} = (\d+);", (ROOT / "kernels/cuda" / file).read_text())
    assert found is not None
    assert {kernels_occupancy.THREADS[family] for family in families} == {int(found[1])}


def run_main(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *options: str,
    sass: str,
    resources: str = RESOURCES,
    nvcc: str = "13.0.88",
    accepted: dict[str, int] | None = None,
) -> int:
    """Return the exit status for a library for which cuobjdump prints these texts; the golden file matches SASS."""

    def texts(sass: str, resources: str, nvcc: str) -> None:
        def output(option: str, library: Path, folder: str | None = None) -> str:
            if folder is not None:
                note = f"\0Cuda compilation tools, release 13.0, V{nvcc}\0"
                Path(folder, "library.1.sm_90.cubin").write_text(note)
            return {"--dump-sass": sass, "--dump-resource-usage": resources}.get(option, "")

        monkeypatch.setattr(kernels_binary, "_cuobjdump", output)

    texts(SASS, RESOURCES, "13.0.88")
    kernels = kernels_binary.read_kernels([tmp_path])
    golden = tmp_path / "golden.json"
    golden.write_text(golden_text("13.0.88", accepted or {}, kernels))
    monkeypatch.setattr(kernels_static, "GOLDEN", golden)
    texts(sass, resources, nvcc)
    monkeypatch.setattr(sys, "argv", ["kernels_static.py", "--library", str(tmp_path), *options])
    return kernels_static.main()


SASS = sass_of({("sm_80", RELU): ELEMENTWISE, ("sm_90", RELU): ELEMENTWISE, ("sm_90", NORM): ROWS})
SPILL = SASS.replace("ST.E desc[UR4][R10.64], R6", "STL.64 [R1], R2")
STACK = RESOURCES.replace("REG:56 STACK:0", "REG:56 STACK:8")
ROW_NAME = "sm_90 norm_backward bfloat16 float32 k1 x8"
ADVICE = "Correct these kernels or, if the figures are intended, store them with --write."


@pytest.mark.parametrize(
    ("sass", "resources", "sentence"),
    [
        (
            SPILL,
            STACK,
            f"{ROW_NAME}: 8 bytes of stack and 1 local loads and stores, expected 0 bytes.",
        ),
        (
            SASS.replace("LDG.E.128.CONSTANT", "LDG.E.64.CONSTANT"),
            RESOURCES,
            f"{ROW_NAME}: loads_128 1, expected 2.",
        ),
        (SASS, RESOURCES.replace("REG:56", "REG:57"), f"{ROW_NAME}: registers 57, expected 56 or fewer."),
        (SASS, RESOURCES.replace("SHARED:1152", "SHARED:1280"), f"{ROW_NAME}: shared_bytes 256, expected 128."),
        (
            SASS.replace("BFloat16EfLi8", "BFloat16EfLi4"),
            RESOURCES.replace("BFloat16EfLi8", "BFloat16EfLi4"),
            f"{ROW_NAME.replace('x8', 'x4')}: the golden file does not have this kernel.\n"
            f"{ROW_NAME}: the library does not have this kernel.",
        ),
    ],
)
def test_check_detects_faults(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sass: str,
    resources: str,
    sentence: str,
) -> None:
    assert run_main(monkeypatch, tmp_path, "--check", sass=sass, resources=resources) == 1
    assert capsys.readouterr().err == f"{sentence}\n{ADVICE}\n"


def test_check_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fewer = RESOURCES.replace("REG:56", "REG:50")
    assert run_main(monkeypatch, tmp_path, "--check", sass=SASS, resources=fewer) == 0
    assert capsys.readouterr() == ("3 kernels as in the golden file.\n", "")
    other_arch = {"sass": SASS.replace("sm_80", "sm_86"), "resources": RESOURCES.replace("sm_80", "sm_86")}
    assert run_main(monkeypatch, tmp_path, "--check", **other_arch) == 0


def test_check_of_another_compiler_ignores_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"resources": RESOURCES.replace("REG:56", "REG:57"), "nvcc": "13.1.80"}
    fewer = SASS.replace("LDG.E.128.CONSTANT", "LDG.E.64.CONSTANT")
    assert run_main(monkeypatch, tmp_path, "--check", sass=fewer, **fault) == 0
    assert capsys.readouterr().err == (
        "nvcc 13.1.80 compiled the library, and the golden file is of nvcc 13.0.88: registers, shared memory and the "
        "numbers of 128-bit loads and stores are not compared.\n"
    )
    none = SASS.replace("STG.E.128", "STG.E.64")
    assert run_main(monkeypatch, tmp_path, "--check", sass=none, **fault) == 1
    assert f"{ROW_NAME}: stores_128 0, expected 1 with nvcc 13.0.88.\n" in capsys.readouterr().err


def test_only_accepted_spills_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = {ROW_NAME: 8}
    assert run_main(monkeypatch, tmp_path, "--check", sass=SPILL, resources=STACK, accepted=accepted) == 0
    larger = STACK.replace("STACK:8", "STACK:16")
    assert run_main(monkeypatch, tmp_path, "--check", sass=SPILL, resources=larger, accepted=accepted) == 1
    assert run_main(monkeypatch, tmp_path, "--check", sass=SASS, accepted=accepted) == 1
    assert "remove it from accepted_stack_bytes" in capsys.readouterr().err


def test_table_has_a_row_for_the_widest_pack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = RELU.replace("Li4", "Li1")
    sass = f"{SASS}\n{sass_of({('sm_90', narrow): ROWS})}"
    resources = f"{RESOURCES} Function {narrow}:\n  REG:32 STACK:0 SHARED:0 LOCAL:0\n"
    assert run_main(monkeypatch, tmp_path, "--arch", "sm_90", sass=sass, resources=resources) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("activation relu")] == [
        "activation relu float32 x4 45 0 0 3 2 0 0 20 256 62.5 % registers"
    ]
    assert "norm_backward bfloat16 float32 k1 x8 56 0 128 2 1 1 2 15 512 50.0 % registers" in lines
    assert "rms_norm, layer_norm norm_forward 1 1 4 4 1.00" in lines
    assert run_main(monkeypatch, tmp_path, "--arch", "sm_90", "--all", "--json", sass=sass, resources=resources) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]["sm_90"]
    assert [row["kernel"][-2:] for row in rows] == ["x1", "x4", "x8"]


def test_write_stores_figures_but_accepts_no_new_spill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "page.md"
    written.write_text(f"before\n\n{kernels_static.BEGIN}\n\nold\n\n{kernels_static.END}\nafter\n")
    monkeypatch.setattr(kernels_static, "PAGE", written)
    assert run_main(monkeypatch, tmp_path, "--write", sass=SPILL, resources=STACK, accepted={ROW_NAME: 8}) == 0
    text = written.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert (
        "| norm_backward bfloat16 float32 k1 x8 | 56 | 8 | 128 | 2 | 1 | 1 | 1 | 15 | 512 | 50.0 % | registers |\n"
        in text
    )
    assert run_main(monkeypatch, tmp_path, "--write", sass=SPILL, resources=STACK) == 1  # a new spill is not accepted
    assert f"{ROW_NAME}: 8 bytes of stack" in capsys.readouterr().err


def test_errors_name_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, tmp_path, "--arch", "sm_70", sass=SASS) == 2
    assert capsys.readouterr().err == "kernels_static: got --arch sm_70, expected some of sm_80, sm_90.\n"
    assert run_main(monkeypatch, tmp_path, sass="") == 2
    assert "without a kernel, expected a library, archive or object file with CUDA code" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["kernels_static.py", "--library", str(tmp_path / "none.so")])
    assert kernels_static.main() == 2
    assert "none.so, which does not exist: build weft, or pass --library PATH." in capsys.readouterr().err
    monkeypatch.setattr(kernels_binary, "PACKAGES", {})
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="got no cuobjdump, expected it on PATH"):
        kernels_binary.cuobjdump_path()


def test_page_has_the_figures_of_the_golden_file() -> None:
    text = kernels_static.PAGE.read_text()
    generated = text[text.index(kernels_static.BEGIN) : text.index(kernels_static.END)]
    assert f"{kernels_static.PAGE_ARCH}, compiled by nvcc {GOLDEN['nvcc']}, " in generated
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in generated.splitlines() if "%" in line]
    assert len(rows) > 20
    for name, registers, stack, shared, loads, stores, *_ in rows:
        full_name = f"{kernels_static.PAGE_ARCH} {name}"
        assert GOLDEN["accepted_stack_bytes"].get(full_name, 0) == int(stack)
        assert list(GOLDEN["kernels"][full_name].values()) == list(map(int, (registers, shared, loads, stores)))
    for cells in kernels_static.traffic_cells():
        assert "| " + " | ".join(cells) + " |" in generated


def test_built_kernels_pass_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        kernels_static.default_library()
        kernels_binary.cuobjdump_path()
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(sys, "argv", ["kernels_static.py", "--check"])
    status = kernels_static.main()
    assert status == 0, capsys.readouterr().err
