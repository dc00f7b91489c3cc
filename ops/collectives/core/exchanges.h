#pragma once

// Collectives within a host that do not reduce.

#include "collective.h"

namespace weft::collectives {

// REQUIRES: an operation that does not reduce.
CollectivePtr make_exchange(CollectiveCall call);

}  // namespace weft::collectives
