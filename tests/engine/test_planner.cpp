// The planner, compared with the simple model in random batches: every array of every plan, the records in
// the cache, failures that must change nothing, removed and refused ids, reads, and calls on whole tables.
#include <cstdlib>
#include <deque>
#include <map>
#include <stdexcept>
#include <tuple>

#include "tests/engine/model.h"
#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

constexpr int64_t kDim = 3;

template <class T>
bool same(const std::vector<T>& expected, const T* given, int64_t count) {
  return static_cast<int64_t>(expected.size()) == count &&
         std::equal(expected.begin(), expected.end(), given);
}

constexpr float kDefaultWeight = 77;

TableSpec table_spec(const std::string& name, bool hashed, int64_t rows, int64_t slots, int64_t capacity,
                     BoundsCheck bounds) {
  return {name, hashed, rows, slots, capacity, Initializer("uniform", -1, 1, 0, 1), 5, {0.5f}, bounds};
}

GroupSpec group_spec(bool pooled, bool mean, BoundsCheck bounds) {
  const int64_t states[] = {kDim};
  GroupSpec spec{{table_spec("a", true, 10, 24, 0, bounds), table_spec("b", false, 60, 17, 0, bounds),
                  table_spec("c", true, 10, 30, 45, bounds)},
                 make_record_layout(kDim, DType::kFloat32, states, 1),
                 {{0, 0, false}, {0, 9, mean}, {1, 3, mean}, {2, 6, false}},
                 pooled,
                 "lru"};
  spec.origins = true;
  return spec;
}

GroupSpec with_defaults(GroupSpec spec) {
  for (TableSpec& table : spec.tables) {
    table.default_row = true;  // an index table must ignore this
    if (!table.hashed) continue;
    table.rules = Rules({{"count", {{"threshold", ModelTable::kThreshold}}}});
  }
  return spec;
}

// A training loop that uses an engine and a model: the device cache, and the steps of the loop.
class Trainer {
 public:
  Trainer(const GroupSpec& spec, uint64_t seed)
      : random(seed), model(spec), engine(std::make_shared<Engine>(spec)), bytes_(spec.layout.bytes) {
    int64_t slots = 0;
    for (const TableSpec& table : spec.tables) slots += table.slots + (table.default_row ? 1 : 0);
    cache_.resize(static_cast<size_t>(slots * bytes_));
    for (const ModelTable& table : model.tables) {
      if (table.spec.default_row) *cache_weight(table.default_slot()) = kDefaultWeight;
    }
    features_ = spec.features;
    pooled_ = spec.pooled;
  }

  TestBatch random_batch(int64_t batch_size, int max_length, int64_t spread) {
    TestBatch batch;
    const int64_t keys = 3 + static_cast<int64_t>(random() % 2);
    batch.batch_size = batch_size;
    batch.wide_values = random() % 2 != 0;
    batch.wide_offsets = random() % 2 != 0;
    batch.weighted = random() % 2 != 0;
    batch.joined = batch.weighted;  // of sequences; weights belong to bags
    for (int64_t bag = 0; bag < keys * batch_size; ++bag) {
      const int64_t length = static_cast<int64_t>(random() % static_cast<uint64_t>(max_length + 1));
      for (int64_t i = 0; i < length; ++i) {
        const int64_t id = static_cast<int64_t>(random() % static_cast<uint64_t>(spread));
        batch.values.push_back(random() % 8 == 0 ? id / 8 : id);
        if (random() % 150 == 0) batch.values.back() = -static_cast<int64_t>(random() % 4);
      }
      batch.offsets.push_back(static_cast<int64_t>(batch.values.size()));
    }
    for (size_t f = 0; f < features_.size(); ++f)
      batch.keys.push_back(static_cast<int64_t>(random()) & (keys - 1));
    for (int64_t& key : batch.keys) key = std::min(key & 3, keys - 1);
    return batch;
  }

