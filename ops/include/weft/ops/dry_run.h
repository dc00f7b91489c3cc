#pragma once

// A dry run trains on tensors without values, to count the memory that training would take
// (weft.strategy.dry_run in Python). Operators then compute by the code of eager mode, where they
// would otherwise take that of a trace: the two allocate different temporaries.

#include <weft/ops/export.h>

namespace weft::ops {

// Begins or ends a dry run of this thread; returns whether there was one before. During a dry run
// is_traced() is false, so the collectives of operators are calls of c10d.
WEFT_OPS_API bool set_dry_run(bool is_on);

}  // namespace weft::ops
