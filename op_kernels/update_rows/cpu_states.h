// The states of a row as float32, which the formulas require. If all states are float32, they are updated in
// the record. Otherwise they are widened to copies, which are rounded to nearest when they are stored.
#pragma once

#include <vector>

#include "op_kernels/common/convert.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

class WidenedStates {
 public:
  explicit WidenedStates(const RecordLayout& layout) : layout_(layout), needed_(!layout.plain_states()) {
    if (!needed_) return;
    int64_t elements = 0;
    for (int64_t s = 0; s < layout.state_count; ++s) {
      begin_[s] = elements;
      elements += layout.state_elements[s];
    }
    copies_.resize(static_cast<size_t>(elements));
  }

  bool needed() const { return needed_; }
  // Returns state s. The copies are consecutive, so that the row states are consecutive too.
  float* state(uint8_t* record, int s) {
    return needed_ ? copies_.data() + begin_[s] : reinterpret_cast<float*>(record + layout_.state_offset[s]);
  }

  // Copies the states out of and into a record. Not inlined, because all optimizers and formats share them.
  __attribute__((noinline)) void load(const uint8_t* record) {
    for (int64_t s = 0; s < layout_.state_count; ++s) {
      with_format(layout_.state_dtype[s], [&](auto format) {
        using Format = decltype(format);
        const auto* stored =
            reinterpret_cast<const typename Format::Storage*>(record + layout_.state_offset[s]);
        float* copy = copies_.data() + begin_[s];
        for (int64_t k = 0; k < layout_.state_elements[s]; ++k) copy[k] = Format::load(stored[k]);
      });
    }
  }
  __attribute__((noinline)) void store(uint8_t* record) const {
    for (int64_t s = 0; s < layout_.state_count; ++s) {
      with_format(layout_.state_dtype[s], [&](auto format) {
        using Format = decltype(format);
        auto* stored = reinterpret_cast<typename Format::Storage*>(record + layout_.state_offset[s]);
        const float* copy = copies_.data() + begin_[s];
        for (int64_t k = 0; k < layout_.state_elements[s]; ++k) stored[k] = Format::store(copy[k]);
      });
    }
  }

 private:
  const RecordLayout& layout_;
  const bool needed_;
  int64_t begin_[kMaxStates] = {};
  std::vector<float> copies_;
};

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
