// Kernels that break a rule, with their repaired twins: `twin` runs a kernel both ways.
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "emulator/ascendc/launch.h"
#include "kernel_operator.h"
#include "tests/engine/check.h"

using namespace AscendC;
using rec_sdk::emulator::Access;
using rec_sdk::emulator::Buffer;

// The error that ended the launch, or "".
inline std::string run(const std::function<void()>& kernel, const std::vector<Buffer>& buffers = {},
                       int64_t blocks = 1) {
  try {
    rec_sdk::emulator::run_kernel("kernel", blocks, buffers, kernel);
  } catch (const rec_sdk::emulator::KernelError& error) {
    return error.what();
  }
  return "";
}

inline void check_passes(const char* file, int line, const std::string& error) {
  if (!error.empty()) {
    ++check_failures;
    std::fprintf(stderr, "%s:%d: %s\n", file, line, error.c_str());
  }
}

// All words must occur in the error.
inline void check_error(const char* file, int line, const std::string& error,
                        const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (error.find(word) == std::string::npos) {
      ++check_failures;
      std::fprintf(stderr, "%s:%d: no \"%s\" in the error \"%s\"\n", file, line, word.c_str(), error.c_str());
    }
  }
}

#define CHECK_PASSES(error) check_passes(__FILE__, __LINE__, error)
#define CHECK_ERROR(error, ...) check_error(__FILE__, __LINE__, error, {__VA_ARGS__})

// kernel(false) breaks a rule, and the error must hold `words`; kernel(true) is the same, repaired.
#define CHECK_TWIN(kernel, buffers, blocks, ...)                                                       \
  do {                                                                                                 \
    const auto& twin_kernel = kernel;                                                                  \
    check_error(__FILE__, __LINE__, run([&] { twin_kernel(false); }, buffers, blocks), {__VA_ARGS__}); \
    check_passes(__FILE__, __LINE__, run([&] { twin_kernel(true); }, buffers, blocks));                \
  } while (false)

// Values in global memory, under a name.
template <class T>
struct Global {
  Global(const char* name, size_t count, Access access, T value = T(0))
      : name(name), access(access), values(count, value) {}

  Buffer buffer() { return {name, values.data(), values.size() * sizeof(T), access}; }
  GlobalTensor<T> tensor() {
    GlobalTensor<T> result;
    result.SetGlobalBuffer(values.data(), values.size());
    return result;
  }

  const char* name;
  Access access;
  std::vector<T> values;
};

// One unpadded block each.
template <class T>
void copy_in(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
  DataCopyPad(dst, src, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0},
              DataCopyPadExtParams<T>{false, 0, 0, T(0)});
}

template <class T>
void copy_out(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
  DataCopyPad(dst, src, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0});
}

// The second engine goes on when the first has done what it was told.
template <HardEvent event>
void order() {
  SetFlag<event>(EVENT_ID0);
  WaitFlag<event>(EVENT_ID0);
}
