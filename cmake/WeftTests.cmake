# weft_add_test(NAME SOURCES ... [LIBRARIES ...] [PRECOMPILED target]): a GoogleTest executable, registered with ctest.
# The test's files are compiled as one translation unit, because includes take most of the time; so they share an
# anonymous namespace. PRECOMPILED names a library whose precompiled header the test reuses.
find_package(GTest 1.12 QUIET)
if(NOT GTest_FOUND)
  set(googletest_url https://github.com/google/googletest/archive/refs/tags/v1.15.2.tar.gz)
  set(googletest_hash 7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926)
  set(googletest_archive "${PROJECT_BINARY_DIR}/googletest-1.15.2.tar.gz")
  # Not downloaded by FetchContent, whose error on an offline machine does not say what to do.
  set(googletest_found "")
  if(EXISTS "${googletest_archive}")
    file(SHA256 "${googletest_archive}" googletest_found)
  endif()
  if(NOT googletest_found STREQUAL googletest_hash AND NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
    file(DOWNLOAD "${googletest_url}" "${googletest_archive}" STATUS googletest_status INACTIVITY_TIMEOUT 30)
    list(GET googletest_status 1 googletest_problem)
    file(SHA256 "${googletest_archive}" googletest_found)
    if(NOT googletest_found STREQUAL googletest_hash)
      message(FATAL_ERROR "The C++ tests need GoogleTest 1.12 or newer, which is not installed, and the download of "
                          "${googletest_url} failed (${googletest_problem}): install GoogleTest (Debian: libgtest-dev), "
                          "or configure with -DWEFT_BUILD_TESTS=OFF.")
    endif()
  endif()
  include(FetchContent)
  set(INSTALL_GTEST OFF)
  FetchContent_Declare(
    googletest
    URL "${googletest_archive}"
    URL_HASH SHA256=${googletest_hash})
  FetchContent_MakeAvailable(googletest)
endif()
include(GoogleTest)

function(weft_add_test NAME)
  cmake_parse_arguments(TEST "" "PRECOMPILED" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${NAME} ${TEST_SOURCES})
  set_target_properties(${NAME} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  target_link_libraries(${NAME} PRIVATE weft_warnings ${TEST_LIBRARIES} GTest::gtest_main)
  # A test usually runs once per compilation, so compile time matters more than speed.
  target_compile_options(${NAME} PRIVATE $<$<CXX_COMPILER_ID:GNU,Clang>:-O1>)
  if(TEST_PRECOMPILED)
    # The same position-independence flags as the library, which a precompiled header requires.
    set_target_properties(${NAME} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${NAME} PRIVATE -fPIC)
    target_precompile_headers(${NAME} REUSE_FROM ${TEST_PRECOMPILED})
  endif()
  # Ranks are threads here and the machine may be small, so libtorch must not start further threads.
  add_test(NAME ${NAME} COMMAND ${NAME} --gtest_brief=1)
  set_tests_properties(${NAME} PROPERTIES ENVIRONMENT "OMP_NUM_THREADS=1" TIMEOUT 300)
endfunction()
