#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

namespace rec_sdk::emulator::hccl {
namespace {

constexpr char kPrefix[] = "rec_sdk_hccl_";
constexpr char kFolder[] = "/dev/shm";
constexpr uint64_t kAllRings = 16 << 20;  // small, because containers often have only 64 MiB of shared memory
constexpr uint64_t kLargestRing = 1 << 20, kSmallestRing = 16 << 10;
constexpr size_t kMessage = 1024;

uint64_t ring_capacity_for(uint32_t ranks) {
  const uint64_t even = kAllRings / (uint64_t{ranks} * ranks) / 4096 * 4096;
  return std::clamp(even, kSmallestRing, kLargestRing);
}

std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

// Removes segments of crashed processes. If a process crashes before all ranks have joined, the name of the
// segment remains. The second part of the name is the id of the process that created it.
void remove_leftovers() {
  DIR* folder = opendir(kFolder);
  if (folder == nullptr) {
    return;
  }
  while (const dirent* entry = readdir(folder)) {
    int pid = 0;
    if (std::sscanf(entry->d_name, "rec_sdk_hccl_%d_", &pid) == 1 && pid > 0 && kill(pid, 0) != 0 &&
        errno == ESRCH) {
      shm_unlink(entry->d_name);
    }
  }
  closedir(folder);
}

}  // namespace

uint64_t Ring::write(const char* bytes, uint64_t count, uint64_t capacity) {
  const uint64_t written = written_.load(std::memory_order_relaxed);
  count = std::min(count, capacity - (written - taken_.load(std::memory_order_acquire)));
  const uint64_t at = written % capacity, to_end = std::min(count, capacity - at);
  std::memcpy(storage() + at, bytes, to_end);
  std::memcpy(storage(), bytes + to_end, count - to_end);
  written_.store(written + count, std::memory_order_release);
  return count;
}

uint64_t Ring::read(char* bytes, uint64_t count, uint64_t capacity) {
  const uint64_t taken = taken_.load(std::memory_order_relaxed);
  count = std::min(count, written_.load(std::memory_order_acquire) - taken);
  const uint64_t at = taken % capacity, to_end = std::min(count, capacity - at);
  std::memcpy(bytes, storage() + at, to_end);
  std::memcpy(bytes + to_end, storage(), count - to_end);
  taken_.store(taken + count, std::memory_order_release);
  return count;
}

std::string new_segment_name() {
  remove_leftovers();
  return kPrefix + std::to_string(getpid()) + "_" + std::to_string(std::random_device{}()) +
         std::to_string(std::random_device{}());
}

// The header of the segment. Its initial state is all zeros, so that no rank has to initialize it.
struct Segment::Header {
  std::atomic<uint32_t> ranks;
  std::atomic<uint32_t> joined;
  std::atomic<uint32_t> failure;  // 0: none, 1: being written, 2: complete
  char message[kMessage];
  std::atomic<int32_t> processes[1];  // process id of each rank; 0 before it joins

  static uint64_t bytes(uint32_t ranks) {
    return (sizeof(Header) + ranks * sizeof(std::atomic<int32_t>) + 63) / 64 * 64;
  }
};

Segment::Segment(std::string name, uint32_t ranks, uint32_t rank, int64_t timeout_seconds)
    : name_(std::move(name)),
      ranks_(ranks),
      rank_(rank),
      capacity_(ring_capacity_for(ranks)),
      bytes_(Header::bytes(ranks) + uint64_t{ranks} * ranks * (sizeof(Ring) + capacity_)) {
  map();
  join();
  wait_for_all(timeout_seconds);
}

Segment::~Segment() {
  munmap(header_, bytes_);
  close(file_);
}

void Segment::map() {
  file_ = shm_open(name_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) {
    throw system_error("cannot create shared memory " + name_);
  }
  // The memory is allocated now, because otherwise a full /dev/shm would cause a SIGBUS later.
  if (const int error = posix_fallocate(file_, 0, static_cast<off_t>(bytes_))) {
    errno = error;
    shm_unlink(name_.c_str());
    close(file_);
    throw system_error("cannot get " + std::to_string(bytes_) + " bytes of shared memory in " + kFolder);
  }
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) {
    close(file_);
    throw system_error("cannot map shared memory " + name_);
  }
  header_ = static_cast<Header*>(memory);
}

void Segment::join() {
  uint32_t unset = 0;
  if (!header_->ranks.compare_exchange_strong(unset, ranks_) && unset != ranks_) {
    throw std::runtime_error("rank " + std::to_string(rank_) + " joins a group of " + std::to_string(ranks_) +
                             " ranks, others one of " + std::to_string(unset));
  }
  int32_t nobody = 0;
  if (!header_->processes[rank_].compare_exchange_strong(nobody, getpid())) {
    throw std::runtime_error("rank " + std::to_string(rank_) + " of the group is taken by process " +
                             std::to_string(nobody));
  }
  // Each rank locks one byte of the file, which shows that it is alive: the kernel releases the lock when the
  // process ends for any reason.
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank_;
  lock.l_len = 1;
  if (fcntl(file_, F_SETLK, &lock) != 0) {
    throw system_error("cannot lock shared memory " + name_);
  }
  header_->joined.fetch_add(1);
}

void Segment::wait_for_all(int64_t timeout_seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_seconds);
  while (header_->joined.load() < ranks_) {
    if (std::chrono::steady_clock::now() > end) {
      const std::string missing = absent();
      shm_unlink(name_.c_str());
      throw std::runtime_error("rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) +
                               " waited " + std::to_string(timeout_seconds) + " s for rank(s) " + missing +
                               " to join (HCCL_CONNECT_TIMEOUT)");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  // All ranks have mapped the segment now. Without its name, it is removed when the last process ends.
  shm_unlink(name_.c_str());
}

std::string Segment::absent() const {
  std::string missing;
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (header_->processes[i].load() == 0) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(i);
    }
  }
  return missing;
}

Ring& Segment::ring(uint32_t from, uint32_t to) {
  char* rings = reinterpret_cast<char*>(header_) + Header::bytes(ranks_);
  return *reinterpret_cast<Ring*>(rings + (uint64_t{from} * ranks_ + to) * (sizeof(Ring) + capacity_));
}

bool Segment::is_alive(uint32_t rank) const {
  if (header_->processes[rank].load() == getpid()) {
    return true;  // because a process does not see its own locks
  }
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::string Segment::describe(uint32_t rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(header_->processes[rank].load()) +
         ")";
}

std::string Segment::failure() const { return header_->failure.load() == 2 ? header_->message : ""; }

void Segment::set_failure(const std::string& message) {
  uint32_t none = 0;
  if (header_->failure.compare_exchange_strong(none, 1)) {
    std::snprintf(header_->message, kMessage, "%s", message.c_str());
    header_->failure.store(2);
  }
}

}  // namespace rec_sdk::emulator::hccl
