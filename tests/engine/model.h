// A simple model of the planner, written for clarity. It computes the expected plan and the expected records
// in the cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/api/engine.h"

namespace rec_sdk {

struct ModelTable {
  ModelTable(const TableSpec& table, int64_t first) : spec(table), first_slot(first) {}

  TableSpec spec;
  int64_t first_slot;
  std::map<int64_t, int64_t> rows;     // id -> row
  std::map<int64_t, int32_t> slots;    // id -> slot, for cached ids
  std::map<int64_t, int64_t> used_by;  // id -> last batch that used it, for cached ids
  int64_t batches = 0;
  std::map<int32_t, int> pins;                 // slot -> number of plans that pin it
  int64_t used = 0, row_bound = 0;             // numbers of slots and rows that were assigned so far
  std::vector<int64_t> free_rows, free_slots;  // freed rows and slots; the last one is reused first
  std::map<int64_t, float> weights;            // id -> first weight, if it differs from the initial one
  std::map<int64_t, int64_t> seen;             // id -> number of lookups, for ids without a row

  static constexpr int64_t kThreshold = 3;  // the threshold of the rule "count"
  bool admits() const { return spec.rules.admission() != nullptr; }
  int32_t default_slot() const { return static_cast<int32_t>(first_slot + spec.slots); }
  // Returns whether the table does not admit the id. All lookups of the batch must be counted before.
  bool refused(int64_t id) const {
    if (!admits() || rows.count(id) != 0) return false;
    const auto counted = seen.find(id);
    return counted == seen.end() || counted->second < kThreshold;
  }
  void add(int64_t id) {
    if (rows.count(id) == 0) rows[id] = spec.hashed ? take(&free_rows, &row_bound) : id;
  }
  int64_t unused_slots() const { return spec.slots - used + static_cast<int64_t>(free_slots.size()); }
  int32_t take_slot() {
    const bool again = !free_slots.empty();
    return static_cast<int32_t>(take(&free_slots, &used) + (again ? 0 : first_slot));
  }
  bool remove(int64_t id) {
    seen.erase(id);
    const auto row = rows.find(id);
    if (row == rows.end()) return false;
    if (spec.hashed) free_rows.push_back(row->second);
    if (slots.count(id) != 0) free_slots.push_back(slots[id]);
    rows.erase(row);
    slots.erase(id);
    used_by.erase(id);
    weights.erase(id);
    return true;
  }
  static int64_t take(std::vector<int64_t>* free, int64_t* bound) {
    if (free->empty()) return (*bound)++;
    const int64_t number = free->back();
    free->pop_back();
    return number;
  }
};

enum class Outcome { kPlan, kTooSmall, kCapacity, kBounds };

struct ModelPlan {
  std::vector<int32_t> slots, unique_slots, table_offsets{0}, segment_offsets{0}, positions, grad_row,
      grad_column, grad_source;
  std::vector<int32_t> swap_out, swap_in;
  std::vector<float> scale;
  std::vector<int64_t> offsets{0}, unique_ids;
  std::vector<int32_t> unique_tables;
  int64_t bounds_errors = 0;
};

struct TestBatch {
  std::vector<int64_t> values, offsets{0}, keys;
  std::vector<int32_t> values32, offsets32;
  int64_t batch_size = 0;
  bool wide_values = true, wide_offsets = true, weighted = false, joined = false;

  int64_t begin(int64_t feature, int64_t b) const { return offsets[keys[feature] * batch_size + b]; }
  int64_t end(int64_t feature, int64_t b) const { return offsets[keys[feature] * batch_size + b + 1]; }

