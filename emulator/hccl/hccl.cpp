// The part of HCCL's C interface that torch_npu's ProcessGroupHCCL uses. All work runs on the stream of the
// caller.
#pragma GCC visibility push(default)  // only the declarations of this header are exported
#include <hccl/hccl.h>
#pragma GCC visibility pop

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "../acl/emulator.h"
#include "collectives.h"
#include "reduction.h"

using namespace rec_sdk::emulator;        // NOLINT: the whole file implements it
using namespace rec_sdk::emulator::hccl;  // NOLINT

namespace {

// Environment variables of CANN. As in CANN, 0 in HCCL_EXEC_TIMEOUT means no limit.
constexpr char kConnectTimeout[] = "HCCL_CONNECT_TIMEOUT";
constexpr char kWaitTimeout[] = "HCCL_EXEC_TIMEOUT";
constexpr int64_t kConnectSeconds = 120, kWaitSeconds = 300;

constexpr bool kWaitsForOthers = true;  // an argument: the work may wait for other ranks

// The object behind an HcclComm. It is shared with work on streams, which may outlive the handle.
struct Handle {
  std::shared_ptr<Communicator> communicator;
};

const std::shared_ptr<Communicator>& communicator_of(HcclComm comm) {
  return static_cast<Handle*>(comm)->communicator;
}

int64_t seconds(const char* variable, int64_t unset) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return unset;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (*end == '\0' && value >= 0) return value;
  throw std::runtime_error(std::string(variable) + " is \"" + text + "\"; it must be a number of seconds");
}

template <class Work>
HcclResult guarded(const char* function, Work work) {
  try {
    work();
    return HCCL_SUCCESS;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "HCCL emulator: %s: %s\n", function, e.what());
    return HCCL_E_INTERNAL;
  }
}

HcclResult initialise(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config,
                      HcclComm* comm) {
  return guarded("HcclCommInitRootInfo", [&] {
    if (rank >= ranks) {
      throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    }
    const std::string segment = root->internal;
    const bool named = config != nullptr && config->hcclCommName[0] != '\0';
    auto communicator = std::make_shared<Communicator>(segment, named ? config->hcclCommName : segment, ranks,
                                                       rank, seconds(kConnectTimeout, kConnectSeconds),
                                                       seconds(kWaitTimeout, kWaitSeconds));
    *comm = new Handle{std::move(communicator)};
  });
}

// Returns the host address of the contents of a buffer in device memory.
char* host(const void* buffer, uint64_t bytes) {
  if (bytes == 0) return nullptr;
  void* address = rec_sdk_emulator_host_address(buffer, bytes);
  if (address == nullptr) {
    throw std::runtime_error("HCCL emulator: a buffer of " + std::to_string(bytes) +
                             " bytes is not inside one live allocation of device memory");
  }
  return static_cast<char*>(address);
}

// Puts work(communicator, operation) on the stream. The collective gets its number here, in the order of the
// program's calls.
template <class Work>
HcclResult collective(const char* name, HcclComm comm, aclrtStream stream, Operation operation, Work work) {
  const std::shared_ptr<Communicator> communicator = communicator_of(comm);
  operation.name = name;
  operation.number = communicator->next_number();
  on_stream(stream, name, [=] { work(*communicator, operation); }, kWaitsForOthers);
  return HCCL_SUCCESS;
}

Parts parts_of(uint32_t ranks, const void* counts, const void* offsets, uint64_t element) {
  Parts parts;
  for (uint32_t r = 0; r < ranks; ++r) {
    parts.bytes.push_back(static_cast<const uint64_t*>(counts)[r] * element);
    parts.offsets.push_back(static_cast<const uint64_t*>(offsets)[r] * element);
  }
  return parts;
}

HcclResult all_to_all_on_stream(const void* in, Parts in_parts, const void* out, Parts out_parts,
                                HcclDataType type, HcclComm comm, aclrtStream stream) {
  return collective("all_to_all", comm, stream, {.name = nullptr, .type = type},
                    [=](Communicator& c, const Operation& operation) {
                      all_to_all(c, operation, host(in, in_parts.extent()), in_parts,
                                 host(out, out_parts.extent()), out_parts);
                    });
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  return guarded("HcclGetRootInfo", [&] {
    std::memset(root, 0, sizeof *root);
    std::snprintf(root->internal, sizeof root->internal, "%s", new_segment_name().c_str());
  });
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return initialise(ranks, root, rank, nullptr, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return initialise(ranks, root, rank, config, comm);
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HcclResult HcclGetConfig(HcclConfig, HcclConfigValue* value) {
  value->value = 1;  // because results are always deterministic
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", communicator_of(comm)->name().c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
  *ranks = communicator_of(comm)->ranks();
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = communicator_of(comm)->rank();
  return HCCL_SUCCESS;
}

HcclResult HcclCommDestroy(HcclComm comm) {
  communicator_of(comm)->abort();
  delete static_cast<Handle*>(comm);
  return HCCL_SUCCESS;
}

// Always reports success, because the stream reports errors, with their message.
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
  return code == HCCL_SUCCESS ? "no error" : "the emulated HCCL failed; its message is on stderr";
}

HcclResult HcclAllReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op,
                         HcclComm comm, aclrtStream stream) {
  return collective("all_reduce", comm, stream,
                    {.name = nullptr, .elements = count, .type = type, .reduction = op},
                    [=](Communicator& c, const Operation& operation) {
                      const uint64_t bytes = count * element_bytes(type);
                      all_reduce(c, operation, host(in, bytes), host(out, bytes));
                    });
}

