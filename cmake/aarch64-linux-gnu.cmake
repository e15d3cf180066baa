# Cross-compiles for 64-bit Arm with Debian's compiler and runs the tests under qemu's user mode:
# cmake -S tests/kernels -B build -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

set(REC_SDK_AARCH64_ROOT /usr/aarch64-linux-gnu)

find_program(REC_SDK_AARCH64_CXX aarch64-linux-gnu-g++)
find_program(REC_SDK_QEMU_AARCH64 NAMES qemu-aarch64 qemu-aarch64-static)
if(NOT REC_SDK_AARCH64_CXX OR NOT REC_SDK_QEMU_AARCH64)
  message(FATAL_ERROR "the aarch64 build needs a cross compiler and an emulator: "
                      "apt-get install g++-aarch64-linux-gnu qemu-user")
endif()

set(CMAKE_CXX_COMPILER "${REC_SDK_AARCH64_CXX}")
set(CMAKE_CROSSCOMPILING_EMULATOR "${REC_SDK_QEMU_AARCH64};-L;${REC_SDK_AARCH64_ROOT}")

set(CMAKE_FIND_ROOT_PATH "${REC_SDK_AARCH64_ROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
