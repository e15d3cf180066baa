// The host store: contents survive growth, memory is committed at the first write and given back with the
// last row, threads without the lock, and the memory check.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/host/check.h"
#include "torch_npu_ext/host/errors.h"
#include "torch_npu_ext/host/host_store.h"

using rec_sdk::HostStore;
using rec_sdk::MemoryGuard;
using rec_sdk::StoreFile;

namespace {

// Records of so many bytes, which the store keeps as they are.
rec_sdk::StoredRecords records_of(int64_t bytes) {
  return rec_sdk::StoredRecords(rec_sdk::make_record_layout(bytes / 4, rec_sdk::DType::kFloat32, nullptr, 0));
}

std::vector<char> pattern(int64_t row, int64_t bytes) {
  std::vector<char> record(static_cast<size_t>(bytes));
  for (int64_t i = 0; i < bytes; ++i) record[i] = static_cast<char>(row * 31 + i);
  return record;
}

void grows_without_moving(int64_t bytes, int64_t step, int64_t count) {
  MemoryGuard guard;
  HostStore store(records_of(bytes), &guard);
  std::vector<const char*> places;
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < count * step; row += step) {
    store.extend(row + 1);
    CHECK(!store.has(row));
    store.write(row, pattern(row, bytes).data());
    CHECK(store.has(row));
    places.push_back(store.find(row));
    rows.push_back(row);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(store.find(rows[i]) == places[i]);
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
  HostStore store(records_of(256), &guard);
  store.extend(1000000000);
  CHECK(store.committed_bytes() == 0);
  store.write(999999999, pattern(1, 256).data());
  CHECK(store.committed_bytes() == static_cast<int64_t>(rec_sdk::kHugePage));
  CHECK(!store.has(999999998));
}

int64_t pages_in_memory(const char* begin, int64_t bytes) {
  std::vector<unsigned char> present(static_cast<size_t>(bytes / 4096));
  CHECK(mincore(const_cast<char*>(begin), static_cast<size_t>(bytes), present.data()) == 0);
  int64_t pages = 0;
  for (const unsigned char page : present) pages += page & 1;
  return pages;
}

// Against the pages that the written rows touch; records of 49152 bytes lie across pages.
void forgets(int64_t bytes, int64_t rows) {
  std::mt19937_64 random(static_cast<uint64_t>(bytes));
  MemoryGuard guard;
  HostStore store(records_of(bytes), &guard);
  store.extend(rows);
  const int64_t page = static_cast<int64_t>(rec_sdk::kHugePage);
  const int64_t chunk_rows = [&] {  // as the store has them, so that pages can be told
    int64_t count = 1;
    while (2 * count * bytes <= 8 * page) count *= 2;
    return count;
  }();
  std::set<int64_t> written;
  const auto expected_bytes = [&] {
    std::set<int64_t> pages;
    for (const int64_t row : written) {
      const int64_t begin = row % chunk_rows * bytes;
      for (int64_t p = begin / page; p <= (begin + bytes - 1) / page; ++p) {
        pages.insert(row / chunk_rows * 1000000 + p);
      }
    }
    return static_cast<int64_t>(pages.size()) * page;
  };
  for (int round = 0; round < 6; ++round) {
    for (int64_t i = 0; i < rows / 8; ++i) {
      const int64_t row = static_cast<int64_t>(random() % static_cast<uint64_t>(rows));
      store.write(row,
                  std::vector<char>(static_cast<size_t>(bytes), static_cast<char>(1 + row % 100)).data());
      written.insert(row);
      store.forget(static_cast<int64_t>(random() % static_cast<uint64_t>(rows)));
    }
    written.clear();
    for (int64_t row = 0; row < rows; ++row) {
      if (store.has(row)) written.insert(row);
    }
    CHECK(store.written_rows() == static_cast<int64_t>(written.size()));
    CHECK(store.committed_bytes() == expected_bytes() && guard.committed() == store.committed_bytes());
    const int64_t kept = *written.begin();
    const std::vector<char> before(store.find(kept), store.find(kept) + bytes);
    while (written.size() > 1) {
      store.forget(*written.rbegin());
      store.forget(*written.rbegin());  // again: nothing
      CHECK(!store.has(*written.rbegin()));
      written.erase(*written.rbegin());
    }
    CHECK(store.committed_bytes() == expected_bytes() && store.has(kept));
    CHECK(before.front() == 1 + kept % 100 && before.back() == before.front());
    CHECK(std::memcmp(before.data(), store.find(kept), before.size()) == 0);
    const char* const place = store.find(kept);
    store.forget(kept);
    CHECK(store.written_rows() == 0 && store.committed_bytes() == 0 && guard.committed() == 0);
    CHECK(place[0] == 0);  // the page is new
  }
}

void memory_comes_back() {
  MemoryGuard guard;
  HostStore store(records_of(256), &guard);
  const int64_t rows = 8 * 8192;  // a chunk
  store.extend(rows);
  for (int64_t row = 0; row < rows; ++row) store.write(row, pattern(row, 256).data());
  const char* const begin = store.find(0);
  CHECK(pages_in_memory(begin, rows * 256) == rows * 256 / 4096);
  for (int64_t row = 0; row < rows - 1; ++row) store.forget(row);
  CHECK(pages_in_memory(begin, rows * 256) == 512);  // the last huge page
  CHECK(guard.committed() == static_cast<int64_t>(rec_sdk::kHugePage));
}

// Copies of rows that are written, while others come and go: ThreadSanitizer must be content with it.
void copies_beside_growth() {
  constexpr int64_t kBytes = 64 << 10, kRows = 130, kOthers = 4000;
  MemoryGuard guard;
  HostStore store(records_of(kBytes), &guard);
  store.extend(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    store.map(row);
    store.mark(row);
  }
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<char> record(kBytes);
      for (int round = 0; round < 3; ++round) {
        for (int64_t row = t; row < kRows; row += 4) {
          store.copy(row, pattern(row + round, kBytes).data());
          bad += !store.has(row);
          store.read(row, record.data());
          bad += record != pattern(row + round, kBytes);
        }
      }
    });
  }
  for (int64_t row = kRows; row < kOthers; ++row) {
    store.extend(row + 1);
    if (row % 3 == 0) continue;
    store.map(row);
    store.mark(row);
    if (row % 4 == 1) store.forget(row);
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad == 0);
}

