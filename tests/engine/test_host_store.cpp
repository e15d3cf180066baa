// The host store: growth keeps its contents, memory is committed at the first write and released with the
// last row of a page, threads read and write without the lock, and growth beyond the memory limit fails.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/store/host_store.h"

using rec_sdk::HostStore;
using rec_sdk::MemoryGuard;
using rec_sdk::StoreFile;

namespace {

// Returns a format of records of `bytes` bytes, which are stored without conversion.
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

TEST(commits_lazily) {
  MemoryGuard guard;
  HostStore store(records_of(256), &guard);
  store.extend(1000000000);
  CHECK(store.committed_bytes() == 0);
  store.write(999999999, pattern(1, 256).data());
  CHECK(store.committed_bytes() == static_cast<int64_t>(rec_sdk::small_page()));
  CHECK(!store.has(999999998));
}

int64_t pages_in_memory(const char* begin, int64_t bytes) {
  std::vector<unsigned char> present(static_cast<size_t>(bytes) / rec_sdk::small_page());
  CHECK(mincore(const_cast<char*>(begin), static_cast<size_t>(bytes), present.data()) == 0);
  int64_t pages = 0;
  for (const unsigned char page : present) pages += page & 1;
  return pages;
}

bool system_has_huge_pages() {
  const rec_sdk::HugeBuffer buffer(rec_sdk::kHugePage);
  buffer.data()[0] = 1;
  return pages_in_memory(buffer.data(), rec_sdk::kHugePage) > 1;
}

constexpr int64_t kHuge = static_cast<int64_t>(rec_sdk::kHugePage);
const int64_t kSmall = static_cast<int64_t>(rec_sdk::small_page());

// A model of how many bytes a store commits, computed from the written rows.
class PageModel {
 public:
  PageModel(const HostStore& store, int64_t bytes) : store_(store), bytes_(bytes) {
    while (2 * chunk_rows_ * bytes <= 8 * kHuge) chunk_rows_ *= 2;
  }
  void write(int64_t row, int64_t written_before) {  // must be called at the first write of the row
    const int64_t chunk = row / chunk_rows_, before = chunk * chunk_rows_;
    if (seen_.insert(chunk).second && chunk > 0 && 2 * written_before >= before) huge_.insert(chunk);
    if (2 * bytes_of(chunk, kSmall) >= bytes_of(chunk, kHuge)) huge_.insert(chunk);
  }
  int64_t committed() const {
    int64_t bytes = 0;
    for (const int64_t chunk : seen_) bytes += bytes_of(chunk, huge_.count(chunk) > 0 ? kHuge : kSmall);
    return bytes;
  }
  int64_t huge_chunks() const { return static_cast<int64_t>(huge_.size()); }

 private:
  int64_t bytes_of(int64_t chunk, int64_t page) const {
    int64_t pages = 0, next = 0;  // `next` is the first page that is not counted yet
    for (int64_t i = 0; i < chunk_rows_; ++i) {
      if (!store_.has(chunk * chunk_rows_ + i)) continue;
      const int64_t last = ((i + 1) * bytes_ - 1) / page;
      pages += std::max<int64_t>(0, last + 1 - std::max(next, i * bytes_ / page));
      next = std::max(next, last + 1);
    }
    return pages * page;
  }

