# Decides whether the CUDA sources are compiled (WEFT_WITH_CUDA) and defines weft::torch_cuda.
set(WEFT_WITH_CUDA OFF)
if(WEFT_CUDA STREQUAL "OFF")
  message(STATUS "weft: CUDA sources left out (WEFT_CUDA=OFF)")
  return()
endif()

# nvcc is searched only on PATH and below CUDA_HOME and CUDA_PATH: a build without CUDA only has to hide it there.
find_program(
  WEFT_NVCC nvcc
  HINTS ENV CUDA_HOME ENV CUDA_PATH
  PATH_SUFFIXES bin
  NO_CMAKE_SYSTEM_PATH NO_CMAKE_INSTALL_PREFIX)
find_library(WEFT_TORCH_CUDA_LIBRARY torch_cuda PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH)
find_library(WEFT_C10_CUDA_LIBRARY c10_cuda PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH)
if(NOT WEFT_NVCC OR NOT WEFT_TORCH_CUDA_LIBRARY OR NOT WEFT_C10_CUDA_LIBRARY)
  if(WEFT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "WEFT_CUDA=ON needs nvcc and a CUDA build of torch; got nvcc: ${WEFT_NVCC}, "
                        "torch_cuda: ${WEFT_TORCH_CUDA_LIBRARY}. Put nvcc on PATH, or use WEFT_CUDA=AUTO.")
  endif()
  message(STATUS "weft: CUDA sources left out (nvcc: ${WEFT_NVCC}, torch: ${WEFT_TORCH_CUDA_VERSION})")
  return()
endif()

# Code that another major release of CUDA compiled would load a second CUDA runtime besides torch's.
execute_process(COMMAND "${WEFT_NVCC}" --version OUTPUT_VARIABLE nvcc_text COMMAND_ERROR_IS_FATAL ANY)
if(NOT nvcc_text MATCHES "release ([0-9]+)\\.([0-9]+)")
  message(FATAL_ERROR "${WEFT_NVCC} --version prints no release: put the nvcc of a CUDA toolkit on PATH.")
endif()
set(nvcc_release "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
if(NOT WEFT_TORCH_CUDA_VERSION MATCHES "^${CMAKE_MATCH_1}\\.")
  set(nvcc_problem "nvcc ${nvcc_release} and torch for CUDA ${WEFT_TORCH_CUDA_VERSION} differ in their major release")
  if(WEFT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "WEFT_CUDA=ON: ${nvcc_problem}; put the nvcc of torch's release on PATH, or use WEFT_CUDA=AUTO.")
  endif()
  message(WARNING "weft: CUDA sources left out, because ${nvcc_problem}.")
  return()
endif()

# Sets OUTPUT to CMake's names of the architectures in TORCH_CUDA_ARCH_LIST, which has torch's notation: "8.0;9.0+PTX",
# separated by ; or blanks.
function(weft_cuda_architectures OUTPUT)
  set(list "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(NOT list)
    set(list "8.0;9.0+PTX")
  endif()
  string(REPLACE " " ";" list "${list}")
  set(result)
  foreach(arch IN LISTS list)
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9]+[af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST has '${arch}', which is not of the form 9.0 or 9.0+PTX: "
                          "write the architectures as numbers, e.g. TORCH_CUDA_ARCH_LIST='8.0;9.0+PTX'.")
    endif()
    list(APPEND result "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real")
    if(CMAKE_MATCH_3)
      list(APPEND result "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-virtual")
    endif()
  endforeach()
  set(${OUTPUT} "${result}" PARENT_SCOPE)
endfunction()
weft_cuda_architectures(CMAKE_CUDA_ARCHITECTURES)

set(CMAKE_CUDA_COMPILER "${WEFT_NVCC}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(WEFT_WITH_CUDA ON)
message(STATUS "weft: CUDA sources compiled with ${WEFT_NVCC} for ${CMAKE_CUDA_ARCHITECTURES}")

add_library(weft_torch_cuda INTERFACE)
add_library(weft::torch_cuda ALIAS weft_torch_cuda)
target_link_libraries(weft_torch_cuda INTERFACE weft::torch "${WEFT_TORCH_CUDA_LIBRARY}"
                                                "${WEFT_C10_CUDA_LIBRARY}" CUDA::cudart)
target_compile_options(
  weft_torch_cuda
  INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --extended-lambda -lineinfo
            -Xcompiler=-Wall -Xcudafe=--diag_suppress=20012>)
# libtorch_cuda.so finds NCCL and others through its run path, which the linker does not follow.
target_link_options(weft_torch_cuda INTERFACE LINKER:--allow-shlib-undefined)