  BatchInput input() {
    values32.assign(values.begin(), values.end());
    offsets32.assign(offsets.begin(), offsets.end());
    const int64_t n = static_cast<int64_t>(values.size());
    const int64_t m = static_cast<int64_t>(offsets.size());
    BatchInput input;
    input.values = wide_values ? IntArray{values.data(), true, n} : IntArray{values32.data(), false, n};
    input.offsets = wide_offsets ? IntArray{offsets.data(), true, m} : IntArray{offsets32.data(), false, m};
    input.feature_keys = {keys.data(), true, static_cast<int64_t>(keys.size())};
    input.batch_size = batch_size;
    input.weighted = weighted;
    input.joined = joined;
    return input;
  }
};

// Returns a batch of one sample for one feature.
inline TestBatch batch_of(std::vector<int64_t> ids) {
  TestBatch batch;
  batch.values = std::move(ids);
  batch.offsets = {0, static_cast<int64_t>(batch.values.size())};
  batch.keys = {0};
  batch.batch_size = 1;
  return batch;
}

inline std::unique_ptr<Plan> plan_of(Engine* engine, std::vector<int64_t> ids) {
  TestBatch batch = batch_of(std::move(ids));
  return engine->plan(batch.input());
}

// Applies a plan and completes its write-back, for tests in which records and sums do not matter.
inline void swap_rows(Engine* engine, const Plan& plan) {
  const RecordLayout& layout = engine->layout();
  std::vector<char> records(static_cast<size_t>(std::max(plan->rows_out, plan->rows_in) * layout.bytes));
  const std::vector<float> sums(static_cast<size_t>(plan->window_out * 2 * layout.dim));
  engine->read_in(plan, records.data());
  Engine::start_plans({&plan});
  engine->applied(plan);
  engine->complete_write_back(plan, records.data(), sums.data());
}

class Model {
 public:
  explicit Model(const GroupSpec& spec) : features_(spec.features), pooled_(spec.pooled) {
    int64_t first = 0;
    for (const TableSpec& table : spec.tables) {
      tables.emplace_back(table, first);
      first += table.slots + (table.default_row ? 1 : 0);
    }
  }

  std::vector<ModelTable> tables;

  // Plans the batch on a copy of the state, which replaces the state if planning succeeds.
  Outcome plan(const TestBatch& batch, ModelPlan* plan) {
    std::vector<ModelTable> next = tables;
    if (any_fatal(batch)) return Outcome::kBounds;
    for (int32_t t = 0; t < static_cast<int32_t>(next.size()); ++t) {
      const Outcome outcome = add_ids(batch, t, &next[t]);
      if (outcome != Outcome::kPlan) return outcome;
    }
    for (int32_t t = 0; t < static_cast<int32_t>(next.size()); ++t) {
      if (!place_rows(batch, t, &next[t], plan)) return Outcome::kTooSmall;
    }
    tables = std::move(next);
    segments(batch, plan);
    return Outcome::kPlan;
  }

  void unpin(const ModelPlan& plan) {
    for (size_t u = 0; u < plan.unique_slots.size(); ++u)
      --tables[plan.unique_tables[u]].pins[plan.unique_slots[u]];
  }

 private:
  bool outside(int32_t t, int64_t id) const {
    return !tables[t].spec.hashed && (id < 0 || id >= tables[t].spec.num_embeddings);
  }
  int64_t clean(int32_t t, int64_t id) const { return outside(t, id) ? 0 : id; }

  template <class Visit>  // calls visit(feature, sample, id, lookup) for one table, or for all (-1)
  void lookups(const TestBatch& batch, int32_t table, Visit visit) const {
    int64_t lookup = 0;
    for (int64_t f = 0; f < static_cast<int64_t>(features_.size()); ++f) {
      for (int64_t b = 0; b < batch.batch_size; ++b) {
        for (int64_t i = batch.begin(f, b); i < batch.end(f, b); ++i, ++lookup) {
          if (table < 0 || features_[f].table == table) visit(f, b, batch.values[i], lookup);
        }
      }
    }
  }

  bool any_fatal(const TestBatch& batch) const {
    bool fatal = false;
    lookups(batch, -1, [&](int64_t f, int64_t, int64_t id, int64_t) {
      const int32_t t = features_[f].table;
      fatal = fatal || (outside(t, id) && tables[t].spec.bounds_check == BoundsCheck::kFatal);
    });
    return fatal;
  }

  Outcome add_ids(const TestBatch& batch, int32_t t, ModelTable* table) const {
    lookups(batch, t, [&](int64_t, int64_t, int64_t id, int64_t) {
      if (table->admits() && table->rows.count(id) == 0) ++table->seen[id];
    });
    lookups(batch, t, [&](int64_t, int64_t, int64_t id, int64_t) {
      if (table->refused(clean(t, id))) return;
      table->add(clean(t, id));
      table->seen.erase(id);
    });
    const bool full = table->spec.hashed && table->spec.capacity > 0 &&
                      static_cast<int64_t>(table->rows.size()) > table->spec.capacity;
    return full ? Outcome::kCapacity : Outcome::kPlan;
  }

