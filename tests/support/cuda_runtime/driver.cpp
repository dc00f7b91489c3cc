// The functions of libcuda.so.1 that torch links. Each returns CUDA_ERROR_NOT_SUPPORTED, except for
// those that torch calls while it initialises CUDA.

#define WEFT_DRIVER extern "C" __attribute__((visibility("default"))) int
#define WEFT_UNSUPPORTED(name) \
  WEFT_DRIVER name() { return 801; }

WEFT_DRIVER cuInit(unsigned) { return 0; }
WEFT_DRIVER cuDriverGetVersion(int* result) {
  *result = 13000;
  return 0;
}
WEFT_DRIVER cuDeviceGetCount(int* result) {
  *result = 1;
  return 0;
}
WEFT_DRIVER cuGetErrorString(int, const char** result) {
  *result = "the CUDA driver without a device does not support this call";
  return 0;
}

// torch calls this function only after the runtime has been used.
WEFT_DRIVER cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}

WEFT_UNSUPPORTED(cuCtxGetCurrent)
WEFT_UNSUPPORTED(cuCtxSetCurrent)
WEFT_UNSUPPORTED(cuDeviceGet)
WEFT_UNSUPPORTED(cuDeviceGetAttribute)
WEFT_UNSUPPORTED(cuDevicePrimaryCtxRetain)
WEFT_UNSUPPORTED(cuFuncGetAttribute)
WEFT_UNSUPPORTED(cuFuncSetAttribute)
WEFT_UNSUPPORTED(cuFuncSetCacheConfig)
WEFT_UNSUPPORTED(cuLaunchCooperativeKernel)
WEFT_UNSUPPORTED(cuLaunchKernel)
WEFT_UNSUPPORTED(cuLaunchKernelEx)
WEFT_UNSUPPORTED(cuLinkAddData_v2)
WEFT_UNSUPPORTED(cuLinkComplete)
WEFT_UNSUPPORTED(cuLinkCreate_v2)
WEFT_UNSUPPORTED(cuModuleGetFunction)
WEFT_UNSUPPORTED(cuModuleLoad)
WEFT_UNSUPPORTED(cuModuleLoadData)
WEFT_UNSUPPORTED(cuModuleLoadDataEx)
WEFT_UNSUPPORTED(cuModuleUnload)
WEFT_UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
WEFT_UNSUPPORTED(cuPointerGetAttribute)
WEFT_UNSUPPORTED(cuTensorMapEncodeTiled)
