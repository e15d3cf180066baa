// The collective operations, on host memory. Every rank must call the functions in the same order.
#pragma once

#include <hccl/hccl_types.h>

#include <cstdint>
#include <vector>

#include "communicator.h"

namespace rec_sdk::emulator::hccl {

// The position and size of each rank's part of a buffer, in bytes.
struct Parts {
  std::vector<uint64_t> offsets, bytes;

  static Parts even(uint32_t ranks, uint64_t bytes_each);
  uint64_t extent() const;  // number of bytes from the start of the buffer to the end of the last part
};

// In these functions, `operation` contains the name and the arguments that must be the same on all ranks.
// Reductions are computed in the order of ranks, so results are the same on every rank and in every run.
void all_reduce(Communicator& comm, const Operation& operation, const char* in, char* out);
void reduce(Communicator& comm, const Operation& operation, const char* in, char* out);
void reduce_scatter(Communicator& comm, const Operation& operation, const char* in, const Parts& parts,
                    char* out);
void all_gather(Communicator& comm, const Operation& operation, const char* in, char* out,
                const Parts& parts);
void broadcast(Communicator& comm, const Operation& operation, char* buffer, uint64_t bytes);
void scatter(Communicator& comm, const Operation& operation, const char* in, char* out, uint64_t bytes);
void all_to_all(Communicator& comm, const Operation& operation, const char* in, const Parts& in_parts,
                char* out, const Parts& out_parts);
void barrier(Communicator& comm, const Operation& operation);

}  // namespace rec_sdk::emulator::hccl
