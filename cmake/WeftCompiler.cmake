# Language level, build type, compiler cache and warnings; independent of torch and CUDA.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

option(WEFT_WERROR "Treat warnings in weft's own sources as errors" OFF)
set(WEFT_SANITIZE "" CACHE STRING "Sanitizers for weft's own targets, e.g. address,undefined")

find_program(WEFT_CCACHE ccache)
if(WEFT_CCACHE)
  # ccache caches precompiled headers only with these two relaxations.
  set(WEFT_CCACHE_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${WEFT_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${WEFT_CCACHE_LAUNCHER}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${WEFT_CCACHE_LAUNCHER}")
endif()

# -Wno-restrict: GCC 12 has false positives for std::string concatenation (GCC bug 105329).
add_library(weft_warnings INTERFACE)
target_compile_options(
  weft_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow
            $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
            $<$<BOOL:${WEFT_CCACHE}>:-fpch-preprocess> $<$<BOOL:${WEFT_WERROR}>:-Werror>>)
if(WEFT_SANITIZE)
  target_compile_options(
    weft_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${WEFT_SANITIZE}
                            -fno-omit-frame-pointer -fno-sanitize-recover=undefined>)
  target_link_options(weft_warnings INTERFACE -fsanitize=${WEFT_SANITIZE})
endif()
