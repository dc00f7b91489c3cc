#pragma once

#include "loops.h"

#include <vector>

namespace weft::kernels::cpu {

struct InstructionSet {
  const char* name;
  Loops loops;
};

// Returns the instruction sets that the running processor supports, widest first; never empty.
std::vector<InstructionSet> supported_instruction_sets();

}  // namespace weft::kernels::cpu
