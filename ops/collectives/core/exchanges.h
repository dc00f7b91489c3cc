#pragma once

// Collectives within a host that move data as it is.

#include "collective.h"

namespace weft::collectives {

// REQUIRES: an operation that does not reduce.
CollectivePtr make_exchange(CollectiveCall call);

}  // namespace weft::collectives
