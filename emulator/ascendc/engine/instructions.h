// The instructions of a core, without element types: the functions that api/ calls.
#pragma once

#include <cstdint>

#include "emulator/ascendc/engine/buffers.h"
#include "emulator/ascendc/engine/names.h"

namespace rec_sdk::emulator {

// A tensor in global memory. `bytes` is its size, or UINT64_MAX if that is unknown.
struct GmTensor {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// Returns the part of the tensor from element `offset` on.
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

// The instructions of the scalar unit.
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

// A variable whose address identifies an element type T.
template <class T>
inline constexpr char kTypeTag = 0;

// A copy of `blocks` blocks of block_bytes bytes. A stride is the distance from the end of a block to the
// start of the next one: in bytes in global memory, in blocks of 32 bytes in local memory.
struct Copy {
  const char* name;
  const char* type;  // kTypeTag of the element type
  UbTensor local;
  GmTensor global;
  uint32_t element_bytes;
  int64_t blocks;
  int64_t block_bytes;
  int64_t global_stride;
  int64_t local_stride;
};
// The padding of a block in local memory, which extends it to a multiple of 32 bytes.
struct Padding {
  bool given;            // whether `value` is the padding element; otherwise requested padding is undefined
  uint32_t left, right;  // number of elements
  uint64_t value;
};
void copy_in(const Copy& copy, const Padding& padding);
void copy_out(const Copy& copy);

// A function that computes dst[i] from a[i], b[i] and scalar, for i < count. Operands that an instruction
// does not have are null.
using ElementFunction = void (*)(void* dst, const void* a, const void* b, const void* scalar, int64_t count);
// A function that saturates infinite and NaN results in place.
using SaturateFunction = void (*)(void* values, int64_t count);
constexpr int64_t kByMask = INT64_MIN;  // a count that means the mask
// The strides of an operand, in blocks of 32 bytes. `block` is the distance between consecutive blocks, and
// `repeat` between the first blocks of consecutive repeats, which have eight blocks each.
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
  uint32_t dst_bytes;                    // bytes of an element
  SaturateFunction saturate = nullptr;   // null for no saturation
  ElementFunction saturating = nullptr;  // replaces `function` while the core's integers saturate
  const UbTensor* a = nullptr;
  const UbTensor* b = nullptr;
  uint32_t src_bytes = 0;
  const void* scalar = nullptr;
  bool reads_dst = false;
  uint8_t repeats = 1;  // the argument of the call; the mask determines how many repeats are executed
  Strides dst_strides = {}, a_strides = {}, b_strides = {};
};
void run_vector(const VectorCall& call);

// Reduces the first `count` elements of src to dst[0].
void reduce(const UbTensor& dst, const UbTensor& src, const UbTensor& scratch, int64_t count,
            uint32_t element_bytes, ElementFunction function, SaturateFunction saturate);

// Sets dst[i] to the element of src at offset base + offsets[i], in bytes.
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
