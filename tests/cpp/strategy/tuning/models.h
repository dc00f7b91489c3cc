#pragma once

#include "weft/strategy/memory_model.h"
#include "weft/strategy/tuning/cluster.h"

namespace weft::strategy {

inline DecoderModel tuned_decoder(int64_t num_layers = 3) {
  return {.dim = 64,
          .hidden_dim = 192,
          .num_layers = num_layers,
          .num_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 8,
          .vocab_size = 128};
}

// A device whose matrix products take 1 s per operation, and nothing else any time.
inline Cluster only_products() {
  return {.name = "test",
          .device = {.float32_flops = 1, .half_flops = 2, .bytes_per_second = 1e300},
          .devices_per_host = 8,
          .device_bytes = 0,
          .within_host = {.seconds_per_message = 0, .bytes_per_second = 1e300},
          .across_hosts = {.seconds_per_message = 0, .bytes_per_second = 1e300}};
}

}  // namespace weft::strategy
