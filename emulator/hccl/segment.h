// The shared memory of one communicator: the ranks that have joined it, and a ring buffer from each rank to
// each rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace rec_sdk::emulator::hccl {

// A ring buffer of bytes with one writer and one reader, in different processes. All zeros is an empty ring.
class Ring {
 public:
  // write() and read() do not wait; they return the number of bytes that they moved.
  uint64_t write(const char* bytes, uint64_t count, uint64_t capacity);
  uint64_t read(char* bytes, uint64_t count, uint64_t capacity);

 private:
  char* storage() { return reinterpret_cast<char*>(this + 1); }

  // The total numbers of bytes written and read so far. They are in different cache lines, because two
  // processes write them.
  alignas(64) std::atomic<uint64_t> written_;
  alignas(64) std::atomic<uint64_t> taken_;
};

// Returns a name that no other segment of this machine has. Also removes segments of crashed processes.
std::string new_segment_name();

class Segment {
 public:
  // Joins the segment as rank `rank` of `ranks` ranks and waits until all ranks have joined; the first rank
  // to join creates the memory. After `timeout_seconds`, throws std::runtime_error that names the missing
  // ranks.
  Segment(std::string name, uint32_t ranks, uint32_t rank, int64_t timeout_seconds);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Ring& ring(uint32_t from, uint32_t to);
  uint64_t ring_capacity() const { return capacity_; }

  // Returns whether the process of the rank is alive. If it is not, bytes that it sent may still be in its
  // rings.
  bool is_alive(uint32_t rank) const;
  std::string describe(uint32_t rank) const;  // "rank 3 (process 4711)"

  // Returns the first error that any rank has set, so that the other ranks stop waiting; an empty string if
  // there is none.
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