  void step(TestBatch batch) {
    ModelPlan expected;
    const Outcome outcome = model.plan(batch, &expected);
    ++outcomes[static_cast<int>(outcome)];
    if (outcome != Outcome::kPlan) {
      must_fail(&batch, outcome);
      return;
    }
    const int64_t bounds_errors = engine->tables.stats().bounds_errors;
    std::unique_ptr<Plan> plan = engine->plan(batch.input());
    check_plan(expected, **plan, batch);
    CHECK(engine->tables.stats().bounds_errors == bounds_errors);
    swap(**plan, plan.get());
    CHECK(engine->tables.stats().bounds_errors == bounds_errors + expected.bounds_errors);
    check_and_update_records(expected);
    in_flight.emplace_back(std::move(plan), std::move(expected));
    while (in_flight.size() > random() % 4) finish();
  }

  // Removes random ids of a table, which batches in flight may use.
  void remove() {
    const int32_t t = static_cast<int32_t>(random() % model.tables.size());
    ModelTable& table = model.tables[t];
    std::vector<int64_t> ids;
    for (size_t i = random() % 12; i > 0; --i) ids.push_back(static_cast<int64_t>(random() % 50));
    const int64_t count = static_cast<int64_t>(ids.size());
    const auto in_use = [&](int64_t id) {
      return table.slots.count(id) != 0 && table.pins[table.slots[id]] > 0;
    };
    if (std::any_of(ids.begin(), ids.end(), in_use)) {
      ++refused_removals;
      CHECK_THROWS(engine->tables.remove(t, {ids.data(), count}), std::runtime_error);
      return;
    }
    int64_t known = 0;
    for (const int64_t id : ids) known += table.remove(id);
    removed += known;
    CHECK(engine->tables.remove(t, {ids.data(), count}) == known);
  }

  void finish() {  // releases the oldest or the newest batch in flight
    const bool newest = random() % 4 == 0;
    auto& done = newest ? in_flight.back() : in_flight.front();
    model.unpin(done.second);
    if (random() % 2 == 0) done.first->release();
    newest ? in_flight.pop_back() : in_flight.pop_front();
  }

  float expected_weight(int32_t t, int64_t id) {
    if (model.tables[t].admits() && model.tables[t].rows.count(id) == 0) return kDefaultWeight;
    const auto& written = model.tables[t].weights;
    const auto found = written.find(id);
    if (found != written.end()) return found->second;
    std::vector<char> record(static_cast<size_t>(bytes_));
    engine->tables.initial_records(t, {&id, 1}, record.data());
    return weight(record.data());
  }

  float* cache_weight(int32_t slot) { return reinterpret_cast<float*>(&cache_[slot * bytes_]); }
  static float weight(const char* record) {
    float value;
    std::memcpy(&value, record, sizeof value);
    return value;
  }

  void check_tables();
  void check_reads(TestBatch batch);

  std::mt19937_64 random;
  Model model;
  std::shared_ptr<Engine> engine;
  std::deque<std::pair<std::unique_ptr<Plan>, ModelPlan>> in_flight;
  int outcomes[4] = {};
  int64_t removed = 0, refused_removals = 0, defaults = 0, hot = 0, arrivals = 0;

 private:
  void must_fail(TestBatch* batch, Outcome outcome) {
    Outcome thrown = Outcome::kPlan;
    try {
      engine->plan(batch->input());
    } catch (const CacheTooSmallError&) {
      thrown = Outcome::kTooSmall;
    } catch (const CapacityError&) {
      thrown = Outcome::kCapacity;
    } catch (const std::out_of_range&) {
      thrown = Outcome::kBounds;
    }
    CHECK(thrown == outcome);
    check_tables();
  }

