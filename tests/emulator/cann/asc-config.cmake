# Stands in for CANN's own: the language ASC, whose compiler is bisheng.py. CANN too finds its modules by the environment.
list(APPEND CMAKE_MODULE_PATH "$ENV{ASCEND_HOME_PATH}/compiler/tikcpp/ascendc_kernel_cmake/asc_modules")
