#pragma once

namespace weft::collectives {

// Counts the forks that led to this process since the first call; cheap enough for every call.
unsigned fork_generation();

}  // namespace weft::collectives
