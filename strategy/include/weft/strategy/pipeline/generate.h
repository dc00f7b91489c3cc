#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>
#include <span>
#include <string_view>

namespace weft::strategy {

// The kinds of schedules. The figures are for p ranks, m micro-batches and v stages per rank, if
// all stages take equal time; the bubble is the fraction of time in which ranks are idle.
enum class ScheduleKind {
  kNaive,                  // one micro-batch at a time: one rank works while the others wait
  kGpipe,                  // all forwards, then all backwards; bubble (p-1)/(m+p-1), m in flight
  kOneForwardOneBackward,  // backwards as early as possible: GPipe's bubble, min(p, m) in flight
  kInterleaved,            // 1F1B over v stages per rank: bubble (p-1)/(v*m+p-1) if p divides m
  kZeroBubble,             // ZB-H1: 1F1B with split backwards, whose weight halves fill the bubble
  kLoopedBfs,  // v stages per rank, breadth first: all micro-batches through a stage, then the next
};

// Returns "naive", "gpipe", "1f1b", "interleaved", "zero_bubble" or "looped_bfs".
std::string_view to_string(ScheduleKind kind);

// The inverse of to_string. Throws std::invalid_argument with the valid names.
ScheduleKind parse_schedule_kind(std::string_view text);

std::span<const ScheduleKind> all_schedule_kinds();

struct GenerateOptions {
  int64_t num_ranks = 1;
  int64_t num_micro_batches = 1;  // any number from 1 on
  // Stage s is on rank s % num_ranks. kOneForwardOneBackward and kZeroBubble have one stage per
  // rank.
  int64_t stages_per_rank = 1;
};

// Returns a schedule of compute actions only, which check() accepts.
//
// Sources: GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush). Interleaved:
// Narayanan et al. 2021, section 2.2. Looped BFS: Lamy-Poirier 2023. ZB-H1: Qi et al. 2024.
//
// Throws std::invalid_argument for numbers out of range and for more stages per rank than the kind
// supports.
Schedule generate(ScheduleKind kind, const GenerateOptions& options);

}  // namespace weft::strategy
