// Rows that a load puts into a table: their numbers and records, and what is refused without a trace.
#include <stdexcept>

#include "tests/engine/loop.h"
#include "tests/engine/threads.h"
#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

void numbers_and_records() {
  Engine engine(one_table(true, 24, 0));
  const std::vector<int64_t> ids = {7, -5, 7, 100, INT64_MIN};
  const auto [rows, slots] = engine.tables.insert(0, ids);
  CHECK((rows == std::vector<int64_t>{0, 1, 0, 2, 3}) && slots == std::vector<int32_t>(5, -1));
  const size_t bytes = static_cast<size_t>(engine.layout().bytes);
  std::vector<char> records(5 * bytes), back(4 * bytes);
  for (size_t i = 0; i < records.size(); ++i) records[i] = static_cast<char>(1 + rows[i / bytes]);
  engine.tables.write_rows(0, ids, rows, records.data());
  const std::vector<int64_t> distinct = {7, -5, 100, INT64_MIN}, numbers = {0, 1, 2, 3};
  engine.tables.read_rows(0, distinct, numbers, back.data());
  for (size_t i = 0; i < back.size(); ++i) CHECK(back[i] == static_cast<char>(1 + i / bytes));
}

void more_than_the_capacity() {
  Engine engine(one_table(true, 24, 45));
  std::vector<int64_t> ids(46);
  for (int64_t i = 0; i < 46; ++i) ids[i] = i;
  CHECK_THROWS(engine.tables.insert(0, ids), CapacityError);
  CHECK(engine.tables.row_count(0) == 0);
  engine.tables.insert(0, {ids.data(), 45});
  CHECK(engine.tables.row_count(0) == 45);
}

void outside_an_index_table() {
  Engine engine(one_table(false, 24, 0));
  const std::vector<char> record(static_cast<size_t>(engine.layout().bytes));
  for (const int64_t outside : {int64_t{40}, int64_t{-1}}) {
    CHECK_THROWS(engine.tables.insert(0, {&outside, 1}), std::out_of_range);
    CHECK_THROWS(engine.tables.write_rows(0, {&outside, 1}, {&outside, 1}, record.data()), std::out_of_range);
  }
}

void all() {
  numbers_and_records();
  more_than_the_capacity();
  outside_an_index_table();
}

}  // namespace
}  // namespace rec_sdk

int main() {
  rec_sdk::all();
  rec_sdk::set_parallel_runner(rec_sdk::run_on_threads, rec_sdk::eight_threads, 0);
  rec_sdk::all();
  return check_result();
}