  bool place_rows(const TestBatch& batch, int32_t t, ModelTable* table, ModelPlan* plan) const {
    std::vector<int64_t> ids;
    lookups(batch, t, [&](int64_t, int64_t, int64_t id, int64_t) {
      id = clean(t, id);
      if (table->refused(id)) return;
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    });
    std::vector<int64_t> hits, misses;
    for (const int64_t id : ids) (table->slots.count(id) != 0 ? hits : misses).push_back(id);
    ++table->batches;
    for (const int64_t id : hits) {
      ++table->pins[table->slots[id]];
      table->used_by[id] = table->batches;
    }
    std::vector<int32_t> free;
    if (!evict(needed(*table, misses.size()), table, plan, &free)) return false;
    size_t victim = 0;
    for (const int64_t id : misses) {
      const int32_t slot = table->unused_slots() > 0 ? table->take_slot() : free[victim++];
      table->slots[id] = slot;
      table->pins[slot] = 1;
      table->used_by[id] = table->batches;
      plan->swap_in.push_back(slot);
    }
    for (const int64_t id : ids) {
      plan->unique_ids.push_back(id);
      plan->unique_tables.push_back(t);
      plan->unique_slots.push_back(table->slots[id]);
    }
    plan->table_offsets.push_back(static_cast<int32_t>(plan->unique_ids.size()));
    return true;
  }

  static bool evict(size_t count, ModelTable* table, ModelPlan* plan, std::vector<int32_t>* free) {
    std::vector<std::array<int64_t, 3>> order;  // (last batch, slot, id)
    for (const auto& [id, batch] : table->used_by) order.push_back({batch, table->slots[id], id});
    std::sort(order.begin(), order.end());
    for (const auto& [batch, slot, id] : order) {
      if (free->size() == count) break;
      if (table->pins[static_cast<int32_t>(slot)] > 0) continue;
      free->push_back(static_cast<int32_t>(slot));
      plan->swap_out.push_back(static_cast<int32_t>(slot));
      table->slots.erase(id);
      table->used_by.erase(id);
    }
    return free->size() == count;
  }

  static size_t needed(const ModelTable& table, size_t misses) {
    const size_t fresh = static_cast<size_t>(table.unused_slots());
    return misses > fresh ? misses - fresh : 0;
  }

  void segments(const TestBatch& batch, ModelPlan* plan) const {
    lookups(batch, -1, [&](int64_t f, int64_t, int64_t id, int64_t) {
      const int32_t t = features_[f].table;
      const bool refused = tables[t].refused(clean(t, id));
      plan->slots.push_back(refused ? tables[t].default_slot() : tables[t].slots.at(clean(t, id)));
      plan->bounds_errors += outside(t, id);
    });
    bool any_mean = false;
    for (int64_t f = 0; f < static_cast<int64_t>(features_.size()); ++f) {
      any_mean = any_mean || features_[f].mean;
      for (int64_t b = 0; b < batch.batch_size; ++b) {
        plan->offsets.push_back(plan->offsets.back() + batch.end(f, b) - batch.begin(f, b));
      }
    }
    std::vector<int64_t> first(features_.size(), -1);  // the first lookup of each feature
    lookups(batch, -1, [&](int64_t f, int64_t, int64_t, int64_t lookup) {
      if (first[f] < 0) first[f] = lookup;
    });
    const auto add_lookups = [&](int32_t slot) {
      lookups(batch, -1, [&](int64_t f, int64_t b, int64_t, int64_t lookup) {
        if (plan->slots[lookup] != slot) return;
        plan->positions.push_back(static_cast<int32_t>(lookup));
        plan->grad_row.push_back(static_cast<int32_t>(pooled_        ? b
                                                      : batch.joined ? lookup
                                                                     : lookup - first[f]));
        if (!pooled_ && !batch.joined && features_.size() > 1)
          plan->grad_source.push_back(static_cast<int32_t>(f));
        if (!pooled_) return;
        plan->grad_column.push_back(static_cast<int32_t>(features_[f].column));
        const float length = static_cast<float>(batch.end(f, b) - batch.begin(f, b));
        if (any_mean) plan->scale.push_back(features_[f].mean ? 1.0f / length : 1.0f);
      });
    };
    for (const int32_t slot : plan->unique_slots) {
      add_lookups(slot);
      plan->segment_offsets.push_back(static_cast<int32_t>(plan->positions.size()));
    }
    for (const ModelTable& table : tables) {
      if (table.spec.default_row) add_lookups(table.default_slot());
    }
  }

  std::vector<Feature> features_;
  bool pooled_;
};

}  // namespace rec_sdk
