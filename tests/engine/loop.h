// Training of one table without torch: its device cache, and the expected rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "tests/engine/model.h"

namespace rec_sdk {

constexpr int64_t kDim = 4;

inline GroupSpec one_table(bool hashed, int64_t slots, int64_t capacity, ColumnSet columns = {}) {
  TableSpec table{
      "t", hashed, 40, slots, capacity, Initializer("uniform", -1, 1, 0, 1), 5, {}, BoundsCheck::kFatal};
  table.columns = columns;
  return {{table}, make_record_layout(kDim, DType::kFloat32, nullptr, 0), {{0, 0, false}}, false, "lru"};
}

// The training loop of one table, with its device cache and the expected record of each id.
class Loop {
 public:
  Loop(const GroupSpec& spec, uint64_t seed)
      : random(seed),
        engine(std::make_shared<Engine>(spec)),
        model(spec.tables[0], 0),
        cache_(static_cast<size_t>(spec.tables[0].slots), 0.0f) {}

  std::unique_ptr<Plan> plan(const std::vector<int64_t>& ids) { return plan_of(engine.get(), ids); }

  // Applies the plan, checks the weight of every lookup, and sets new weights as training would.
  void run(const std::vector<int64_t>& ids, const Plan& plan) {
    const size_t bytes = static_cast<size_t>(engine->layout().bytes);
    std::vector<char> out(static_cast<size_t>(plan->rows_out) * bytes);
    std::vector<char> in(static_cast<size_t>(plan->rows_in) * bytes);
    for (int64_t i = 0; i < plan->rows_out; ++i) {
      std::memcpy(&out[static_cast<size_t>(i) * bytes], &cache_[plan->swap_out_slots[i]], sizeof(float));
    }
    engine->read_in(plan, in.data());
    Engine::start_plans({&plan});
    for (int64_t i = 0; i < plan->rows_in; ++i) {
      std::memcpy(&cache_[plan->swap_in_slots[i]], &in[static_cast<size_t>(i) * bytes], sizeof(float));
    }
    engine->applied(plan);
    engine->complete_write_back(plan, out.data(), nullptr);
    for (size_t i = 0; i < ids.size(); ++i) CHECK(cache_[plan->slots[i]] == weight(ids[i]));
    for (size_t i = 0; i < ids.size(); ++i) {
      model.weights[ids[i]] = cache_[plan->slots[i]] = static_cast<float>(++version_);
    }
  }

  float weight(int64_t id) {
    if (model.weights.count(id) != 0) return model.weights[id];
    std::vector<float> record(static_cast<size_t>(engine->layout().bytes) / sizeof(float));
    engine->tables.initial_records(0, {&id, 1}, reinterpret_cast<char*>(record.data()));
    return record[0];
  }

  void add(const std::vector<int64_t>& ids) {
    for (const int64_t id : ids) model.add(id);
  }

  void check() {
    const auto [ids, slots, rows] = engine->tables.rows(0);
    CHECK(ids.size() == model.rows.size() && std::is_sorted(rows.begin(), rows.end()));
    CHECK(std::set<int64_t>(rows.begin(), rows.end()).size() == ids.size());
    std::set<int32_t> used;
    for (size_t i = 0; i < ids.size(); ++i) {
      CHECK(model.rows.count(ids[i]) == 1 && model.rows[ids[i]] == rows[i]);
      CHECK(slots[i] < 0 || used.insert(slots[i]).second);
      CHECK(slots[i] < static_cast<int32_t>(cache_.size()));
      if (slots[i] >= 0) CHECK(cache_[slots[i]] == weight(ids[i]));
    }
  }

  std::vector<int64_t> random_ids(size_t count, uint64_t spread) {
    std::vector<int64_t> ids(count);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % spread) - 7;
    return ids;
  }
  int64_t remove(const std::vector<int64_t>& ids) { return engine->tables.remove(0, ids); }

  std::mt19937_64 random;
  std::shared_ptr<Engine> engine;
  ModelTable model;

 private:
  std::vector<float> cache_;  // the first weight of each slot
  int version_ = 10;
};

}  // namespace rec_sdk
