# weft_add_layer(NAME [SHARED] SOURCES ... [LIBRARIES ...] [PRIVATE_LIBRARIES ...])
#
# One target per layer: `weft_NAME` with the alias `weft::NAME` and one public include folder,
# `<folder of the layer>/include`, so that a layer can include only the headers of the targets that it links.
function(weft_add_layer NAME)
  cmake_parse_arguments(LAYER "SHARED" "INCLUDE_DIR" "SOURCES;LIBRARIES;PRIVATE_LIBRARIES" ${ARGN})
  if(LAYER_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_add_layer(${NAME}): unknown arguments ${LAYER_UNPARSED_ARGUMENTS}")
  endif()
  if(LAYER_SHARED)
    set(kind SHARED)
  else()
    set(kind STATIC)
  endif()
  if(NOT LAYER_INCLUDE_DIR)
    set(LAYER_INCLUDE_DIR "${CMAKE_CURRENT_SOURCE_DIR}/include")
  endif()
  add_library(weft_${NAME} ${kind} ${LAYER_SOURCES})
  add_library(weft::${NAME} ALIAS weft_${NAME})
  target_include_directories(weft_${NAME} PUBLIC "${LAYER_INCLUDE_DIR}")
  target_link_libraries(
    weft_${NAME}
    PUBLIC ${LAYER_LIBRARIES}
    PRIVATE weft_warnings ${LAYER_PRIVATE_LIBRARIES})
endfunction()