  void check_plan(const ModelPlan& expected, const PlanBuffers& plan, const TestBatch& batch) {
    CHECK(same(expected.slots, plan.slots, plan.lookups));
    CHECK((plan.offsets != nullptr) == pooled_);
    CHECK(plan.offsets == nullptr || same(expected.offsets, plan.offsets, plan.bags + 1));
    CHECK(expected.table_offsets == plan.table_offsets);
    const int32_t end = expected.segment_offsets.back();
    CHECK(plan.segment_offsets[0] == 0 && plan.segment_offsets[plan.uniques] == end);
    for (int64_t i = end; i < plan.lookups; ++i, ++defaults) {
      CHECK(plan.grad_row[i] == expected.grad_row[i]);
      CHECK(plan.grad_source == nullptr || plan.grad_source[i] == expected.grad_source[i]);
      CHECK(plan.positions == nullptr || plan.positions[i] == expected.positions[i]);
      CHECK(plan.grad_column == nullptr || plan.grad_column[i] == expected.grad_column[i]);
      CHECK(plan.scale == nullptr || plan.scale[i] == expected.scale[i]);
    }
    CHECK((plan.positions != nullptr) == (pooled_ && batch.weighted));
    CHECK((plan.grad_column != nullptr) == pooled_);
    CHECK((plan.grad_source != nullptr) == (!pooled_ && !batch.joined));
    CHECK((plan.scale != nullptr) == !expected.scale.empty() || plan.lookups == 0);
    CHECK(segments(plan.table_offsets, plan.unique_slots, plan.segment_offsets, plan.positions, plan.grad_row,
                   plan.grad_column, plan.grad_source, plan.scale) ==
          segments(plan.table_offsets, expected.unique_slots.data(), expected.segment_offsets.data(),
                   plan.positions == nullptr ? nullptr : expected.positions.data(), expected.grad_row.data(),
                   plan.grad_column == nullptr ? nullptr : expected.grad_column.data(),
                   plan.grad_source == nullptr ? nullptr : expected.grad_source.data(),
                   plan.scale == nullptr ? nullptr : expected.scale.data()));
    check_hot_segments(plan);
    CHECK(same(expected.swap_out, plan.swap_out_slots, plan.rows_out));
    CHECK(same(expected.swap_in, plan.swap_in_slots, plan.rows_in));
    check_origins(plan);
    check_places(plan);
    CHECK(plan.pending_out.empty() && plan.pending_in.empty());
  }

  // Checks that, before the swap, the row of each lookup is where `origins` says: in a slot or among the rows
  // in.
  void check_origins(const PlanBuffers& plan) {
    CHECK((plan.origins != nullptr) == (plan.rows_in > 0));
    if (plan.origins == nullptr) return;
    const auto slots = static_cast<int32_t>(static_cast<int64_t>(cache_.size()) / bytes_);
    std::map<int32_t, int32_t> coming;
    for (int64_t i = 0; i < plan.rows_in; ++i) coming[plan.swap_in_slots[i]] = static_cast<int32_t>(i);
    for (int64_t j = 0; j < plan.lookups; ++j) {
      const auto found = coming.find(plan.slots[j]);
      CHECK(plan.origins[j] == (found == coming.end() ? plan.slots[j] : slots + found->second));
      arrivals += found == coming.end() ? 0 : 1;
    }
  }

  // Checks that swap_out_places gives, for each row in, the index of the victim whose slot it gets.
  void check_places(const PlanBuffers& plan) {
    CHECK((plan.swap_out_places != nullptr) == (plan.rows_out > 0));
    int32_t out = 0;
    for (int64_t i = 0; i < plan.rows_in && plan.rows_out > 0; ++i) {
      const bool leaves = out < plan.rows_out && plan.swap_out_slots[out] == plan.swap_in_slots[i];
      CHECK(plan.swap_out_places[i] == (leaves ? out : -1));
      out += leaves ? 1 : 0;
    }
    CHECK(out == plan.rows_out || plan.rows_out == 0);
  }

