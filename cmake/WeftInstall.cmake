# `cmake --install` installs two components: the operators' libraries; and for development, the headers that C++
# programs include and the package that find_package(weft) reads. A wheel has the same layout inside the Python package
# `weft`. There the libraries are built in place, so only the development component is installed.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(weft_libraries weft_ops)
if(WEFT_WITH_CUDA)
  list(APPEND weft_libraries weft_ops_cuda)
endif()
install(TARGETS ${weft_libraries} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT libraries)
install(
  DIRECTORY ops/include/weft ops/collectives/include/weft ops/memory/include/weft
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  COMPONENT development
  FILES_MATCHING
  PATTERN "*.h")

set(weft_package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/weft")
configure_package_config_file(
  cmake/weftConfig.cmake.in "${PROJECT_BINARY_DIR}/weftConfig.cmake"
  INSTALL_DESTINATION "${weft_package_folder}"
  PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/weftConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/weftConfig.cmake" "${PROJECT_BINARY_DIR}/weftConfigVersion.cmake"
              cmake/WeftTorch.cmake DESTINATION "${weft_package_folder}" COMPONENT development)