  const HostStore& store_;
  int64_t bytes_, chunk_rows_ = 1;
  std::set<int64_t> seen_, huge_;  // chunks with written rows, and chunks on huge pages
};

// Compares the committed bytes with the model while rows are written and forgotten. Records of 49152 bytes
// cross pages. With a large `share`, so few rows are written that pages stay small.
void forgets(int64_t bytes, int64_t rows, int64_t share) {
  std::mt19937_64 random(static_cast<uint64_t>(bytes));
  MemoryGuard guard;
  HostStore store(records_of(bytes), &guard);
  const int64_t room = rows + (16 << 20) / bytes + 1;  // the model allocates whole chunks
  store.extend(room);
  PageModel model(store, bytes);
  std::set<int64_t> written;
  for (int round = 0; round < 6; ++round) {
    for (int64_t i = 0; i < rows / share; ++i) {
      const int64_t row = static_cast<int64_t>(random() % static_cast<uint64_t>(rows));
      const int64_t before = store.written_rows();
      store.write(row,
                  std::vector<char>(static_cast<size_t>(bytes), static_cast<char>(1 + row % 100)).data());
      if (store.written_rows() > before) model.write(row, before);
      if (i % 4 == 0) store.forget(static_cast<int64_t>(random() % static_cast<uint64_t>(rows)));
    }
    written.clear();
    for (int64_t row = 0; row < rows; ++row) {
      if (store.has(row)) written.insert(row);
    }
    CHECK(store.written_rows() == static_cast<int64_t>(written.size()));
    CHECK(store.committed_bytes() == model.committed() && guard.committed() == store.committed_bytes());
    const int64_t kept = *written.begin();
    const std::vector<char> before(store.find(kept), store.find(kept) + bytes);
    while (written.size() > 1) {
      store.forget(*written.rbegin());
      store.forget(*written.rbegin());  // forgetting it again has no effect
      CHECK(!store.has(*written.rbegin()));
      written.erase(*written.rbegin());
    }
    CHECK(store.committed_bytes() == model.committed() && store.has(kept));
    CHECK(before.front() == 1 + kept % 100 && before.back() == before.front());
    CHECK(std::memcmp(before.data(), store.find(kept), before.size()) == 0);
    const char* const place = store.find(kept);
    store.forget(kept);
    CHECK(store.written_rows() == 0 && store.committed_bytes() == 0 && guard.committed() == 0);
    CHECK(place[0] == 0);  // the page is zero again
  }
  CHECK((model.huge_chunks() == 0) == (share > 8));
}

// A few rows take a few small pages, wherever they are. Half of the rows of a huge page take the whole huge
// page.
TEST(few_rows_take_small_pages) {
  MemoryGuard guard;
  HostStore store(records_of(256), &guard);
  const int64_t on_huge = kHuge / 256, on_small = kSmall / 256, rows = 100 * on_huge;
  store.extend(rows);
  for (int64_t row = 0; row < 20; ++row) store.write(row, pattern(row, 256).data());
  CHECK(store.committed_bytes() == 2 * kSmall);
  CHECK(pages_in_memory(store.find(0), kHuge) == 2);
  for (int64_t row = on_huge; row < rows; row += on_huge) store.write(row, pattern(row, 256).data());
  CHECK(store.committed_bytes() == (2 + 99) * kSmall && guard.committed() == store.committed_bytes());
  for (int64_t row = 20; row < on_huge / 2; ++row) store.write(row, pattern(row, 256).data());
  CHECK(store.committed_bytes() == kHuge / 2 + 99 * kSmall);  // the chunk touches eight huge pages
  for (int64_t page = 0; page < 8; ++page) {
    for (int64_t row = page * on_huge; row < page * on_huge + on_huge / 2; row += on_small) {
      store.write(row, pattern(row, 256).data());
    }
  }
  CHECK(store.committed_bytes() == 8 * kHuge + (99 - 7) * kSmall);
  for (int64_t row = 0; row < on_huge / 2; ++row) {
    CHECK(std::memcmp(store.find(row), pattern(row, 256).data(), 256) == 0);
  }
  CHECK(std::memcmp(store.find(99 * on_huge), pattern(99 * on_huge, 256).data(), 256) == 0);
}

// If rows are written in order, the first chunk switches to huge pages, and later chunks use huge pages from
// their first row on.
TEST(dense_rows_take_huge_pages) {
  MemoryGuard guard;
  HostStore store(records_of(256), &guard);
  const int64_t chunk_rows = 8 * kHuge / 256;
  store.extend(2 * chunk_rows);
  for (int64_t row = 0; row < chunk_rows; ++row) store.write(row, pattern(row, 256).data());
  CHECK(store.committed_bytes() == 8 * kHuge);
  store.write(chunk_rows, pattern(1, 256).data());
  CHECK(store.committed_bytes() == 9 * kHuge);
  store.clear();
  store.write(0, pattern(1, 256).data());
  CHECK(store.committed_bytes() == kSmall);
}

// Threads read and write rows while the small pages of these rows become a huge page.
TEST(becomes_huge_beside_copies) {
  constexpr int64_t kBytes = 256, kRows = 1000;
  for (int round = 0; round < 20; ++round) {
    MemoryGuard guard;
    HostStore store(records_of(kBytes), &guard);
    store.extend(2 * kHuge / kBytes);
    for (int64_t row = 0; row < kRows; ++row) store.write(row, pattern(row, kBytes).data());
    CHECK(store.committed_bytes() < kHuge);
    std::atomic<bool> ends{false};
    std::atomic<int> bad{0};
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::vector<char> record(kBytes);
        do {
          for (int64_t row = t; row < kRows; row += 3) {
            store.read(row, record.data());
            bad += record != pattern(row, kBytes);
            store.copy(row, record.data());
          }
        } while (!ends);
      });
    }
    for (int64_t row = kRows; row < 2 * kHuge / kBytes; ++row) store.write(row, pattern(row, kBytes).data());
    ends = true;
    for (std::thread& thread : threads) thread.join();
    CHECK(bad == 0 && store.committed_bytes() == 2 * kHuge);
  }
}