std::string new_path() {
  char path[] = "/tmp/rec_sdk_host_store_XXXXXX";
  const int file = mkstemp(path);
  CHECK(file >= 0);
  close(file);
  unlink(path);
  return path;
}

// Rows of several chunks, of records that do not end with a page, come back from the file.
void on_disk(int64_t bytes, int64_t step, int64_t count) {
  const std::string path = new_path();
  MemoryGuard guard;
  guard.set_limit(0);
  {
    HostStore store(records_of(bytes), &guard, std::make_unique<StoreFile>(path, "t"));
    std::vector<int64_t> rows;
    store.extend(count * step);
    CHECK(store.disk_bytes() >= (count - 1) * step * bytes);
    for (int64_t row = 0; row < count * step; row += step) {
      store.write(row, pattern(row, bytes).data());
      rows.push_back(row);
    }
    CHECK(store.committed_bytes() == 0 && guard.committed() == 0);
    struct stat file;
    CHECK(stat(path.c_str(), &file) == 0 && file.st_size == store.disk_bytes() + 4096);
    store.will_need(rows.data(), static_cast<int64_t>(rows.size()));
    for (const int64_t row : rows) {
      CHECK(std::memcmp(store.find(row), pattern(row, bytes).data(), static_cast<size_t>(bytes)) == 0);
      CHECK(step == 1 || !store.has(row + 1));
    }
    store.forget(rows[1]);
    CHECK(!store.has(rows[1]) && store.written_rows() == count - 1);
    CHECK_THROWS(StoreFile(path, "t"), rec_sdk::DiskError);  // it is there
    store.clear();
    CHECK(!store.has(0) && store.disk_bytes() > 0);
    store.shrink();
    CHECK(store.disk_bytes() == 0 && stat(path.c_str(), &file) == 0 && file.st_size == 4096);
    store.extend(2);
    store.write(1, pattern(9, bytes).data());
    CHECK(std::memcmp(store.find(1), pattern(9, bytes).data(), static_cast<size_t>(bytes)) == 0);
    if (step == 1) {  // another file that got its name is not removed
      unlink(path.c_str());
      std::ofstream(path) << "other";
    }
  }
  CHECK((access(path.c_str(), F_OK) == 0) == (step == 1));
  unlink(path.c_str());
}

void checks_memory() {
  MemoryGuard guard;
  CHECK(rec_sdk::available_memory() > 0);
  guard.require(1 << 20, "t");
  CHECK_THROWS(guard.require(int64_t{1} << 60, "t"), rec_sdk::MemoryLimitError);
  guard.require(1 << 20, "t");  // a refusal changes nothing
  CHECK_THROWS(guard.require(std::numeric_limits<int64_t>::max(), "t"), rec_sdk::MemoryLimitError);
  CHECK(rec_sdk::saturated_product(int64_t{1} << 40, int64_t{1} << 40) ==
        std::numeric_limits<int64_t>::max());
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
  grows_without_moving((40 << 20) + 16, 1, 1);  // more huge pages than a word has bits
  commits_lazily();
  forgets(4096, 3000);
  forgets(49152, 500);
  forgets((3 << 20) + 16, 40);
  memory_comes_back();
  copies_beside_growth();
  on_disk(528, 1, 3000);
  on_disk(48, 2000003, 5);
  on_disk((40 << 20) + 16, 2, 8);
  checks_memory();
  return check_result();
}
