// Implements <weft/ops/memory.h>.
#include "counting_allocator.h"

#include <weft/ops/backend.h>
#include <weft/ops/memory.h>

namespace weft::ops {

namespace {

// Returns the ledger with the current size of shared memory. That memory does not come from the
// allocator, so its size is read whenever figures are needed.
memory::Ledger& updated_ledger() {
  memory::ledger().set_shared_memory(static_cast<int64_t>(shared_memory_bytes()));
  return memory::ledger();
}

}  // namespace

bool track_memory() { return memory::install_counting_allocator(); }
bool is_tracking_memory() { return memory::is_counting(); }

memory::Totals memory_totals() { return updated_ledger().totals(); }
void reset_memory_peak() { updated_ledger().reset_peak(); }
std::vector<memory::Phase> memory_phases() { return updated_ledger().phases(); }

void begin_memory_phase(const std::string& name, Category category) {
  updated_ledger().begin_phase(name, category);
}

bool set_memory_category(const at::Tensor& tensor, Category category) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  memory::BlockHeader* const header = memory::header_of(tensor.storage().data_ptr());
  if (header == nullptr) return false;
  memory::ledger().set_category(*header, category);
  return true;
}

void set_memory_category_since(uint64_t mark, Category from, Category to) {
  memory::ledger().set_category_since(mark, from, to);
}

uint64_t memory_mark() { return memory::ledger().mark(); }

}  // namespace weft::ops
