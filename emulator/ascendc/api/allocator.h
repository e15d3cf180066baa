// Local memory for kernels without pipes and queues: LocalMemAllocator places tensors one after another, and
// the kernel itself sets the flags that order accesses.
#pragma once

#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/engine/queue.h"

namespace AscendC {

template <Hardware hard = Hardware::UB>
class LocalMemAllocator {
 public:
  static_assert(hard == Hardware::UB, "LocalMemAllocator: a vector core has Hardware::UB");

  uint32_t GetCurAddr() const { return head_; }

  template <TPosition pos, class DataType, uint32_t tileSize>
  LocalTensor<DataType> Alloc() {
    return Alloc<pos, DataType>(tileSize);
  }
  template <TPosition pos, class DataType>
  LocalTensor<DataType> Alloc(uint32_t tileSize) {
    return LocalTensor<DataType>(rec_sdk::emulator::allocate_static(
        head_, uint64_t{tileSize} * sizeof(DataType), static_cast<uint8_t>(pos)));
  }
  template <class DataType, uint32_t tileSize>
  LocalTensor<DataType> Alloc() {
    return Alloc<TPosition::VECCALC, DataType>(tileSize);
  }
  template <class DataType>
  LocalTensor<DataType> Alloc(uint32_t tileSize) {
    return Alloc<TPosition::VECCALC, DataType>(tileSize);
  }

 private:
  uint32_t head_ = 0;
};

// Sets the registers of the core to the values that a kernel without a TPipe expects.
inline void InitSocState() { rec_sdk::emulator::set_atomic_none(); }

}  // namespace AscendC