TEST(small_arrays_take_small_pages) {
  rec_sdk::ChunkedMemory memory(sizeof(uint64_t));
  const size_t in_chunk = rec_sdk::kHugePage / sizeof(uint64_t), kLarge = 5;  // chunks of 10 MiB in total
  const auto item = [&](size_t i) { return static_cast<uint64_t*>(memory.at(i)); };
  memory.extend((kLarge - 1) * in_chunk);
  uint64_t* const first = item(0);
  *first = 7;
  *item(in_chunk) = 8;
  CHECK(pages_in_memory(reinterpret_cast<char*>(first), kHuge) == 1);
  CHECK(pages_in_memory(reinterpret_cast<char*>(item(in_chunk)), kHuge) == 1);
  memory.extend(kLarge * in_chunk);
  CHECK(item(0) == first && *first == 7 && *item(in_chunk) == 8 && *item(1) == 0);
  *item((kLarge - 1) * in_chunk) = 9;
  const int64_t pages = system_has_huge_pages() ? kHuge / kSmall : 1;
  CHECK(pages_in_memory(reinterpret_cast<char*>(item((kLarge - 1) * in_chunk)), kHuge) == pages);
  CHECK(pages_in_memory(reinterpret_cast<char*>(item(2 * in_chunk)), kHuge) ==
        0);  // this chunk was not accessed
}

TEST(memory_comes_back) {
  MemoryGuard guard;
  HostStore store(records_of(256), &guard);
  const int64_t rows = 8 * 8192;  // a chunk
  store.extend(rows);
  for (int64_t row = 0; row < rows; ++row) store.write(row, pattern(row, 256).data());
  const char* const begin = store.find(0);
  CHECK(pages_in_memory(begin, rows * 256) == rows * 256 / kSmall);
  for (int64_t row = 0; row < rows - 1; ++row) store.forget(row);
  CHECK(pages_in_memory(begin, rows * 256) == kHuge / kSmall);  // only the last huge page is left
  CHECK(guard.committed() == static_cast<int64_t>(rec_sdk::kHugePage));
}

// Rows are copied while other rows are inserted and removed. ThreadSanitizer checks this test.
TEST(copies_beside_growth) {
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

// Rows of several chunks, with records that cross pages, are written to a file and read back.
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
    CHECK_THROWS(StoreFile(path, "t"), rec_sdk::DiskError);  // the file exists
    store.clear();
    CHECK(!store.has(0) && store.disk_bytes() > 0);
    store.shrink();
    CHECK(store.disk_bytes() == 0 && stat(path.c_str(), &file) == 0 && file.st_size == 4096);
    store.extend(2);
    store.write(1, pattern(9, bytes).data());
    CHECK(std::memcmp(store.find(1), pattern(9, bytes).data(), static_cast<size_t>(bytes)) == 0);
    if (step == 1) {  // the destructor does not remove another file of the same name
      unlink(path.c_str());
      std::ofstream(path) << "other";
    }
  }
  CHECK((access(path.c_str(), F_OK) == 0) == (step == 1));
  unlink(path.c_str());
}

TEST(checks_memory) {
  MemoryGuard guard;
  CHECK(rec_sdk::available_memory() > 0);
  guard.require(1 << 20, "t");
  CHECK_THROWS(guard.require(int64_t{1} << 60, "t"), rec_sdk::MemoryLimitError);
  guard.require(1 << 20, "t");  // after an error, the guard is unchanged
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

// Small buffers are allocated on the heap and large buffers are mapped; both must behave in the same way.
TEST(buffers_of_every_size_are_zero_and_zero_again) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{4097}, size_t{32} << 10, rec_sdk::kHugePage}) {
    rec_sdk::HugeBuffer buffer(bytes, rec_sdk::Pages::kSmall);
    const auto all_are = [&](size_t begin, size_t end, char value) {
      return std::all_of(buffer.data() + begin, buffer.data() + end, [&](char c) { return c == value; });
    };
    CHECK(buffer.size() >= bytes && buffer.size() % rec_sdk::small_page() == 0);
    CHECK(all_are(0, buffer.size(), 0));
    std::fill_n(buffer.data(), buffer.size(), char{7});
    buffer.release(1, buffer.size() - 1);  // the first page stays, because it is only partly in the range
    CHECK(all_are(0, rec_sdk::small_page(), 7) && all_are(rec_sdk::small_page(), buffer.size(), 0));
    buffer.release(0, buffer.size());
    CHECK(all_are(0, buffer.size(), 0));
    rec_sdk::HugeBuffer moved(std::move(buffer));
    CHECK(buffer.data() == nullptr && moved.size() >= bytes);
  }
}

TEST(stores_of_every_size) {
  grows_without_moving(16, 1, 300);
  grows_without_moving(48, 200011, 20);
  grows_without_moving(49152, 7, 100);
  grows_without_moving((3 << 20) + 16, 1, 12);
  grows_without_moving((40 << 20) + 16, 1, 1);  // more huge pages than the 64 bits of a word
  forgets(4096, 1500, 1);
  forgets(49152, 500, 1);
  forgets((3 << 20) + 16, 40, 8);
  forgets(4096, 9000, 150);
  forgets(272, 60000, 3000);
  on_disk(528, 1, 3000);
  on_disk(48, 2000003, 5);
  on_disk((40 << 20) + 16, 2, 8);
}

}  // namespace
