// Accumulation windows: every sum follows its row out of the cache and back, whatever the swaps, and however
// late rows land.
#include "tests/engine/model.h"
#include "tests/engine/threads.h"

namespace rec_sdk {
namespace {

constexpr int64_t kDim = 2;
constexpr int64_t kWidth = 2 * kDim;

GroupSpec small_group() {
  const Initializer init("linear", 0, 1, 0, 1);
  GroupSpec spec{{{"a", true, 10, 6, 0, init, 1, {}, BoundsCheck::kFatal},
                  {"b", false, 30, 5, 0, init, 1, {}, BoundsCheck::kFatal}},
                 make_record_layout(kDim, DType::kFloat32, nullptr, 0),
                 {{0, 0, false}, {1, 0, false}},
                 false,
                 "lru"};
  return spec;
}

class Accumulation {
 public:
  explicit Accumulation(uint64_t seed)
      : random(seed), engine(std::make_shared<Engine>(small_group())), model(small_group()) {
    device_.resize(11 * kWidth);
  }

  void backward() {
    TestBatch batch;
    batch.batch_size = 1;
    batch.keys = {0, 1};
    for (int key = 0; key < 2; ++key) {
      for (size_t i = random() % 5; i > 0; --i) batch.values.push_back(static_cast<int64_t>(random() % 20));
      batch.offsets.push_back(static_cast<int64_t>(batch.values.size()));
    }
    ModelPlan expected;
    CHECK(model.plan(batch, &expected) == Outcome::kPlan);
    auto plan = engine->plan(batch.input());
    CHECK(expected.pending_out == (*plan)->pending_out && expected.pending_in == (*plan)->pending_in);
    moved_out += (*plan)->pending_out.size();
    moved_in += (*plan)->pending_in.size();
    swap(plan.get());
    if (random() % 4 != 0) add(plan.get(), expected);  // otherwise an abandoned forward
    model.unpin(expected);
    plan->release();
    if (plan->landed()) return;
    const uint64_t serial = (*plan)->serial;
    leaving_.emplace(serial, Leaving{std::move(plan), std::move(leaving_sums_)});
    while (leaving_.size() > random() % 6) land(leaving_.begin()->first);
  }

  // Every pending row is seen exactly once, resident or away, with its sums.
  void check_and_close() {
    if (!leaving_.empty()) CHECK_THROWS(engine->window_rows(), std::runtime_error);
    land_all();
    CHECK(engine->window_open() == !sums.empty());
    const auto [slots, offsets, away, away_offsets] = engine->window_rows();
    std::map<std::pair<int32_t, int64_t>, float> seen;
    std::vector<int64_t> ids;
    std::vector<int32_t> row_slots;
    for (int32_t t = 0; t < 2; ++t) {
      std::tie(ids, row_slots, std::ignore) = engine->tables.rows(t);
      CHECK(std::is_sorted(slots.data() + offsets[t], slots.data() + offsets[t + 1]));
      for (int32_t i = offsets[t]; i < offsets[t + 1]; ++i) {
        const auto row = std::find(row_slots.begin(), row_slots.end(), slots[i]) - row_slots.begin();
        seen[{t, ids[row]}] = device_[slots[i] * kWidth];
      }
    }
    read_away(&seen);
    CHECK(seen == sums);
    engine->close_window();
    CHECK(!engine->window_open());
    const Engine::WindowRows none = engine->window_rows();
    CHECK(none.slot_offsets.back() == 0 && none.rows.empty() && none.row_offsets.back() == 0);
    sums.clear();
    model.pending.clear();
  }

  std::mt19937_64 random;
  std::shared_ptr<Engine> engine;
  Model model;
  std::map<std::pair<int32_t, int64_t>, float> sums;  // (table, id)
  size_t moved_out = 0, moved_in = 0, waited = 0;

  void land_all() {
    while (!leaving_.empty()) land(leaving_.begin()->first);
  }

 private:
  struct Leaving {
    std::unique_ptr<Plan> plan;
    std::vector<float> sums;
  };

  // The host learns of the rows that left: by then their plan is released.
  void land(uint64_t serial) {
    const auto leaving = leaving_.find(serial);
    CHECK(leaving != leaving_.end());
    if (leaving == leaving_.end()) return;
    const Plan& plan = *leaving->second.plan;
    const std::vector<char> records(static_cast<size_t>(plan->rows_out * engine->layout().bytes));
    engine->land(plan, records.data(), leaving->second.sums.data());
    leaving_.erase(leaving);
  }

