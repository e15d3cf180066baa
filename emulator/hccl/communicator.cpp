#include "communicator.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>

namespace rec_sdk::emulator::hccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kYields = 200;  // number of yields before sleeping
constexpr std::chrono::microseconds kNap{50};
constexpr std::chrono::milliseconds kLookAround{50};

// The label that precedes every message: the operation and size of its sender.
struct Label {
  char name[24];
  uint64_t number, elements, bytes;
  int32_t type, reduction;
};

Label label_of(const Operation& operation, uint64_t bytes) {
  Label label{};
  std::strncpy(label.name, operation.name, sizeof label.name - 1);
  label.number = operation.number;
  label.elements = operation.elements;
  label.bytes = bytes;
  label.type = operation.type;
  label.reduction = operation.reduction;
  return label;
}

// Returns how two labels differ, first the other rank's value, then this rank's; an empty string if they are
// equal.
std::string difference(const Label& theirs, const Label& mine) {
  if (std::strcmp(theirs.name, mine.name) != 0 || theirs.number != mine.number) {
    const auto call = [](const Label& label) {
      return label.number ? std::string(label.name) + " (collective " + std::to_string(label.number) + ")"
                          : std::string(label.name);
    };
    return "it is in " + call(theirs);
  }
  const auto differ = [](const char* what, int64_t its, int64_t own) {
    return std::string("its ") + what + " is " + std::to_string(its) + ", here it is " + std::to_string(own);
  };
  if (theirs.type != mine.type) return differ("data type", theirs.type, mine.type);
  if (theirs.reduction != mine.reduction) return differ("reduction", theirs.reduction, mine.reduction);
  if (theirs.elements != mine.elements) return differ("number of elements", theirs.elements, mine.elements);
  if (theirs.bytes != mine.bytes) {
    return "it sends " + std::to_string(theirs.bytes) + " bytes, here " + std::to_string(mine.bytes) +
           " are expected";
  }
  return "";
}

}  // namespace

// A message that is being written to a ring: a label and its bytes.
struct Communicator::Sending {
  uint32_t to;
  const char* bytes;
  Label label;
  uint64_t labelled = 0, sent = 0;

  Sending(const Operation& operation, const Outgoing& out)
      : to(out.to), bytes(out.bytes), label(label_of(operation, out.count)) {}

  bool done() const { return labelled == sizeof label && sent == label.bytes; }

  bool advance(Ring& ring, uint64_t capacity) {
    uint64_t moved = 0;
    if (labelled < sizeof label) {
      moved = ring.write(reinterpret_cast<const char*>(&label) + labelled, sizeof label - labelled, capacity);
      labelled += moved;
      if (labelled < sizeof label) return moved > 0;
    }
    const uint64_t body = ring.write(bytes + sent, label.bytes - sent, capacity);
    sent += body;
    return moved + body > 0;
  }
};

struct Communicator::Receiving {
  uint32_t from;
  char* bytes;
  Label expected, label{};
  uint64_t labelled = 0, received = 0;

  Receiving(const Operation& operation, const Incoming& in)
      : from(in.from), bytes(in.bytes), expected(label_of(operation, in.count)) {}

  bool done() const { return labelled == sizeof label && received == expected.bytes; }

  // Reads available bytes and returns whether any were read. Throws if the label of the other rank differs
  // from this rank's.
  bool advance(Ring& ring, uint64_t capacity) {
    uint64_t moved = 0;
    if (labelled < sizeof label) {
      moved = ring.read(reinterpret_cast<char*>(&label) + labelled, sizeof label - labelled, capacity);
      labelled += moved;
      if (labelled < sizeof label) return moved > 0;
      const std::string different = difference(label, expected);
      if (!different.empty()) throw std::runtime_error(different);
    }
    const uint64_t body = ring.read(bytes + received, expected.bytes - received, capacity);
    received += body;
    return moved + body > 0;
  }
};

// A wait while no byte can be moved. It first yields, then sleeps, and checks for reasons to fail.
class Communicator::ProgressWait {
 public:
  ProgressWait(Communicator& communicator, const std::vector<Sending>& out, const std::vector<Receiving>& in)
      : communicator_(communicator), out_(out), in_(in) {}

  void progress() {
    idle_ = 0;
    ended_.reset();
  }

