set(CMAKE_ASC_COMPILER_ENV_VAR ASC)
find_program(CMAKE_ASC_COMPILER bisheng PATHS "$ENV{ASCEND_HOME_PATH}/bin" NO_DEFAULT_PATH REQUIRED)
configure_file("${CMAKE_CURRENT_LIST_DIR}/CMakeASCCompiler.cmake.in" "${CMAKE_PLATFORM_INFO_DIR}/CMakeASCCompiler.cmake"
               @ONLY)
