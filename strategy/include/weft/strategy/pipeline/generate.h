#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace weft::strategy {

// The kinds of schedules. The figures are for p ranks, m micro-batches and v stages per rank, if
// all stages take equal time; the bubble is the fraction of time in which ranks are idle.
//
// The last four kinds are V-shaped: they have two stages on each rank, stages r and 2p-1-r on rank
// r, and split backwards. Rank 0 has the first and the last stage, and between stages p-1 and p
// nothing is sent. The figures are for m >= 2p and equal times of forward, input half and weight
// half; "idle" is the time in which a rank is idle, in units of one of them for one stage (1F1B of
// the same model: 6(p-1), because its stages are twice as large), and "in flight" counts the
// forwards of one stage on a rank whose weight half is not done (1F1B: 2p on rank 0).
enum class ScheduleKind {
  kNaive,                  // one micro-batch at a time: one rank works while the others wait
  kGpipe,                  // all forwards, then all backwards; bubble (p-1)/(m+p-1), m in flight
  kOneForwardOneBackward,  // backwards as early as possible: GPipe's bubble, min(p, m) in flight
  kInterleaved,            // 1F1B over v stages per rank: bubble (p-1)/(v*m+p-1) if p divides m
  kZeroBubble,             // ZB-H1: 1F1B with split backwards, whose weight halves fill the bubble
  kLoopedBfs,  // v stages per rank, breadth first: all micro-batches through a stage, then the next
  kZeroBubbleV,  // ZB-V: p-1 idle, while the first micro-batch comes; 2p in flight
  kDualPipeV,    // DualPipeV: forwards alternate with full backwards; p-1 idle, 2p+1 in flight
  kVHalf,        // half of 1F1B's memory: 2 floor(p/2 + 1) in flight; up to 3p-4 idle
  kVMin,         // a third of 1F1B's memory: 2 floor((p+4)/3) in flight; up to 4p-5 idle
};

// Returns "naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "zbv", "dualpipev",
// "v_half" or "v_min".
std::string_view to_string(ScheduleKind kind);

// The inverse of to_string. Throws std::invalid_argument with the valid names.
ScheduleKind parse_schedule_kind(std::string_view text);

std::span<const ScheduleKind> all_schedule_kinds();

// Returns whether a kind has two stages on each rank, in a V.
bool is_v_shaped(ScheduleKind kind);

// Returns whether a kind splits backwards into halves.
bool splits_backwards(ScheduleKind kind);

// Returns the stages per rank of a kind, if none are named: 1, or 2 for kinds for several stages.
int64_t default_stages_per_rank(ScheduleKind kind);

// Returns whether a kind can have this number of stages on each rank.
bool supports_stages_per_rank(ScheduleKind kind, int64_t stages_per_rank);

// Returns the rank of each stage: of stage s, s % num_ranks, except for V-shaped kinds.
std::vector<int32_t> place_stages(ScheduleKind kind, int64_t num_ranks, int64_t stages_per_rank);

struct GenerateOptions {
  int64_t num_ranks = 1;
  int64_t num_micro_batches = 1;  // any number from 1 on
  // kOneForwardOneBackward and kZeroBubble have one stage per rank, V-shaped kinds two.
  int64_t stages_per_rank = 1;
};

// Returns a schedule of compute actions only, which check() accepts. The ranks of its stages are
// those of place_stages().
//
// Sources: GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush). Interleaved:
// Narayanan et al. 2021, section 2.2. Looped BFS: Lamy-Poirier 2023. ZB-H1 and ZB-V: Qi et al.
// 2024, "Zero Bubble Pipeline Parallelism". V-Half and V-Min: Qi et al. 2024, "Pipeline Parallelism
// with Controllable Memory". DualPipeV: DeepSeek-AI 2025, without its overlap of a forward with a
// backward.
//
// Throws std::invalid_argument for numbers out of range and for a number of stages per rank that
// the kind does not support.
Schedule generate(ScheduleKind kind, const GenerateOptions& options);

}  // namespace weft::strategy