  void step() {
    if (++idle_ == 1) since_ = looked_ = Clock::now();
    if (idle_ < kYields) {
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(kNap);
    const auto now = Clock::now();
    if (now - looked_ < kLookAround) return;
    looked_ = now;
    look_around(now);
  }

 private:
  void look_around(Clock::time_point now) {
    if (communicator_.aborted_) throw std::runtime_error("the communicator was destroyed or aborted");
    const std::string failure = communicator_.segment_.failure();
    if (!failure.empty()) throw std::runtime_error("gives up, since " + failure);
    // Bytes that a rank sent before it ended are received first. Its end is an error only if none are left.
    if (ended_) throw std::runtime_error(communicator_.segment_.describe(*ended_) + " has ended");
    ended_ = first_ended();
    if (communicator_.wait_seconds_ == 0) return;
    if (now - since_ > std::chrono::seconds(communicator_.wait_seconds_))
      throw std::runtime_error(timed_out());
  }

  std::vector<uint32_t> awaited() const {
    std::vector<uint32_t> ranks;
    for (const Receiving& message : in_) {
      if (!message.done()) ranks.push_back(message.from);
    }
    for (const Sending& message : out_) {
      if (!message.done()) ranks.push_back(message.to);
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  std::optional<uint32_t> first_ended() const {
    for (uint32_t rank : awaited()) {
      if (!communicator_.segment_.is_alive(rank)) return rank;
    }
    return std::nullopt;
  }

  std::string timed_out() const {
    std::string ranks;
    for (uint32_t rank : awaited()) {
      ranks += (ranks.empty() ? "" : ", ") + communicator_.segment_.describe(rank);
    }
    return "nothing moved for " + std::to_string(communicator_.wait_seconds_) + " s, waiting for " + ranks +
           " (HCCL_EXEC_TIMEOUT)";
  }

  Communicator& communicator_;
  const std::vector<Sending>& out_;
  const std::vector<Receiving>& in_;
  int idle_ = 0;
  Clock::time_point since_, looked_;
  std::optional<uint32_t> ended_;
};

std::string Communicator::where(const Operation& operation) const {
  std::string text = operation.name;
  if (operation.number) text += " (collective " + std::to_string(operation.number) + ")";
  return text + " on " + segment_.describe(rank_) + " of " + std::to_string(ranks_) + " in group " + name_;
}

void Communicator::exchange(const Operation& operation, std::vector<Outgoing> out, std::vector<Incoming> in) {
  const std::lock_guard<std::mutex> lock(busy_);
  std::vector<Sending> sending;
  std::vector<Receiving> receiving;
  for (const Outgoing& message : out) sending.emplace_back(operation, message);
  for (const Incoming& message : in) receiving.emplace_back(operation, message);
  try {
    exchange_all(sending, receiving);
  } catch (const std::exception& e) {
    const std::string message = "HCCL emulator: " + where(operation) + ": " + e.what();
    segment_.set_failure(message);
    throw std::runtime_error(message);
  }
}

void Communicator::exchange_all(std::vector<Sending>& out, std::vector<Receiving>& in) {
  const uint64_t capacity = segment_.ring_capacity();
  ProgressWait wait(*this, out, in);
  std::vector<bool> blocked(ranks_);
  for (bool all_done = false; !all_done;) {
    all_done = true;
    bool moved = false;
    // Messages to the same rank are sent one after another.
    std::fill(blocked.begin(), blocked.end(), false);
    for (Sending& message : out) {
      if (message.done() || blocked[message.to]) continue;
      moved |= message.advance(segment_.ring(rank_, message.to), capacity);
      blocked[message.to] = !message.done();
      all_done &= message.done();
    }
    std::fill(blocked.begin(), blocked.end(), false);
    for (Receiving& message : in) {
      if (message.done() || blocked[message.from]) continue;
      try {
        moved |= message.advance(segment_.ring(message.from, rank_), capacity);
      } catch (const std::exception& e) {
        throw std::runtime_error(segment_.describe(message.from) + " does something else: " + e.what());
      }
      blocked[message.from] = !message.done();
      all_done &= message.done();
    }
    if (moved) {
      wait.progress();
    } else if (!all_done) {
      wait.step();
    }
  }
}

}  // namespace rec_sdk::emulator::hccl
