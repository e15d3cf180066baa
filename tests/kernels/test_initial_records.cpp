// Prints checksums of initial records, which must be equal on every machine.
#include "tests/kernels/support.h"
#include "torch_npu_ext/engine/store/initializers.h"

using kernel_tests::Checksum;
using rec_sdk::DType;
using rec_sdk::Initializer;
using rec_sdk::RecordInitializer;

namespace {

void initial_records(const char* kind, int64_t dim, DType dtype) {
  const Initializer initializer(kind, -0.3, 0.7, 0.1, 0.25);
  const int64_t states[] = {dim, 1};
  const rec_sdk::RecordLayout layout = rec_sdk::make_record_layout(dim, dtype, states, 2);
  const RecordInitializer records(layout, initializer, 12345, "table", {0.5f, 0.25f});
  Checksum checksum;
  std::vector<char> record(static_cast<size_t>(layout.bytes));
  for (int64_t i = -1000; i < 1000; ++i) {
    records.write(i * 0x123456789ABLL, record.data());
    checksum.add(record);
    const auto* bytes = reinterpret_cast<const uint8_t*>(record.data());
    for (int64_t k = 0; k < dim; ++k) {
      const double weight = kernel_tests::element_of(bytes, k, dtype);
      CHECK(weight > -0.41 && weight < 0.71);  // the range of all kinds, plus rounding to bfloat16
    }
  }
  checksum.print(std::string(kind) + " dim " + std::to_string(dim) + " " + kernel_tests::name_of(dtype));
}

}  // namespace

int main() {
  for (const char* kind : {"linear", "uniform", "truncated_normal"}) {
    for (const int64_t dim : kernel_tests::kDims) {
      for (const DType dtype : kernel_tests::kDTypes) initial_records(kind, dim, dtype);
    }
  }
  return check_result();
}
