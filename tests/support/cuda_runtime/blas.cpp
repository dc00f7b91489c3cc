// cuBLAS. torch's matrix products need a handle of it before they launch a kernel. Like other
// kernels, a product is skipped or an error.

#include "runtime.h"

#include <cstdlib>
#include <cstring>

namespace weft::cuda_runtime {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

int product(const char* name) {
  count("launches");
  count(std::string("launch ") + name);
  if (settings().skips_kernels) return kSuccess;
  fail(cudaErrorNotSupported, std::string("a product without a version for the host: ") + name);
  return kNotSupported;
}

int set_to_zero(int* result) {
  *result = 0;
  return kSuccess;
}

int create(void** result) {
  *result = std::malloc(1);
  return *result == nullptr ? kNotSupported : kSuccess;
}

}  // namespace
}  // namespace weft::cuda_runtime

using namespace weft::cuda_runtime;  // NOLINT: the functions below are C's

#define WEFT_PRODUCT(name) \
  WEFT_CUDA_API int name() { return product(#name); }
#define WEFT_SETTING(name) \
  WEFT_CUDA_API int name() { return kSuccess; }

WEFT_CUDA_API int cublasCreate_v2(void** result) { return create(result); }
WEFT_CUDA_API int cublasDestroy_v2(void* handle) {
  std::free(handle);
  return kSuccess;
}
WEFT_CUDA_API int cublasGetMathMode(void*, int* result) { return set_to_zero(result); }
WEFT_CUDA_API int cublasGetPointerMode_v2(void*, int* result) { return set_to_zero(result); }
WEFT_SETTING(cublasSetMathMode)
WEFT_SETTING(cublasSetPointerMode_v2)
WEFT_SETTING(cublasSetSmCountTarget)
WEFT_SETTING(cublasSetStream_v2)
WEFT_SETTING(cublasSetWorkspace_v2)
WEFT_PRODUCT(cublasDgemmStridedBatched)
WEFT_PRODUCT(cublasDgemm_v2)
WEFT_PRODUCT(cublasDgemv_v2)
WEFT_PRODUCT(cublasDdot_v2)
WEFT_PRODUCT(cublasDotEx)
WEFT_PRODUCT(cublasGemmEx)
WEFT_PRODUCT(cublasGemmStridedBatchedEx)
WEFT_PRODUCT(cublasSdot_v2)
WEFT_PRODUCT(cublasSgemmEx)
WEFT_PRODUCT(cublasSgemv_v2)

// torch owns the descriptors of cublasLt, which these functions allocate.
WEFT_CUDA_API int cublasLtMatmulDescCreate(void** result, int, int) { return create(result); }
WEFT_CUDA_API int cublasLtMatmulPreferenceCreate(void** result) { return create(result); }
WEFT_CUDA_API int cublasLtMatrixLayoutCreate(void** result, int, uint64_t, uint64_t, int64_t) {
  return create(result);
}
WEFT_SETTING(cublasLtMatmulDescDestroy)
WEFT_SETTING(cublasLtMatmulDescSetAttribute)
WEFT_SETTING(cublasLtMatmulPreferenceDestroy)
WEFT_SETTING(cublasLtMatmulPreferenceSetAttribute)
WEFT_SETTING(cublasLtMatrixLayoutDestroy)
WEFT_SETTING(cublasLtMatrixLayoutSetAttribute)
WEFT_PRODUCT(cublasLtMatmul)

// One algorithm, without a workspace.
WEFT_CUDA_API int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* results, int* num_results) {
  constexpr std::size_t kResultBytes = 64;  // of cublasLtMatmulHeuristicResult_t, at least
  std::memset(results, 0, kResultBytes);
  *num_results = 1;
  return kSuccess;
}