  void check_hot_segments(const PlanBuffers& plan) {
    int64_t chunks = 0, found = 0;
    for (int32_t u = 0; u < plan.uniques; ++u) {
      const int32_t first = plan.segment_offsets[u], lookups = plan.segment_offsets[u + 1] - first;
      if (lookups <= 128) continue;
      CHECK(found < plan.hot);
      const rec_sdk::HotSegment& segment = plan.hot_segments[found++];
      CHECK(segment.row == u && segment.first_lookup == first);
      CHECK(segment.chunks == lookups / 128 && segment.chunks_before == chunks);
      chunks += segment.chunks;
    }
    CHECK(found == plan.hot);
    hot += found;
  }

  // [T] For each slot, the values that the update reads for its lookups, in order. The order of the rows of a
  // table may depend on the number of threads, and is ignored.
  using Lookup = std::tuple<int32_t, int32_t, int32_t, int32_t, float>;
  using Segments = std::vector<std::map<int32_t, std::vector<Lookup>>>;
  static Segments segments(const std::vector<int32_t>& table_offsets, const int32_t* slots,
                           const int32_t* offsets, const int32_t* positions, const int32_t* grad_row,
                           const int32_t* grad_column, const int32_t* grad_source, const float* scale) {
    const auto value = [](const auto* array, int32_t i) { return array == nullptr ? 0 : array[i]; };
    Segments found(table_offsets.size() - 1);
    for (size_t t = 0; t < found.size(); ++t) {
      for (int32_t u = table_offsets[t]; u < table_offsets[t + 1]; ++u) {
        std::vector<Lookup>& segment = found[t][slots[u]];
        CHECK(segment.empty() && offsets[u] < offsets[u + 1]);
        for (int32_t i = offsets[u]; i < offsets[u + 1]; ++i) {
          segment.emplace_back(value(positions, i), grad_row[i], value(grad_column, i), value(grad_source, i),
                               value(scale, i));
        }
      }
    }
    return found;
  }

  void swap(const PlanBuffers& plan, Plan* handle) {
    std::vector<char> out(static_cast<size_t>(plan.rows_out * bytes_)),
        in(static_cast<size_t>(plan.rows_in * bytes_));
    for (int64_t i = 0; i < plan.rows_out; ++i) {
      std::memcpy(&out[i * bytes_], &cache_[plan.swap_out_slots[i] * bytes_], static_cast<size_t>(bytes_));
    }
    CHECK(plan.sources.empty());  // because every write-back is completed before the next plan
    engine->read_in(*handle, in.data());
    Engine::start_plans({handle});
    for (int64_t i = 0; i < plan.rows_in; ++i) {
      std::memcpy(&cache_[plan.swap_in_slots[i] * bytes_], &in[i * bytes_], static_cast<size_t>(bytes_));
    }
    engine->applied(*handle);
    CHECK(handle->written_back() == (plan.rows_out == 0));
    engine->complete_write_back(*handle, out.data(), nullptr);
    CHECK(handle->written_back());
  }

  void check_and_update_records(const ModelPlan& plan) {
    for (size_t u = 0; u < plan.unique_ids.size(); ++u) {
      const int32_t t = plan.unique_tables[u];
      const int64_t id = plan.unique_ids[u];
      CHECK(*cache_weight(plan.unique_slots[u]) == expected_weight(t, id));
      model.tables[t].weights[id] = *cache_weight(plan.unique_slots[u]) = static_cast<float>(++version_);
    }
  }

  std::vector<char> cache_;
  std::vector<Feature> features_;
  bool pooled_ = false;
  int64_t bytes_;
  int version_ = 10;
};

void Trainer::check_tables() {
  for (int32_t t = 0; t < static_cast<int32_t>(model.tables.size()); ++t) {
    const ModelTable& expected = model.tables[t];
    const auto [ids, slots, numbers] = engine->tables.rows(t);
    const int64_t rows =
        expected.spec.hashed ? static_cast<int64_t>(expected.rows.size()) : expected.spec.num_embeddings;
    CHECK(static_cast<int64_t>(ids.size()) == rows && engine->tables.row_count(t) == rows);
    CHECK(numbers.size() == ids.size() && slots.size() == ids.size());
    std::vector<char> records(static_cast<size_t>(rows * bytes_));
    engine->tables.read_rows(t, {ids.data(), rows}, {numbers.data(), rows}, records.data());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t id = ids[row];
      if (expected.spec.hashed) CHECK(expected.rows.count(id) == 1 && expected.rows.at(id) == numbers[row]);
      const auto resident = expected.slots.find(id);
      CHECK(slots[row] == (resident == expected.slots.end() ? -1 : resident->second));
      const float given = slots[row] < 0 ? weight(&records[row * bytes_]) : *cache_weight(slots[row]);
      CHECK(given == expected_weight(t, id));
    }
  }
}

