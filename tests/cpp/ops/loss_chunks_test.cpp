// The sizes of the chunks of tokens in which a loss computes its logits.
#include "cross_entropy_math.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace weft::testing {
namespace {

constexpr std::int64_t kLlamaVocabulary = 128256;
const c10::Device kCpuDevice(c10::kCPU), kCudaDevice(c10::kCUDA, 0);

std::int64_t tokens(const c10::Device& device,
                    std::int64_t num_entries,
                    std::int64_t num_features,
                    at::ScalarType dtype) {
  return ops::tokens_per_product_chunk(device, {num_entries, num_features}, dtype);
}

TEST(LossChunks, Have32MebibytesOfLogitsOnTheCpu) {
  for (const std::int64_t num_features : {1, 256, 4096}) {
    EXPECT_EQ(tokens(kCpuDevice, kLlamaVocabulary, num_features, at::kFloat), 65);
    EXPECT_EQ(tokens(kCpuDevice, kLlamaVocabulary, num_features, at::kBFloat16), 130);
  }
  EXPECT_EQ(tokens(kCpuDevice, 1024, 256, at::kHalf), 16384);
  EXPECT_EQ(tokens(kCpuDevice, std::int64_t{1} << 25, 256, at::kFloat), 1);
  EXPECT_EQ(tokens(kCpuDevice, 0, 256, at::kFloat), std::int64_t{32} << 20);
}

TEST(LossChunks, HaveEnoughTokensForTheProductsOnCuda) {
  EXPECT_EQ(tokens(kCudaDevice, kLlamaVocabulary, 4096, at::kBFloat16), 2048);
  EXPECT_EQ(tokens(kCudaDevice, kLlamaVocabulary, 8192, at::kFloat), 2048);
  EXPECT_EQ(tokens(kCudaDevice, kLlamaVocabulary / 8, 8192, at::kBFloat16), 2048);
}

TEST(LossChunks, AreAtMostAsLargeAsTheWeightOnCuda) {
  EXPECT_EQ(tokens(kCudaDevice, kLlamaVocabulary, 1024, at::kBFloat16), 1024);
  EXPECT_EQ(tokens(kCudaDevice, kLlamaVocabulary, 256, at::kBFloat16), 256);
  // 32 MiB are always allowed.
  EXPECT_EQ(tokens(kCudaDevice, kLlamaVocabulary, 64, at::kBFloat16), 130);
  EXPECT_EQ(tokens(kCudaDevice, 1024, 64, at::kHalf), 16384);
}

TEST(LossChunks, HaveTokensForEmptyShards) {
  EXPECT_GE(tokens(kCudaDevice, 0, 4096, at::kFloat), 1);
  EXPECT_GE(tokens(kCudaDevice, kLlamaVocabulary, 0, at::kFloat), 1);
}

}  // namespace
}  // namespace weft::testing
