#pragma once

#include "decoder_part.h"

#include <cstdint>

namespace weft::strategy::detail {

// Returns the samples of each micro-batch.
std::vector<int64_t> micro_batch_sizes(const TrainingSpec& spec);

// Simulates the forwards and backwards of a rank's stages in the order of the schedule, and the
// reduction of the gradients after them. Each is a phase of the timeline, "forward" or "backward".
// The first micro-batches, which are the largest, stand for all if the schedule repeats itself.
// Throws std::invalid_argument for a schedule that does not fit the number of stages.
void run_stages(RankMemory& memory,
                const DecoderModel& model,
                const TrainingSpec& spec,
                int64_t global_rank,
                Timeline& timeline);

}  // namespace weft::strategy::detail
