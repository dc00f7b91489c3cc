# The target weft::torch_python, for Python modules that exchange torch's types: it uses the pybind11 that torch was
# compiled with, which is among torch's headers. Also sets WEFT_TORCH_CUDA_VERSION, the CUDA release of torch or "none".
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import runpy; print(runpy.run_path(r'${WEFT_TORCH_ROOT}/version.py')['cuda'] or 'none', end='')"
  OUTPUT_VARIABLE WEFT_TORCH_CUDA_VERSION COMMAND_ERROR_IS_FATAL ANY)
find_library(WEFT_TORCH_PYTHON_LIBRARY torch_python PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH REQUIRED)
add_library(weft_torch_python INTERFACE)
add_library(weft::torch_python ALIAS weft_torch_python)
target_link_libraries(weft_torch_python INTERFACE weft::torch "${WEFT_TORCH_PYTHON_LIBRARY}")
message(STATUS "weft: torch ${WEFT_TORCH_VERSION} (CUDA ${WEFT_TORCH_CUDA_VERSION}) "
               "at ${WEFT_TORCH_ROOT}")
