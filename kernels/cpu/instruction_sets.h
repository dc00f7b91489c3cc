#pragma once

#include "loops.h"

#include <vector>

// The instruction sets that loops.h is compiled for, as the running processor has them.
namespace weft::kernels::cpu {

struct InstructionSet {
  const char* name;
  Loops loops;
};

// Those that the running processor executes, widest first; never empty.
std::vector<InstructionSet> supported_instruction_sets();

}  // namespace weft::kernels::cpu
