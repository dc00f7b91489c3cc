"""Counts instructions of CUDA kernels in the output of `cuobjdump --dump-sass`, among them those of the main loops.

An instruction is in a main loop if it is in a loop of the kernel's control flow graph that contains no other loop. The
row kernels have a loop over rows around their loops over the packs of a row; the latter are their main loops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Function = tuple[str, str]  # architecture, mangled name
Instruction = tuple[int, str]  # address, text


@dataclass(frozen=True)
class Code:
    """Counts of SASS instructions; those of global memory are in main loops only."""

    instructions: int  # without padding
    local_accesses: int  # loads and stores of local memory: spills, or arrays that are not in registers
    loads_128: int
    stores_128: int
    narrow: int  # loads and stores of less than 128 bits
    generic: int  # loads and stores whose address may be of global or shared memory, of any width


def parse_sass(lines: Iterable[str]) -> dict[Function, list[Instruction]]:
    """Return the instructions of each function, from --dump-sass."""
    functions: dict[Function, list[Instruction]] = {}
    instructions: list[Instruction] = []
    arch = ""
    for line in lines:
        if found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            instructions.append((int(found[1], 16), found[2]))
        elif found := re.match(r"\s+code for (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s+Function : (\S+)", line):
            instructions = functions[arch, found[1]] = []
    return functions


def analyse(instructions: Sequence[Instruction]) -> Code:
    """Return the counts of a kernel's instructions."""
    blocks, successors = basic_blocks(instructions)
    in_loops = [instructions[i] for loop in innermost_loops(successors) for block in loop for i in blocks[block]]
    accesses = [_opcode(text).split(".") for _, text in in_loops]
    wide = [kind for kind, *suffixes in accesses if "128" in suffixes]
    num_all, num_wide = (
        {kind: kinds.count(kind) for kind in ("LDG", "STG", "LD", "ST")} for kinds in ([a[0] for a in accesses], wide)
    )
    opcodes = [_opcode(text).split(".")[0] for _, text in instructions]
    return Code(
        instructions=sum(opcode != "NOP" for opcode in opcodes),
        local_accesses=opcodes.count("LDL") + opcodes.count("STL"),
        loads_128=num_wide["LDG"],
        stores_128=num_wide["STG"],
        narrow=num_all["LDG"] + num_all["STG"] - num_wide["LDG"] - num_wide["STG"],
        generic=num_all["LD"] + num_all["ST"],
    )


def _opcode(text: str) -> str:
    """Return the opcode with its suffixes, without the predicate: LDG.E.128."""
    return text.split()[1 if text.startswith("@") else 0]


def basic_blocks(instructions: Sequence[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Return the blocks of a function, as ranges of instructions, and the successors of each block.

    A call continues after the call: the functions that the compiler places behind a kernel, such as a division's, do
    not access memory. BSYNC, where threads that took different branches meet, continues at the next instruction.
    """
    idx_of = {address: i for i, (address, _) in enumerate(instructions)}
    targets: dict[int, int] = {}
    ends: set[int] = set()  # instructions after which the next one is not always executed
    never_next: set[int] = set()  # instructions after which the next one is never executed
    for i, (_, text) in enumerate(instructions):
        kind = _opcode(text).split(".")[0]
        if kind not in {"BRA", "BRX", "JMP", "JMX", "EXIT", "RET"}:
            continue
        ends.add(i)
        target = re.search(r"0x([0-9a-f]+)$", text)
        if kind in {"BRA", "JMP"} and target is not None:
            targets[i] = idx_of[int(target[1], 16)]
        has_condition = text.startswith("@") or "," in text  # in `BRA P0, 0x10` and `BRA.DIV UR4, 0x10`, too
        if not has_condition:
            never_next.add(i)
    starts = sorted({0, *targets.values(), *(i + 1 for i in ends if i + 1 < len(instructions))})
    blocks = [range(start, end) for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True)]
    block_of = {block.start: k for k, block in enumerate(blocks)}
    successors: list[list[int]] = []
    for k, block in enumerate(blocks):
        last = block[-1]
        following = [] if last in never_next or k + 1 == len(blocks) else [k + 1]
        successors.append(following + ([block_of[targets[last]]] if last in targets else []))
    return blocks, successors


def innermost_loops(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return the loops of a graph that contain no other loop, as sets of nodes.

    A loop is a strongly connected component; the loops in it are those that remain without the edges to its entry.
    """
    found: list[set[int]] = []
    pending = [dict(enumerate(map(set, successors)))]
    while pending:
        edges = pending.pop()
        for loop in _components(edges):
            if len(loop) == 1 and not loop & edges[min(loop)]:
                continue
            entries = {to for node in edges.keys() - loop for to in edges[node] & loop}
            entry = min(entries or loop)
            inner = {node: (edges[node] & loop) - {entry} for node in loop}
            if any(len(component) > 1 or component & inner[min(component)] for component in _components(inner)):
                pending.append(inner)
            else:
                found.append(loop)
    return found


def _components(edges: Mapping[int, set[int]]) -> list[set[int]]:
    """Return the strongly connected components, by Kosaraju's algorithm."""
    reverse: dict[int, set[int]] = {node: set() for node in edges}
    for node, targets in edges.items():
        for target in targets:
            reverse[target].add(node)
    components: list[set[int]] = []
    seen: set[int] = set()
    for root in reversed(_finish_order(edges)):
        if root in seen:
            continue
        component, stack = {root}, [root]
        while stack:
            for node in reverse[stack.pop()] - seen - component:
                component.add(node)
                stack.append(node)
        seen |= component
        components.append(component)
    return components


def _finish_order(edges: Mapping[int, set[int]]) -> list[int]:
    """Return the nodes in the order in which a depth-first search leaves them."""
    order: list[int] = []
    seen: set[int] = set()
    for root in edges:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(edges[root]))]
        while stack:
            node, targets = stack[-1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(edges[target])))
    return order
