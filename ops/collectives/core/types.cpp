#include "types.h"

#include <array>

namespace weft::collectives {

namespace {

struct DTypeFacts {
  std::string_view name;
  size_t size;
};

constexpr std::array<DTypeFacts, 21> kDTypes{
    {{"bool", 1},          {"uint8", 1},           {"int8", 1},
     {"uint16", 2},        {"int16", 2},           {"uint32", 4},
     {"int32", 4},         {"uint64", 8},          {"int64", 8},
     {"float16", 2},       {"bfloat16", 2},        {"float32", 4},
     {"float64", 8},       {"float8_e5m2", 1},     {"float8_e5m2fnuz", 1},
     {"float8_e4m3fn", 1}, {"float8_e4m3fnuz", 1}, {"float8_e8m0fnu", 1},
     {"complex32", 4},     {"complex64", 8},       {"complex128", 16}}};

constexpr std::array<std::string_view, 10> kOps{"all_reduce",
                                                "reduce",
                                                "reduce_scatter",
                                                "all_gather",
                                                "broadcast",
                                                "gather",
                                                "scatter",
                                                "all_to_all",
                                                "barrier",
                                                "sparse_all_reduce"};

constexpr std::array<std::string_view, 9> kReduceOps{
    "", "sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

}  // namespace

std::string_view name_of(Op op) { return kOps.at(static_cast<size_t>(op)); }
std::string_view name_of(ReduceOp op) { return kReduceOps.at(static_cast<size_t>(op)); }
std::string_view name_of(DType dtype) { return kDTypes.at(static_cast<size_t>(dtype)).name; }
size_t size_of(DType dtype) { return kDTypes.at(static_cast<size_t>(dtype)).size; }

}  // namespace weft::collectives
