// Checks of the emulator: `twin` runs a kernel that breaks a rule, then its repaired form; `passes` runs a
// kernel that breaks no rule.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "emulator/ascendc/launch.h"
#include "kernel_operator.h"
#include "tests/engine/check.h"

using namespace AscendC;
using rec_sdk::emulator::Access;
using rec_sdk::emulator::Buffer;

using Ub = LocalMemAllocator<>;
using Words = std::vector<std::string>;

// The buffers of a launch, and the number of its blocks, one per core.
struct Launch {
  Launch(std::initializer_list<Buffer> buffers_) : buffers(buffers_) {}
  Launch(std::vector<Buffer> buffers_ = {}, int64_t blocks_ = 1)
      : buffers(std::move(buffers_)), blocks(blocks_) {}

  std::vector<Buffer> buffers;
  int64_t blocks = 1;
};

// Runs a launch and returns the error that ended it; "" if there was none.
inline std::string run(const std::function<void()>& kernel, const Launch& launch = {}) {
  try {
    rec_sdk::emulator::run_kernel("kernel", launch.blocks, launch.buffers, kernel);
  } catch (const rec_sdk::emulator::KernelError& error) {
    return error.what();
  }
  return "";
}

// Checks that every word occurs in the error; without words there must be no error.
inline void check_error(const std::string& error, const Words& words, const char* file = __builtin_FILE(),
                        int line = __builtin_LINE()) {
  bool good = error.empty() == words.empty();
  for (const std::string& word : words) good = good && error.find(word) != std::string::npos;
  if (good) return;
  ++check_failures;
  std::fprintf(stderr, "%s:%d: the error is \"%s\"\n", file, line, error.c_str());
  for (const std::string& word : words) std::fprintf(stderr, "  expected in it: \"%s\"\n", word.c_str());
}

// Calls the kernel with a new object of its last parameter's type, such as Ub or TPipe.
template <class Kernel, class Setup>
void call(const Kernel& kernel, void (Kernel::*)(Setup&) const) {
  Setup setup;
  kernel(setup);
}
template <class Kernel>
void call(const Kernel& kernel, void (Kernel::*)() const) {
  kernel();
}
template <class Kernel, class Setup>
void call(const Kernel& kernel, void (Kernel::*)(bool, Setup&) const, bool repaired) {
  Setup setup;
  kernel(repaired, setup);
}
template <class Kernel>
void call(const Kernel& kernel, void (Kernel::*)(bool) const, bool repaired) {
  kernel(repaired);
}

template <class Kernel>
void passes(const Launch& launch, const Kernel& kernel, const char* file = __builtin_FILE(),
            int line = __builtin_LINE()) {
  check_error(run([&] { call(kernel, &Kernel::operator()); }, launch), {}, file, line);
}
template <class Kernel>
void passes(const Kernel& kernel, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  passes({}, kernel, file, line);
}

// Checks that kernel(false) breaks a rule and `words` are in the error, and that kernel(true), its repaired
// form, passes.
template <class Kernel>
void twin(const Words& words, const Launch& launch, const Kernel& kernel, const char* file = __builtin_FILE(),
          int line = __builtin_LINE()) {
  check_error(run([&] { call(kernel, &Kernel::operator(), false); }, launch), words, file, line);
  check_error(run([&] { call(kernel, &Kernel::operator(), true); }, launch), {}, file, line);
}
template <class Kernel>
void twin(const Words& words, const Kernel& kernel, const char* file = __builtin_FILE(),
          int line = __builtin_LINE()) {
  twin(words, {}, kernel, file, line);
}

// A kernel made of steps. It breaks a rule if the steps in `missing` are left out.
template <class Setup>
struct Steps {
  using Step = void (*)(Setup&);
  std::vector<Step> before, missing, behind;
  Words words;  // in the error without the missing steps

  void check(const std::vector<Buffer>& buffers = {}) const {
    twin(words, buffers, [&](bool repaired, Setup& setup) {
      for (const Step step : before) step(setup);
      if (repaired) {
        for (const Step step : missing) step(setup);
      }
      for (const Step step : behind) step(setup);
    });
  }
};

// A named array in global memory.
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

// Functions that copy one block without padding.
template <class T>
void copy_in(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
  DataCopyPad(dst, src, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0},
              DataCopyPadExtParams<T>{false, 0, 0, T(0)});
}

template <class T>
void copy_out(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
  DataCopyPad(dst, src, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0});
}

// Runs `work` with a mask that lets its instructions process `count` elements.
template <class Work>
void masked(int32_t count, const Work& work) {
  SetMaskCount();
  SetVectorMask<float, MaskMode::COUNTER>(count);
  work();
  SetMaskNorm();
  ResetMask();
}

// Makes the second engine wait until the first has finished its instructions.
template <HardEvent event>
void order() {
  SetFlag<event>(EVENT_ID0);
  WaitFlag<event>(EVENT_ID0);
}
