#include "instruction_sets.h"

namespace weft::kernels::cpu {

std::vector<InstructionSet> supported_instruction_sets() {
  return {{"baseline", loops_baseline()}};
}

}  // namespace weft::kernels::cpu
