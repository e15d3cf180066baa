// The host store: contents survive growth, memory is committed at the first write only, and the memory check.
#include <cstring>
#include <string>
#include <vector>

#include "tests/host/check.h"
#include "torch_npu_ext/host/errors.h"
#include "torch_npu_ext/host/host_store.h"

using rec_sdk::HostStore;
using rec_sdk::MemoryGuard;

namespace {

std::vector<char> pattern(int64_t row, int64_t bytes) {
  std::vector<char> record(static_cast<size_t>(bytes));
  for (int64_t i = 0; i < bytes; ++i) record[i] = static_cast<char>(row * 31 + i);
  return record;
}

void grows_without_moving(int64_t bytes, int64_t step, int64_t count) {
  MemoryGuard guard;
  HostStore store(bytes, &guard);
  std::vector<const char*> places;
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < count * step; row += step) {
    store.extend(row + 1);
    CHECK(!store.has(row));
    store.write(row, pattern(row, bytes).data());
    CHECK(store.has(row));
    places.push_back(store.read(row));
    rows.push_back(row);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(store.read(rows[i]) == places[i]);
    CHECK(std::memcmp(places[i], pattern(rows[i], bytes).data(), static_cast<size_t>(bytes)) == 0);
  }
  CHECK(store.written_rows() == count);
  CHECK(guard.committed() == store.committed_bytes());
  store.write(0, pattern(5, bytes).data());
  CHECK(store.written_rows() == count);
  store.clear();
  CHECK(!store.has(0) && store.written_rows() == 0 && guard.committed() == 0);
}

void commits_lazily() {
  MemoryGuard guard;
  HostStore store(256, &guard);
  store.extend(1000000000);
  CHECK(store.committed_bytes() == 0);
  store.write(999999999, pattern(1, 256).data());
  CHECK(store.committed_bytes() == static_cast<int64_t>(rec_sdk::kHugePage));
  CHECK(!store.has(999999998));
}

void checks_memory() {
  MemoryGuard guard;
  CHECK(rec_sdk::available_memory() > 0);
  guard.require(1 << 20, "t");
  CHECK_THROWS(guard.require(int64_t{1} << 60, "t"), rec_sdk::MemoryLimitError);
  guard.require(1 << 20, "t");  // a refusal changes nothing
  guard.set_limit(4 << 20);
  guard.count_committed(3 << 20);
  guard.require(1 << 20, "t");
  try {
    guard.require((1 << 20) + 1, "names");
    CHECK(false);
  } catch (const rec_sdk::MemoryLimitError& error) {
    CHECK(std::string(error.what()).find("'names'") != std::string::npos);
  }
}

}  // namespace

int main() {
  grows_without_moving(16, 1, 300);
  grows_without_moving(48, 200011, 20);
  grows_without_moving(49152, 7, 100);
  grows_without_moving((3 << 20) + 16, 1, 12);
  commits_lazily();
  checks_memory();
  return check_result();
}
