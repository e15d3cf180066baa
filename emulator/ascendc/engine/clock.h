// A clock that counts the instructions of all cores of a thread.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

class Clock {
 public:
  static constexpr int32_t kLastTime = INT32_MAX / 4 - 1;

  int32_t now() const { return now_; }
  // Advances the clock by one instruction and returns its time. `name` must be a string literal.
  int32_t tick(const char* name) {
    ++now_;
    names_[static_cast<uint32_t>(now_) % kNames] = name;
    return now_;
  }
  void restart() { now_ = 0; }
  // Returns the name of the instruction at that time; null if it is too old.
  const char* name_at(int32_t time) const {
    const bool recent = time > 0 && time <= now_ && static_cast<uint32_t>(now_ - time) < kNames;
    return recent ? names_[static_cast<uint32_t>(time) % kNames] : nullptr;
  }

 private:
  static constexpr uint32_t kNames = 4096;

  int32_t now_ = 0;
  const char* names_[kNames] = {};
};

}  // namespace rec_sdk::emulator