HcclResult HcclReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  return collective(
      "reduce", comm, stream,
      {.name = nullptr, .elements = count, .type = type, .reduction = op, .root = static_cast<int32_t>(root)},
      [=](Communicator& c, const Operation& operation) {
        const uint64_t bytes = count * element_bytes(type);
        char* result = c.rank() == root ? host(out, bytes) : nullptr;
        hccl::reduce(c, operation, host(in, bytes), result);
      });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  return collective("broadcast", comm, stream,
                    {.name = nullptr, .elements = count, .type = type, .root = static_cast<int32_t>(root)},
                    [=](Communicator& c, const Operation& operation) {
                      const uint64_t bytes = count * element_bytes(type);
                      broadcast(c, operation, host(buffer, bytes), bytes);
                    });
}

HcclResult HcclScatter(void* in, void* out, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
  return collective("scatter", comm, stream,
                    {.name = nullptr, .elements = count, .type = type, .root = static_cast<int32_t>(root)},
                    [=](Communicator& c, const Operation& operation) {
                      const uint64_t bytes = count * element_bytes(type);
                      const char* source = c.rank() == root ? host(in, bytes * c.ranks()) : nullptr;
                      scatter(c, operation, source, host(out, bytes), bytes);
                    });
}

HcclResult HcclAllGather(void* in, void* out, uint64_t count, HcclDataType type, HcclComm comm,
                         aclrtStream stream) {
  return collective("all_gather", comm, stream, {.name = nullptr, .elements = count, .type = type},
                    [=](Communicator& c, const Operation& operation) {
                      const uint64_t bytes = count * element_bytes(type);
                      all_gather(c, operation, host(in, bytes), host(out, bytes * c.ranks()),
                                 Parts::even(c.ranks(), bytes));
                    });
}

HcclResult HcclAllGatherV(void* in, uint64_t count, void* out, const void* counts, const void* offsets,
                          HcclDataType type, HcclComm comm, aclrtStream stream) {
  const Parts parts = parts_of(communicator_of(comm)->ranks(), counts, offsets, element_bytes(type));
  return collective("all_gather_v", comm, stream, {.name = nullptr, .type = type},
                    [=](Communicator& c, const Operation& operation) {
                      all_gather(c, operation, host(in, count * element_bytes(type)),
                                 host(out, parts.extent()), parts);
                    });
}

HcclResult HcclReduceScatter(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  return collective("reduce_scatter", comm, stream,
                    {.name = nullptr, .elements = count, .type = type, .reduction = op},
                    [=](Communicator& c, const Operation& operation) {
                      const uint64_t bytes = count * element_bytes(type);
                      reduce_scatter(c, operation, host(in, bytes * c.ranks()), Parts::even(c.ranks(), bytes),
                                     host(out, bytes));
                    });
}

HcclResult HcclReduceScatterV(void* in, const void* counts, const void* offsets, void* out, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  const Parts parts = parts_of(communicator_of(comm)->ranks(), counts, offsets, element_bytes(type));
  return collective("reduce_scatter_v", comm, stream, {.name = nullptr, .type = type, .reduction = op},
                    [=](Communicator& c, const Operation& operation) {
                      reduce_scatter(c, operation, host(in, parts.extent()), parts,
                                     host(out, count * element_bytes(type)));
                    });
}

HcclResult HcclAlltoAllV(const void* in, const void* in_counts, const void* in_offsets, HcclDataType in_type,
                         const void* out, const void* out_counts, const void* out_offsets,
                         HcclDataType out_type, HcclComm comm, aclrtStream stream) {
  const uint32_t ranks = communicator_of(comm)->ranks();
  return all_to_all_on_stream(in, parts_of(ranks, in_counts, in_offsets, element_bytes(in_type)), out,
                              parts_of(ranks, out_counts, out_offsets, element_bytes(out_type)), in_type,
                              comm, stream);
}

HcclResult HcclAlltoAll(const void* in, uint64_t in_count, HcclDataType in_type, const void* out,
                        uint64_t out_count, HcclDataType out_type, HcclComm comm, aclrtStream stream) {
  const uint32_t ranks = communicator_of(comm)->ranks();
  return all_to_all_on_stream(in, Parts::even(ranks, in_count * element_bytes(in_type)), out,
                              Parts::even(ranks, out_count * element_bytes(out_type)), in_type, comm, stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return collective("barrier", comm, stream, {.name = nullptr},
                    [](Communicator& c, const Operation& operation) { barrier(c, operation); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  const std::vector<HcclSendRecvItem> batch(items, items + count);
  const std::shared_ptr<Communicator> communicator = communicator_of(comm);
  on_stream(
      stream, "batch_send_recv",
      [=] {
        std::vector<Outgoing> sends;
        std::vector<Incoming> receives;
        for (const HcclSendRecvItem& item : batch) {
          const uint64_t bytes = item.count * element_bytes(item.dataType);
          char* buffer = host(item.buf, bytes);
          if (item.sendRecvType == HCCL_SEND) {
            sends.push_back({item.remoteRank, buffer, bytes});
          } else {
            receives.push_back({item.remoteRank, buffer, bytes});
          }
        }
        // A batch has the operation name of single calls, because the other rank may use single calls.
        communicator->exchange({.name = "send/recv"}, std::move(sends), std::move(receives));
      },
      kWaitsForOthers);
  return HCCL_SUCCESS;
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm,
                    aclrtStream stream) {
  HcclSendRecvItem item{HCCL_SEND, buffer, count, type, to};
  return HcclBatchSendRecv(&item, 1, comm, stream);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm,
                    aclrtStream stream) {
  HcclSendRecvItem item{HCCL_RECV, buffer, count, type, from};
  return HcclBatchSendRecv(&item, 1, comm, stream);
}

}  // extern "C"
