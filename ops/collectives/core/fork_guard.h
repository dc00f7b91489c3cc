#pragma once

namespace weft::collectives {

// Returns the number of forks between the process that first called this function and the current
// one. Cheap enough to call in every operation.
unsigned fork_generation();

}  // namespace weft::collectives
