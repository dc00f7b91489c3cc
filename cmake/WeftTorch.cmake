# The target weft::torch: headers as SYSTEM, linked to torch_cpu and c10 only. find_package(Torch) is not used: for a
# CUDA wheel it needs a CUDA toolkit and fails without one.
#
# This file is also installed, for weftConfig.cmake. It uses the torch in WEFT_TORCH_DIR, the folder with torch's
# include/ and lib/; if that is empty, the torch of Python_EXECUTABLE, without importing it. Sets WEFT_TORCH_ROOT and
# WEFT_TORCH_VERSION, or sets WEFT_TORCH_PROBLEM to an error message.
set(WEFT_TORCH_DIR "" CACHE PATH "Folder of torch; empty: the torch of the Python interpreter")
set(WEFT_TORCH_PROBLEM "")
if(WEFT_TORCH_DIR)
  set(WEFT_TORCH_ROOT "${WEFT_TORCH_DIR}")
else()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util, pathlib
spec = importlib.util.find_spec('torch')
assert spec and spec.origin, 'torch is not installed'
print(pathlib.Path(spec.origin).parent, end='')"
    OUTPUT_VARIABLE WEFT_TORCH_ROOT
    RESULT_VARIABLE torch_status
    ERROR_VARIABLE torch_error)
  if(NOT torch_status EQUAL 0)
    set(WEFT_TORCH_PROBLEM
        "weft builds against the torch of '${Python_EXECUTABLE}', which has none: run `pip install torch` there first, or set WEFT_TORCH_DIR, then configure again.\n${torch_error}")
    return()
  endif()
endif()

# A wheel has the full version in version.py; libtorch without Python has only the header.
set(torch_version_header "${WEFT_TORCH_ROOT}/include/torch/headeronly/version.h")
set(torch_version_module "${WEFT_TORCH_ROOT}/version.py")
if(NOT EXISTS "${torch_version_header}")
  set(WEFT_TORCH_PROBLEM
      "weft needs torch 2.11 or newer and finds no include/torch/headeronly/version.h in ${WEFT_TORCH_ROOT}: run `pip install 'torch>=2.11'`, or set WEFT_TORCH_DIR to the folder with torch's include and lib.")
  return()
elseif(EXISTS "${torch_version_module}")
  file(STRINGS "${torch_version_module}" torch_line REGEX "^__version__ = ")
  string(REGEX REPLACE "^__version__ = '([^'+]+).*" "\\1" WEFT_TORCH_VERSION "${torch_line}")
else()
  set(torch_numbers "")
  foreach(part MAJOR MINOR PATCH)
    file(STRINGS "${torch_version_header}" torch_line REGEX "define TORCH_VERSION_${part} ")
    string(REGEX MATCH "[0-9]+" torch_number "${torch_line}")
    list(APPEND torch_numbers "${torch_number}")
  endforeach()
  list(JOIN torch_numbers "." WEFT_TORCH_VERSION)
endif()
if(WEFT_TORCH_VERSION VERSION_LESS 2.11)
  set(WEFT_TORCH_PROBLEM
      "weft needs torch 2.11 or newer and got ${WEFT_TORCH_VERSION}: run `pip install 'torch>=2.11'`, then configure again.")
  return()
endif()
if(NOT EXISTS "${WEFT_TORCH_ROOT}/include/torch/csrc/distributed/c10d/ProcessGroup.hpp")
  set(WEFT_TORCH_PROBLEM
      "The torch at ${WEFT_TORCH_ROOT} ships no c10d headers, which weft needs: install a torch built with distributed support.")
  return()
endif()

# Not cached: a cache entry might belong to another torch.
foreach(library torch_cpu c10)
  string(TOUPPER "WEFT_${library}_LIBRARY" variable)
  find_library(${variable} ${library} PATHS "${WEFT_TORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE)
  if(NOT ${variable})
    set(WEFT_TORCH_PROBLEM
        "The torch at ${WEFT_TORCH_ROOT} has no library ${library} in lib/, which weft links: install torch again, or set WEFT_TORCH_DIR to another.")
    return()
  endif()
endforeach()

if(TARGET weft::torch)
  return()
endif()
add_library(weft_torch INTERFACE)
add_library(weft::torch ALIAS weft_torch)
target_include_directories(
  weft_torch SYSTEM INTERFACE "${WEFT_TORCH_ROOT}/include"
                              "${WEFT_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(weft_torch INTERFACE USE_DISTRIBUTED USE_C10D)
# at::parallel_for is a header template that runs in parallel only if compiled with OpenMP. It uses the libgomp that
# torch has loaded.
target_compile_options(weft_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_options(weft_torch INTERFACE $<$<LINK_LANGUAGE:CXX>:-fopenmp>)
target_link_libraries(weft_torch INTERFACE "${WEFT_TORCH_CPU_LIBRARY}" "${WEFT_C10_LIBRARY}")
