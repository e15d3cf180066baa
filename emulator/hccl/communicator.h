// The communicator of one rank in a group of ranks. It moves bytes between ranks, and reports errors instead
// of hanging.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"

namespace rec_sdk::emulator::hccl {

// The present operation of a rank. Ranks that exchange bytes compare their operations, which must be the
// same.
struct Operation {
  const char* name;       // "all_reduce"
  uint64_t number = 0;    // sequence number among this communicator's collectives; 0 for send and recv
  uint64_t elements = 0;  // set if it must be the same on all ranks
  int32_t type = 0;       // an HcclDataType
  int32_t reduction = -1;
  int32_t root = -1;  // not compared; with different roots, ranks wait for messages that no rank sends
};

struct Outgoing {
  uint32_t to;
  const char* bytes;
  uint64_t count;
};

struct Incoming {
  uint32_t from;
  char* bytes;
  uint64_t count;
};

class Communicator {
 public:
  Communicator(const std::string& segment, std::string name, uint32_t ranks, uint32_t rank,
               int64_t connect_seconds, int64_t wait_seconds)
      : name_(std::move(name)),
        ranks_(ranks),
        rank_(rank),
        wait_seconds_(wait_seconds),
        segment_(segment, ranks, rank, connect_seconds) {}

  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  const std::string& name() const { return name_; }

  // Returns the number of the next collective, in the order in which the program calls them.
  uint64_t next_number() { return ++calls_; }

  // Makes an exchange that is waiting fail.
  void abort() { aborted_ = true; }

  // Sends messages to any ranks and receives messages from any ranks at the same time; this rank may be among
  // them. Messages between two ranks stay in order. Throws std::runtime_error if another rank has a different
  // operation or size, has ended, or moves no bytes until the timeout. Ranks that wait for this rank then
  // also throw.
  void exchange(const Operation& operation, std::vector<Outgoing> out, std::vector<Incoming> in);

 private:
  struct Sending;
  struct Receiving;
  class ProgressWait;

  void exchange_all(std::vector<Sending>& out, std::vector<Receiving>& in);
  std::string where(const Operation& operation) const;

  const std::string name_;
  const uint32_t ranks_, rank_;
  const int64_t wait_seconds_;  // 0 means no limit
  Segment segment_;
  std::mutex busy_;  // held during an exchange, because several streams may share the communicator
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> aborted_{false};
};

}  // namespace rec_sdk::emulator::hccl
