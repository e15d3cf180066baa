// The API in api/ calls these: the instructions of a core without their types.
#pragma once

#include <cstdint>

#include "emulator/ascendc/engine/buffers.h"
#include "emulator/ascendc/engine/names.h"

namespace rec_sdk::emulator {

// A tensor in global memory; bytes from address on, or UINT64_MAX: not said.
struct GmTensor {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// From element `offset` on.
GmTensor part_of(const GmTensor& tensor, uint64_t offset, uint64_t element_bytes);
[[noreturn]] void refuse_offset(const UbTensor& tensor, uint64_t offset, uint64_t element_bytes);
inline UbTensor part_of(const UbTensor& tensor, uint64_t offset, uint64_t element_bytes) {
  const uint64_t bytes = offset * element_bytes;
  if (bytes > tensor.bytes) {
    refuse_offset(tensor, offset, element_bytes);
  }
  UbTensor part = tensor;
  part.address += static_cast<uint32_t>(bytes);
  part.bytes -= static_cast<uint32_t>(bytes);
  return part;
}
UbTensor resized(const UbTensor& tensor, uint64_t bytes);

// The scalar unit.
void load_global(const GmTensor& tensor, uint64_t index, uint64_t element_bytes, void* value);
void store_global(const GmTensor& tensor, uint64_t index, uint64_t element_bytes, const void* value);
void load_local(const UbTensor& tensor, uint64_t index, uint64_t element_bytes, void* value);
void store_local(const UbTensor& tensor, uint64_t index, uint64_t element_bytes, const void* value);
void clean_cache_line(const GmTensor& tensor);
void clean_cache();

void set_flag(int event, int32_t id);
void wait_flag(int event, int32_t id);
void barrier(Engine engine);
void barrier_all();

// The same address for the same T, whose only use that is.
template <class T>
inline constexpr char kTypeTag = 0;

// Blocks of block_bytes each. Strides are from the end of a block to the start of the next: in bytes in
// global memory, in blocks of 32 bytes in local memory.
struct Copy {
  const char* name;
  const char* type;  // kTypeTag of the elements
  UbTensor local;
  GmTensor global;
  uint32_t element_bytes;
  int64_t blocks;
  int64_t block_bytes;
  int64_t global_stride;
  int64_t local_stride;
};
// The padding fills a block's local bytes up to a multiple of 32.
struct Padding {
  bool given;            // value holds an element; otherwise padding that was asked for is undefined
  uint32_t left, right;  // elements
  uint64_t value;
};
void copy_in(const Copy& copy, const Padding& padding);
void copy_out(const Copy& copy);

// dst[i] = function(a[i], b[i], scalar), i < count; what an instruction lacks is null.
using ElementFunction = void (*)(void* dst, const void* a, const void* b, const void* scalar, int64_t count);
// Changes results that are infinite or not a number while the core saturates.
using SaturateFunction = void (*)(void* values, int64_t count);
constexpr int64_t kByMask = INT64_MIN;  // as a count: that of the mask
// The strides of an operand, in blocks of 32 bytes: from one block to the next, and from the first one of a
// repeat, which has eight, to that of the next repeat.
struct Strides {
  uint16_t block = 1;
  uint8_t repeat = 8;

  bool side_by_side() const { return block == 1 && repeat == 8; }
};
struct VectorCall {
  const char* name;
  ElementFunction function;
  int64_t count;
  const UbTensor* dst;
  uint32_t dst_bytes;                    // of an element
  SaturateFunction saturate = nullptr;   // null: nothing
  ElementFunction saturating = nullptr;  // instead of `function` while the core's integers saturate
  const UbTensor* a = nullptr;
  const UbTensor* b = nullptr;
  uint32_t src_bytes = 0;
  const void* scalar = nullptr;
  bool reads_dst = false;
  uint8_t repeats = 1;  // what the call says; the mask decides
  Strides dst_strides = {}, a_strides = {}, b_strides = {};
};
void run_vector(const VectorCall& call);

// dst[0] = function(src[i], i < count).
void reduce(const UbTensor& dst, const UbTensor& src, const UbTensor& scratch, int64_t count,
            uint32_t element_bytes, ElementFunction function, SaturateFunction saturate);

// dst[i] = the element at base + offsets[i] bytes of src.
void gather(const UbTensor& dst, const UbTensor& src, const UbTensor& offsets, uint32_t base, int64_t count,
            uint32_t element_bytes);

int64_t block_index();
int64_t block_count();
void sync_all(const char* name);
void sync_all_soft(const GmTensor& workspace, const UbTensor& scratch, int32_t used_cores);

using CombineFunction = void (*)(void* gm, const void* ub, uint64_t bytes);
void set_atomic(const char* name, const char* type, CombineFunction combine);
void set_atomic_none();

void set_control(uint64_t value);
uint64_t control();

void set_mask_mode(bool counter);
void set_mask(int64_t count);
void reset_mask();

}  // namespace rec_sdk::emulator
