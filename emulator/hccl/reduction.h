#pragma once

#include <hccl/hccl_types.h>

#include <cstdint>
#include <vector>

namespace rec_sdk::emulator::hccl {

uint64_t element_bytes(HcclDataType type);  // throws std::runtime_error for an unknown type

// Computes out[i] = parts[0][i] op parts[1][i] op ..., in this order. 16-bit floats are reduced in float and
// rounded once at the end. `out` may be one of the parts. Throws std::runtime_error for a type that can only
// be moved.
void reduce(const std::vector<const char*>& parts, char* out, uint64_t count, HcclDataType type,
            HcclReduceOp op);

}  // namespace rec_sdk::emulator::hccl