void Trainer::check_reads(TestBatch batch) {
  const BatchInput input = batch.input();
  const int64_t bags = static_cast<int64_t>(batch.keys.size()) * batch.batch_size;
  const std::vector<int64_t> ranges = bag_ranges(input, static_cast<int64_t>(batch.keys.size()), 7);
  CHECK(ranges.front() == 0 && ranges.back() == bags);
  for (size_t r = 0; r + 1 < ranges.size(); ++r) {
    const auto plan = engine->find(input, ranges[r], ranges[r + 1]);
    CHECK(plan->index.size() <= 7 || ranges[r + 1] == ranges[r] + 1);
    std::vector<char> host(plan->host_rows.size() * static_cast<size_t>(bytes_));
    engine->read(*plan, host.data());
    const size_t resident = plan->resident_slots.size();
    size_t i = 0;
    for (int64_t bag = ranges[r]; bag < ranges[r + 1]; ++bag) {
      const int64_t f = bag / batch.batch_size;
      const int32_t t = features_[f].table;
      CHECK(plan->offsets[bag - ranges[r]] == static_cast<int64_t>(i));
      for (int64_t v = batch.begin(f, bag % batch.batch_size); v < batch.end(f, bag % batch.batch_size);
           ++v, ++i) {
        const ModelTable& table = model.tables[t];
        const bool bad =
            !table.spec.hashed && (batch.values[v] < 0 || batch.values[v] >= table.spec.num_embeddings);
        const float expected = expected_weight(t, bad ? 0 : batch.values[v]);
        const size_t index = static_cast<size_t>(plan->index[i]);
        const float given = plan->all_resident ? *cache_weight(plan->index[i])
                            : index < resident ? *cache_weight(plan->resident_slots[index])
                                               : weight(&host[(index - resident) * bytes_]);
        CHECK(given == expected);
      }
    }
    CHECK(plan->offsets.back() == static_cast<int64_t>(i) && plan->index.size() == i);
  }
}

constexpr int kRounds = 500;

// Returns the number of rounds, which is smaller under a slow sanitizer.
int training_rounds() {
  const char* const rounds = std::getenv("REC_SDK_TEST_ROUNDS");
  return rounds != nullptr ? std::atoi(rounds) : full_tests() ? kRounds : kRounds / 4;
}

void train(bool pooled, bool mean, BoundsCheck bounds, uint64_t seed, bool defaults = false) {
  const GroupSpec spec = group_spec(pooled, mean, bounds);
  Trainer trainer(defaults ? with_defaults(spec) : spec, seed);
  const int rounds = training_rounds();
  for (int i = 0; i < rounds; ++i) {
    const int64_t spread = i % 40 < 36 ? 20 + i % 30 : 60;
    TestBatch batch =
        trainer.random_batch(static_cast<int64_t>(trainer.random() % 5), i % 9 == 0 ? 9 : 4, spread);
    trainer.step(batch);
    if (seed % 2 == 0 && i % 3 == 0) trainer.remove();
    if (i % 10 == 0) {
      const Stats before = trainer.engine->tables.stats();
      if (bounds != BoundsCheck::kFatal) trainer.check_reads(trainer.random_batch(3, 4, 70));
      CHECK(trainer.engine->tables.stats().lookups == before.lookups);
      trainer.check_tables();
    }
  }
  std::printf("plans %d, too small %d, full %d, out of range %d\n", trainer.outcomes[0], trainer.outcomes[1],
              trainer.outcomes[2], trainer.outcomes[3]);
  CHECK(trainer.outcomes[0] > rounds / 5);
  CHECK((trainer.defaults > rounds / 5) == defaults);
  if (rounds == kRounds) {
    CHECK(trainer.outcomes[1] > 5);
    CHECK(seed % 2 != 0 || (trainer.removed > 100 && trainer.refused_removals > 10));
    if (bounds == BoundsCheck::kFatal) CHECK(trainer.outcomes[3] > 5);
  }
  while (!trainer.in_flight.empty()) trainer.finish();
  trainer.engine->tables.clear(0);
  CHECK(trainer.engine->tables.row_count(0) == 0);
}

