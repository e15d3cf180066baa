// The shared memory of one communicator: the ranks that joined it, and a ring of bytes from every rank to
// every rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace rec_sdk::emulator::hccl {

// A queue of bytes with one writer and one reader, in different processes. All zero is an empty ring.
class Ring {
 public:
  // Both return the number of bytes moved without waiting.
  uint64_t write(const char* bytes, uint64_t count, uint64_t capacity);
  uint64_t read(char* bytes, uint64_t count, uint64_t capacity);

 private:
  char* storage() { return reinterpret_cast<char*>(this + 1); }

  // Total bytes so far; in separate cache lines, so that the two sides do not share one.
  alignas(64) std::atomic<uint64_t> written_;
  alignas(64) std::atomic<uint64_t> taken_;
};

// Returns a name that no other segment of this machine has, and removes segments of crashed processes.
std::string new_segment_name();

class Segment {
 public:
  // Joins as `rank` of `ranks` and waits for the others; the first rank creates the memory. Throws
  // std::runtime_error after `timeout_seconds`, naming the ranks that did not join.
  Segment(std::string name, uint32_t ranks, uint32_t rank, int64_t timeout_seconds);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Ring& ring(uint32_t from, uint32_t to);
  uint64_t ring_capacity() const { return capacity_; }

  // Returns whether the process of the rank is alive. It may have sent all its bytes before it ended.
  bool is_alive(uint32_t rank) const;
  std::string describe(uint32_t rank) const;  // "rank 3 (process 4711)"

  // Returns the first error of any rank, so that the other ranks stop waiting; empty if there is none.
  std::string failure() const;
  void set_failure(const std::string& message);

 private:
  struct Header;

  void map();
  void join();
  void wait_for_all(int64_t timeout_seconds);
  std::string absent() const;

  std::string name_;
  uint32_t ranks_, rank_;
  uint64_t capacity_, bytes_;
  int file_ = -1;
  Header* header_ = nullptr;
};

}  // namespace rec_sdk::emulator::hccl
