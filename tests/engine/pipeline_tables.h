// The calls of Pipeline on whole tables, and checks of whole tables. pipeline.h includes this file.
#pragma once

#include "tests/engine/pipeline.h"

namespace rec_sdk {

inline void Pipeline::check_tables() {
  std::map<Row, float> seen_sums;
  const Engine::WindowRows window = engine->window_rows();
  for (int32_t t = 0; t < kTables; ++t) {
    const auto [ids, row_slots, rows] = engine->tables.rows(t);
    const auto of_window = window.slots.begin() + window.slot_offsets[t];
    const auto end_of_window = window.slots.begin() + window.slot_offsets[t + 1];
    std::vector<int64_t> kept;
    std::vector<char> records(ids.size() * static_cast<size_t>(bytes()));
    engine->tables.read_rows(t, ids, rows, records.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const Row row{t, ids[i]};
      CHECK(t == 1 || known_.count(row) == 1);
      const auto resident = residents_.find(row);
      CHECK(row_slots[i] == (resident == residents_.end() ? -1 : resident->second));
      CHECK((row_slots[i] < 0 ? weight(&records[i * bytes()]) : cache_[row_slots[i]]) == expected(row));
      if (row_slots[i] >= 0 || stored_.count(row) != 0) kept.push_back(ids[i]);
      if (std::binary_search(of_window, end_of_window, row_slots[i])) {
        seen_sums[row] = sums_[row_slots[i]];
      }
    }
    CHECK(t == 1 || ids.size() == static_cast<size_t>(std::count_if(known_.begin(), known_.end(), in<0>)));
    CHECK(engine->saves.ids_with_records(t) == kept);
    check_versions(t, kept);
  }
  for_each_away([&](const Row& row, float sum, char*) { seen_sums[row] = sum; });
  CHECK(seen_sums == sums);
}

inline void Pipeline::close_window() {
  for (const auto& row_and_sum : sums) {
    const auto resident = residents_.find(row_and_sum.first);
    if (resident == residents_.end()) continue;
    cache_[resident->second] = static_cast<float>(++changes_);
    sums_[resident->second] = 0;
    changed(row_and_sum.first);
  }
  for_each_away([&](const Row& row, float, char* record) {
    set_weight(record, static_cast<float>(++changes_));
    changed(row, weight(record));
  });
  engine->close_window();
  sums.clear();
}

inline void Pipeline::write_some() {
  for (const Row& row : std::set<Row>(stored_)) {
    if (random() % 8 != 0 || residents_.count(row) != 0) continue;
    std::vector<char> record(static_cast<size_t>(bytes()));
    set_weight(record.data(), static_cast<float>(++changes_));
    changed(row, static_cast<float>(changes_));
    const auto [numbers, slots] = engine->tables.find_rows(row.first, {&row.second, 1});
    CHECK(slots[0] == -1 && numbers[0] >= 0);
    engine->tables.write_rows(row.first, {&row.second, 1}, numbers, record.data());
  }
}

inline void Pipeline::remove_some() {
  for (const Row& row : std::set<Row>(known_)) {
    if (random() % 12 != 0) continue;
    const bool busy = is_held(row) || sums.count(row) != 0;
    if (busy) {
      CHECK_THROWS(engine->tables.remove(row.first, {&row.second, 1}), std::runtime_error);
      continue;
    }
    CHECK(engine->tables.remove(row.first, {&row.second, 1}) == 1);
    residents_.erase(row);
    known_.erase(row);
    stored_.erase(row);
    weights_.erase(row);
    for (Version& version : versions_) version.changed.erase(row);
  }
}

}  // namespace rec_sdk
