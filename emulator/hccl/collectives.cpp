#include "collectives.h"

#include <algorithm>

#include "reduction.h"

namespace rec_sdk::emulator::hccl {
namespace {

// Receive buffers for one message from each rank.
class Inbox {
 public:
  Inbox(uint32_t ranks, uint64_t bytes_each) : bytes_(bytes_each), storage_(ranks * bytes_each) {}

  std::vector<const char*> parts(uint32_t ranks) {
    std::vector<const char*> all;
    for (uint32_t r = 0; r < ranks; ++r) all.push_back(at(r));
    return all;
  }
  char* at(uint32_t rank) { return storage_.data() + rank * bytes_; }

 private:
  uint64_t bytes_;
  std::vector<char> storage_;
};

HcclDataType type_of(const Operation& operation) { return static_cast<HcclDataType>(operation.type); }

uint64_t bytes_of(const Operation& operation) {
  return operation.elements * element_bytes(type_of(operation));
}

void reduce_parts(Communicator& comm, const Operation& operation, Inbox& inbox, uint64_t bytes, char* out) {
  reduce(inbox.parts(comm.ranks()), out, bytes / element_bytes(type_of(operation)), type_of(operation),
         static_cast<HcclReduceOp>(operation.reduction));
}

}  // namespace

Parts Parts::even(uint32_t ranks, uint64_t bytes_each) {
  Parts parts;
  for (uint32_t r = 0; r < ranks; ++r) {
    parts.offsets.push_back(r * bytes_each);
    parts.bytes.push_back(bytes_each);
  }
  return parts;
}

uint64_t Parts::extent() const {
  uint64_t end = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i]) end = std::max(end, offsets[i] + bytes[i]);
  }
  return end;
}

void all_to_all(Communicator& comm, const Operation& operation, const char* in, const Parts& in_parts,
                char* out, const Parts& out_parts) {
  std::vector<Outgoing> sends;
  std::vector<Incoming> receives;
  for (uint32_t r = 0; r < comm.ranks(); ++r) {
    sends.push_back({r, in + in_parts.offsets[r], in_parts.bytes[r]});
    receives.push_back({r, out + out_parts.offsets[r], out_parts.bytes[r]});
  }
  comm.exchange(operation, std::move(sends), std::move(receives));
}

void reduce_scatter(Communicator& comm, const Operation& operation, const char* in, const Parts& parts,
                    char* out) {
  const uint64_t mine = parts.bytes[comm.rank()];
  Inbox inbox(comm.ranks(), mine);
  all_to_all(comm, operation, in, parts, inbox.at(0), Parts::even(comm.ranks(), mine));
  reduce_parts(comm, operation, inbox, mine, out);
}

void all_gather(Communicator& comm, const Operation& operation, const char* in, char* out,
                const Parts& parts) {
  const uint64_t mine = parts.bytes[comm.rank()];
  const Parts whole{std::vector<uint64_t>(comm.ranks(), 0), std::vector<uint64_t>(comm.ranks(), mine)};
  all_to_all(comm, operation, in, whole, out, parts);
}

// Each rank reduces one slice, and then all ranks gather the slices.
void all_reduce(Communicator& comm, const Operation& operation, const char* in, char* out) {
  const uint64_t size = element_bytes(type_of(operation)), ranks = comm.ranks();
  Parts slices;
  for (uint64_t r = 0; r < ranks; ++r) {
    const uint64_t begin = operation.elements * r / ranks, end = operation.elements * (r + 1) / ranks;
    slices.offsets.push_back(begin * size);
    slices.bytes.push_back((end - begin) * size);
  }
  std::vector<char> sum(slices.bytes[comm.rank()]);
  reduce_scatter(comm, operation, in, slices, sum.data());
  all_gather(comm, operation, sum.data(), out, slices);
}

void reduce(Communicator& comm, const Operation& operation, const char* in, char* out) {
  const auto root = static_cast<uint32_t>(operation.root);
  const uint64_t bytes = bytes_of(operation);
  const bool at_root = comm.rank() == root;
  std::vector<Incoming> receives;
  Inbox inbox(at_root ? comm.ranks() : 0, bytes);
  for (uint32_t r = 0; at_root && r < comm.ranks(); ++r) receives.push_back({r, inbox.at(r), bytes});
  comm.exchange(operation, {{root, in, bytes}}, std::move(receives));
  if (at_root) reduce_parts(comm, operation, inbox, bytes, out);
}

void broadcast(Communicator& comm, const Operation& operation, char* buffer, uint64_t bytes) {
  const auto root = static_cast<uint32_t>(operation.root);
  if (comm.rank() != root) {
    comm.exchange(operation, {}, {{root, buffer, bytes}});
    return;
  }
  std::vector<Outgoing> sends;
  for (uint32_t r = 0; r < comm.ranks(); ++r) {
    if (r != root) sends.push_back({r, buffer, bytes});
  }
  comm.exchange(operation, std::move(sends), {});
}

void scatter(Communicator& comm, const Operation& operation, const char* in, char* out, uint64_t bytes) {
  const auto root = static_cast<uint32_t>(operation.root);
  std::vector<Outgoing> sends;
  for (uint32_t r = 0; comm.rank() == root && r < comm.ranks(); ++r)
    sends.push_back({r, in + r * bytes, bytes});
  comm.exchange(operation, std::move(sends), {{root, out, bytes}});
}

void barrier(Communicator& comm, const Operation& operation) {
  const Parts nothing = Parts::even(comm.ranks(), 0);
  all_to_all(comm, operation, nullptr, nothing, nullptr, nothing);
}

}  // namespace rec_sdk::emulator::hccl
