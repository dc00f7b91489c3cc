#pragma once

// A c10 allocator that enters what it allocates in the ledger, with the memory of the one it wraps.

#include "ledger.h"

#include <c10/core/Allocator.h>

namespace weft::memory {

// Puts one around torch's CPU allocator, for good. False where one is there already.
// Errors: c10::Error for an allocator without a raw_deleter.
bool install_counting_allocator();
bool is_counting();

// The head of a block that the counting allocator made; null for other blocks.
BlockHead* head_of(const c10::DataPtr& data);

}  // namespace weft::memory