GroupSpec big_spec(bool defaults) {
  GroupSpec spec = group_spec(false, false, BoundsCheck::kNone);
  for (TableSpec& table : spec.tables) table.slots = 1500;
  spec.tables[1].num_embeddings = 4000;
  spec.tables[2].capacity = 2200;
  return defaults ? with_defaults(spec) : spec;
}

// Plans batches so large that the id map grows in the middle of a scan, also of a scan that then fails.
void big_batches(bool defaults) {
  Trainer trainer(big_spec(defaults), 11);
  const int rounds = training_rounds() == kRounds ? 24 : 8;
  for (int i = 0; i < rounds; ++i) {
    TestBatch batch = trainer.random_batch(6, 120, i % 4 == 3 ? 20000 : 500 + 400 * (i % 5));
    trainer.step(batch);
    trainer.check_tables();
  }
  CHECK(trainer.outcomes[0] > rounds / 5 &&
        (defaults || trainer.outcomes[2] + trainer.outcomes[1] > rounds / 12));
  CHECK((trainer.defaults > 100) == defaults);
}

// Parallel scans in which several threads locate the lookups of the same table.
THREADED_TEST(long_pieces) {
  Trainer trainer(big_spec(true), 17);
  for (int i = 0; i < 4; ++i) {
    trainer.step(trainer.random_batch(6, 3000, i % 2 == 0 ? 900 : 120));
    trainer.check_tables();
  }
  CHECK(trainer.outcomes[0] == 4);
  CHECK(trainer.hot > 100);
  CHECK(trainer.arrivals > 100);
}

THREADED_TEST(memory_refused) {
  GroupSpec spec = group_spec(false, false, BoundsCheck::kNone);
  Trainer trainer(spec, 12);
  for (int i = 0; i < 6; ++i) trainer.step(trainer.random_batch(2, 3, 20));
  while (!trainer.in_flight.empty()) trainer.finish();
  trainer.engine->tables.set_memory_limit(0);
  TestBatch batch;
  batch.batch_size = 20;
  for (int64_t i = 0; i < 20; ++i) {
    batch.values.push_back(1000 + i);
    batch.offsets.push_back(i + 1);
  }
  batch.keys = {0, 0, 0, 0};
  CHECK_THROWS(trainer.engine->plan(batch.input()), MemoryLimitError);
  trainer.check_tables();
  trainer.engine->tables.set_memory_limit(int64_t{1} << 40);
  trainer.step(batch);
  trainer.check_tables();
}

THREADED_TEST(training) {
  train(false, false, BoundsCheck::kFatal, 1);
  train(true, false, BoundsCheck::kWarning, 2);
  train(true, true, BoundsCheck::kIgnore, 3);
  train(false, false, BoundsCheck::kFatal, 4);
  for (const bool mean : {false, true}) {
    train(true, mean, BoundsCheck::kIgnore, 5, true);
    train(false, mean, BoundsCheck::kIgnore, 6, true);
    train(true, mean, BoundsCheck::kWarning, 8, true);
  }
}

THREADED_TEST(batches_of_many_blocks) {
  big_batches(false);
  big_batches(true);
}

}  // namespace
}  // namespace rec_sdk
