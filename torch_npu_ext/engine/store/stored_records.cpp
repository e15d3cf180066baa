#include "torch_npu_ext/engine/store/stored_records.h"

#include "op_kernels/common/convert.h"

namespace rec_sdk {
namespace {

RecordLayout with_weight(const RecordLayout& layout, DType weight_dtype) {
  return make_record_layout(layout.dim, weight_dtype, layout.state_elements, layout.state_count,
                            layout.state_dtype);
}

int64_t first_state(const RecordLayout& layout) {
  return layout.state_count > 0 ? layout.state_offset[0] : layout.bytes;
}

int64_t bytes_of_states(const RecordLayout& layout) {
  if (layout.state_count == 0) return 0;
  const int64_t last = layout.state_count - 1;
  return layout.state_offset[last] + layout.state_bytes(last) - layout.state_offset[0];
}

}  // namespace

StoredRecords::StoredRecords(const RecordLayout& cached, std::optional<DType> stored)
    : cached_(cached),
      stored_(with_weight(cached, stored.value_or(cached.weight_dtype))),
      state_bytes_(bytes_of_states(cached)),
      same_(stored_.weight_dtype == cached.weight_dtype) {}

void StoredRecords::convert(const RecordLayout& from, const char* source, const RecordLayout& to,
                            char* target) const {
  using namespace REC_SDK_ISA;
  const int64_t begin = first_state(from), states = first_state(to);
  with_format(from.weight_dtype, [&](auto read) {
    with_format(to.weight_dtype, [&](auto written) {
      const auto* const weights = reinterpret_cast<const typename decltype(read)::Storage*>(source);
      auto* const result = reinterpret_cast<typename decltype(written)::Storage*>(target);
      for (int64_t i = 0; i < to.dim; ++i) result[i] = written.store(read.load(weights[i]));
    });
  });
  std::memset(target + to.weight_bytes, 0, static_cast<size_t>(states - to.weight_bytes));
  std::memcpy(target + states, source + begin, static_cast<size_t>(state_bytes_));
  std::memset(target + states + state_bytes_, 0, static_cast<size_t>(to.bytes - states - state_bytes_));
}

}  // namespace rec_sdk
