// The functions that the API in api/ calls: the instructions of a core without their types.
#pragma once

#include <cstdint>

#include "emulator/ascendc/engine/buffers.h"
#include "emulator/ascendc/engine/names.h"

namespace rec_sdk::emulator {

// A tensor in global memory; bytes from the address on, or UINT64_MAX if unknown.
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

// Instructions of the scalar unit.
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

// A variable whose address identifies the type T.
template <class T>
inline constexpr char kTypeTag = 0;

// Blocks of block_bytes each. Strides are from the end of a block to the start of the next one: in bytes in
// global memory, in blocks of 32 bytes in local memory.
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
// The padding extends a block's local bytes to a multiple of 32.
struct Padding {
  bool given;            // whether `value` holds an element; otherwise requested padding is undefined
  uint32_t left, right;  // number of elements
  uint64_t value;
};
void copy_in(const Copy& copy, const Padding& padding);
void copy_out(const Copy& copy);

// Computes dst[i] = function(a[i], b[i], scalar), i < count; operands that an instruction lacks are null.
using ElementFunction = void (*)(void* dst, const void* a, const void* b, const void* scalar, int64_t count);
// Saturates infinite and NaN results while the core's mode requires it.
using SaturateFunction = void (*)(void* values, int64_t count);
constexpr int64_t kByMask = INT64_MIN;  // as a count: use the mask
// The strides of an operand, in blocks of 32 bytes: between consecutive blocks, and between the first blocks
// of consecutive repeats of eight blocks.
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
  SaturateFunction saturate = nullptr;   // null: no saturation
  ElementFunction saturating = nullptr;  // used instead of `function` while the core's integers saturate
  const UbTensor* a = nullptr;
  const UbTensor* b = nullptr;
  uint32_t src_bytes = 0;
  const void* scalar = nullptr;
  bool reads_dst = false;
  uint8_t repeats = 1;  // as passed in the call; the mask decides how many are executed
  Strides dst_strides = {}, a_strides = {}, b_strides = {};
};
void run_vector(const VectorCall& call);

// Computes dst[0] = function(src[i], i < count).
void reduce(const UbTensor& dst, const UbTensor& src, const UbTensor& scratch, int64_t count,
            uint32_t element_bytes, ElementFunction function, SaturateFunction saturate);

// Computes dst[i] = the element of src at base + offsets[i] bytes.
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