  void swap(Plan* plan) {
    const PlanBuffers& p = **plan;
    leaving_sums_.clear();
    for (const int32_t i : p.pending_out) {
      const float* sum = &device_[p.swap_out_slots[i] * kWidth];
      leaving_sums_.insert(leaving_sums_.end(), sum, sum + kWidth);
    }
    CHECK(p.window_out == static_cast<int64_t>(p.pending_out.size()));
    for (int64_t o = 0; o < p.window_out; ++o) {
      CHECK(p.window_out_slots[o] == p.swap_out_slots[p.pending_out[static_cast<size_t>(o)]]);
    }
    CHECK(p.window_in == static_cast<int64_t>(p.pending_in.size()));
    for (int64_t q = 0; q < p.window_in; ++q) {
      CHECK(p.window_in_slots[q] == p.swap_in_slots[p.pending_in[static_cast<size_t>(q)]]);
    }
    for (const uint64_t serial : p.sources) land(serial);
    waited += p.sources.size();
    std::vector<char> records(static_cast<size_t>(p.rows_in * engine->layout().bytes));
    engine->read_in(*plan, records.data());
    for (int64_t i = 0; i < p.rows_in; ++i) std::fill_n(&device_[p.swap_in_slots[i] * kWidth], kWidth, 0.0f);
    std::vector<float> staging(p.pending_in.size() * kWidth);
    engine->read_sums(*plan, staging.data());
    Engine::begin({plan});
    for (size_t q = 0; q < p.pending_in.size(); ++q) {
      std::copy_n(&staging[q * kWidth], kWidth, &device_[p.swap_in_slots[p.pending_in[q]] * kWidth]);
    }
    engine->applied(*plan);
    CHECK_THROWS(engine->read_sums(*plan, staging.data()), std::runtime_error);
  }

  void add(Plan* plan, const ModelPlan& expected) {
    engine->mark(*plan);
    for (size_t u = 0; u < expected.unique_ids.size(); ++u) {
      const std::pair<int32_t, int64_t> row = {expected.unique_tables[u], expected.unique_ids[u]};
      const bool open = model.pending[row];
      float* device = &device_[expected.unique_slots[u] * kWidth];
      if (!open) std::fill_n(device, kWidth, 0.0f);
      device[0] += static_cast<float>(u + 1);
      sums[row] += static_cast<float>(u + 1);
      model.pending[row] = true;
    }
  }

  void read_away(std::map<std::pair<int32_t, int64_t>, float>* seen) {
    const auto [slots, offsets, rows, away] = engine->window_rows();
    const int64_t bytes = engine->layout().bytes;
    std::vector<char> records(static_cast<size_t>(away.back() * bytes));
    std::vector<float> host(static_cast<size_t>(away.back() * kWidth));
    engine->read_away(0, away.back(), records.data(), host.data());
    std::vector<int64_t> ids, away_ids(rows.size());
    std::vector<int32_t> row_slots;
    for (int32_t t = 0; t < 2; ++t) {
      std::tie(ids, row_slots, std::ignore) = engine->tables.rows(t);
      size_t row = 0;  // rows ascend, so one sweep meets them all
      for (int32_t i = away[t]; i < away[t + 1]; ++i, ++row) {
        while (row < ids.size() && (row_slots[row] >= 0 || sums.count({t, ids[row]}) == 0)) ++row;
        CHECK(row < ids.size() && rows[i] == static_cast<int64_t>(row));
        if (row >= ids.size()) continue;
        away_ids[i] = ids[row];
        (*seen)[{t, ids[row]}] = host[i * kWidth];
      }
    }
    std::fill(records.begin(), records.end(), static_cast<char>(9));
    for (int32_t t = 0; t < 2; ++t) {
      const int64_t count = away[t + 1] - away[t];
      engine->tables.write_rows(t, {away_ids.data() + away[t], count}, {rows.data() + away[t], count},
                                records.data() + away[t] * bytes);
    }
    std::vector<char> back(records.size());
    engine->read_away(0, away.back(), back.data(), host.data());
    CHECK(back == records);
  }

  std::vector<float> device_;
  std::map<uint64_t, Leaving> leaving_;  // by serial: rows that left the cache and are not in the store yet
  std::vector<float> leaving_sums_;
};

void windows() {
  Accumulation window(3);
  const int rounds = full_tests() ? 60 : 20;
  for (int w = 0; w < rounds; ++w) {
    for (size_t step = window.random() % 30; step > 0; --step) window.backward();
    window.check_and_close();
  }
  CHECK(window.moved_out > 5 * rounds && window.moved_in > rounds && window.waited > rounds / 2);
}

void refusals() {
  Accumulation window(4);
  for (int step = 0; step < 20; ++step) window.backward();
  window.land_all();
  TestBatch batch;
  batch.batch_size = 1;
  batch.keys = {0, 0};
  batch.values = {1};
  batch.offsets = {0, 1};
  const auto plan = window.engine->plan(batch.input());
  std::vector<char> records(
      static_cast<size_t>(((*plan)->rows_in + (*plan)->rows_out) * window.engine->layout().bytes));
  CHECK_THROWS(window.engine->tables.clear(0), std::runtime_error);
  const std::vector<float> sums(static_cast<size_t>((*plan)->window_out * kWidth));
  Engine::begin({plan.get()});
  CHECK_THROWS(window.engine->tables.clear(0), std::runtime_error);
  window.engine->applied(*plan);
  window.engine->land(*plan, records.data(), sums.data());
  CHECK_THROWS(window.engine->tables.clear(0), std::runtime_error);
  plan->release();
  CHECK_THROWS(window.engine->mark(*plan), std::runtime_error);
  window.engine->tables.clear(0);
  const Engine::WindowRows none = window.engine->window_rows();
  CHECK(none.slot_offsets[1] == 0 && none.row_offsets[1] == 0);
}

void all() {
  windows();
  refusals();
}

}  // namespace
}  // namespace rec_sdk

int main() {
  rec_sdk::with_and_without_threads(rec_sdk::all);
  return check_result();
}
