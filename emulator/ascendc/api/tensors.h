// Tensors in global and in local memory: addresses with bounds. A kernel never accesses their bytes directly.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/ascendc/api/language.h"
#include "emulator/ascendc/api/types.h"
#include "emulator/ascendc/engine/instructions.h"

namespace AscendC {

static_assert(static_cast<uint8_t>(TPosition::VECCALC) == rec_sdk::emulator::kVecCalc,
              "the engine knows it by its number");

enum class CacheMode {
  CACHE_MODE_DISABLE = 0,
  CACHE_MODE_NORMAL = 1,
  CACHE_MODE_LAST = 2,
  CACHE_MODE_PERSISTENT = 4
};
enum class CacheRwMode { READ = 1, WRITE = 2, RW = 3 };

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;

  void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
    memory_ = {reinterpret_cast<uint64_t>(buffer), bufferSize * sizeof(T)};
  }
  // Sets the address without a size: only the buffers of the launch bound the tensor.
  void SetGlobalBuffer(__gm__ T* buffer) { memory_ = {reinterpret_cast<uint64_t>(buffer), UINT64_MAX}; }

  const __gm__ T* GetPhyAddr() const { return reinterpret_cast<const T*>(memory_.address); }
  __gm__ T* GetPhyAddr(const uint64_t offset) const {
    return reinterpret_cast<T*>(memory_.address + offset * sizeof(T));
  }

  T GetValue(const uint64_t offset) const {
    T value;
    rec_sdk::emulator::load_global(memory_, offset, sizeof(T), &value);
    return value;
  }
  void SetValue(const uint64_t offset, T value) {
    rec_sdk::emulator::store_global(memory_, offset, sizeof(T), &value);
  }

  GlobalTensor operator[](const uint64_t offset) const {
    GlobalTensor part;
    part.memory_ = rec_sdk::emulator::part_of(memory_, offset, sizeof(T));
    return part;
  }
  // Returns the number of elements, or 0 after SetGlobalBuffer without a size.
  uint64_t GetSize() const { return memory_.bytes == UINT64_MAX ? 0 : memory_.bytes / sizeof(T); }

  template <CacheRwMode rwMode = CacheRwMode::RW>
  void SetL2CacheHint(CacheMode mode) {
    static_cast<void>(mode);
  }

  const rec_sdk::emulator::GmTensor& memory() const { return memory_; }

 private:
  rec_sdk::emulator::GmTensor memory_;
};

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  explicit LocalTensor(const rec_sdk::emulator::UbTensor& memory) : memory_(memory) {}

  T GetValue(const uint32_t index) const {
    T value;
    rec_sdk::emulator::load_local(memory_, index, sizeof(T), &value);
    return value;
  }
  template <typename S>
  void SetValue(const uint32_t index, const S value) const {
    const T converted = static_cast<T>(value);
    rec_sdk::emulator::store_local(memory_, index, sizeof(T), &converted);
  }

  LocalTensor operator[](const uint32_t offset) const {
    return LocalTensor(rec_sdk::emulator::part_of(memory_, offset, sizeof(T)));
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(memory_);
  }

  uint32_t GetSize() const { return memory_.bytes / static_cast<uint32_t>(sizeof(T)); }
  void SetSize(const uint32_t size) {
    memory_ = rec_sdk::emulator::resized(memory_, uint64_t{size} * sizeof(T));
  }
  uint64_t GetPhyAddr() const { return memory_.address; }
  uint64_t GetPhyAddr(const uint32_t offset) const { return memory_.address + offset * sizeof(T); }
  int32_t GetPosition() const { return memory_.position; }

  const rec_sdk::emulator::UbTensor& memory() const { return memory_; }

 private:
  rec_sdk::emulator::UbTensor memory_;
};

}  // namespace AscendC
