# The target weft::torch: torch of the building interpreter, headers as SYSTEM, linked to torch_cpu and
# c10 only. find_package(Torch) is not used: for a CUDA wheel it needs a CUDA toolkit and fails without one.
execute_process(
  COMMAND
    "${Python_EXECUTABLE}" -c
    "import importlib.util, pathlib, runpy
spec = importlib.util.find_spec('torch')
assert spec and spec.origin, 'torch is not installed'
root = pathlib.Path(spec.origin).parent
version = runpy.run_path(str(root / 'version.py'))
print(root, version['__version__'].split('+')[0], version['cuda'] or 'none', sep=';', end='')"
  OUTPUT_VARIABLE torch_facts
  RESULT_VARIABLE torch_status
  ERROR_VARIABLE torch_error)
if(NOT torch_status EQUAL 0)
  message(
    FATAL_ERROR
      "weft builds against the torch of ${Python_EXECUTABLE}, which has none: "
      "run `pip install torch` there first, then configure again.\n${torch_error}")
endif()
list(GET torch_facts 0 WEFT_TORCH_ROOT)
list(GET torch_facts 1 WEFT_TORCH_VERSION)
list(GET torch_facts 2 WEFT_TORCH_CUDA_VERSION)
if(WEFT_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "weft needs torch 2.11 or newer and got ${WEFT_TORCH_VERSION}: run "
                      "`pip install 'torch>=2.11'`, then configure again.")
endif()
if(NOT EXISTS "${WEFT_TORCH_ROOT}/include/torch/csrc/distributed/c10d/ProcessGroup.hpp")
  message(FATAL_ERROR "The torch at ${WEFT_TORCH_ROOT} ships no c10d headers, which weft needs: "
                      "install a torch built with distributed support.")
endif()
message(STATUS "weft: torch ${WEFT_TORCH_VERSION} (CUDA ${WEFT_TORCH_CUDA_VERSION}) "
               "at ${WEFT_TORCH_ROOT}")

find_library(WEFT_TORCH_CPU_LIBRARY torch_cpu PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH REQUIRED)
find_library(WEFT_C10_LIBRARY c10 PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH REQUIRED)

add_library(weft_torch INTERFACE)
add_library(weft::torch ALIAS weft_torch)
target_include_directories(
  weft_torch SYSTEM INTERFACE "${WEFT_TORCH_ROOT}/include"
                              "${WEFT_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(weft_torch INTERFACE USE_DISTRIBUTED USE_C10D)
# at::parallel_for is a header template that runs in parallel only where OpenMP is switched on; the
# libgomp that torch has loaded serves both.
target_compile_options(weft_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_options(weft_torch INTERFACE $<$<LINK_LANGUAGE:CXX>:-fopenmp>)
target_link_libraries(weft_torch INTERFACE "${WEFT_TORCH_CPU_LIBRARY}" "${WEFT_C10_LIBRARY}")

# For Python modules that exchange torch's own types: with the pybind11 that torch was compiled with, which lies
# among its headers.
find_library(WEFT_TORCH_PYTHON_LIBRARY torch_python PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH REQUIRED)
add_library(weft_torch_python INTERFACE)
add_library(weft::torch_python ALIAS weft_torch_python)
target_link_libraries(weft_torch_python INTERFACE weft::torch "${WEFT_TORCH_PYTHON_LIBRARY}")
