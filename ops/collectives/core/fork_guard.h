#pragma once

namespace weft::collectives {

// Returns the number of forks between the process that called this first and the current one. Cheap
// enough for every call of an operation.
unsigned fork_generation();

}  // namespace weft::collectives
