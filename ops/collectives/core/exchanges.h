#pragma once

// Collectives within a host that do not reduce.

#include "collective.h"

namespace weft::collectives {

// Returns the collective that carries out `call`. REQUIRES: its operation does not reduce.
CollectivePtr make_exchange(CollectiveCall call);

}  // namespace weft::collectives
