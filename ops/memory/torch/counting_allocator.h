#pragma once

// A c10 allocator that wraps another one and records its allocations in the ledger.

#include "ledger.h"

#include <c10/core/Allocator.h>

namespace weft::memory {

// Wraps torch's CPU allocator until the process ends. Returns false if it was wrapped before.
// Errors: c10::Error for an allocator without a raw_deleter.
bool install_counting_allocator();
bool is_counting();

// Returns the header of a block of the counting allocator; null for other blocks.
BlockHeader* header_of(const c10::DataPtr& data);

}  // namespace weft::memory
