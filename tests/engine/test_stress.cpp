// Stress test with the threads of an embedding. One thread plans. Another applies plans, completes
// write-backs, trains and releases. A third one reads batches, a fourth one lists, reads and writes whole
// tables, and other threads drop plans. Threads take the locks `planning` and then `launch`, as the embedding
// does. Each thread runs a number of rounds.
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tests/engine/loop.h"
#include "tests/engine/threads.h"
#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

constexpr int64_t kSlots = 64, kIds = 400;

TestBatch random_batch(std::mt19937_64* random) {
  std::vector<int64_t> ids;
  for (int i = 0; i < 12; ++i) ids.push_back(static_cast<int64_t>((*random)() % kIds));
  return batch_of(std::move(ids));
}

// The weight of a row identifies it: id + kIds * number of updates.
class Embedding {
 public:
  Embedding()
      : engine_(std::make_shared<Engine>(one_table(true, kSlots, 0, {Column::kVersion}))),
        cache_(kSlots),
        sums_(kSlots) {}

  void plan_batches() {
    std::mt19937_64 random(1);
    while (!stop) {
      const std::lock_guard<std::recursive_mutex> planning(planning_);
      TestBatch batch = random_batch(&random);
      std::unique_ptr<Plan> plan;
      try {
        plan = engine_->plan(batch.input());
      } catch (const CacheTooSmallError&) {
        continue;
      }
      if (random() % 2 == 0) {  // reads missing rows ahead, without a lock
        std::vector<char> ahead(static_cast<size_t>((*plan)->rows_in * bytes()));
        engine_->read_ahead(*plan, ahead.data());
      }
      if (random() % 16 == 0) {
        const std::lock_guard<std::recursive_mutex> launch(launch_);
        engine_->cancel(*plan);
        continue;
      }
      const std::lock_guard<std::mutex> guard(queue_mutex_);
      if (queue_.size() < 3) queue_.push_back({std::move(plan), batch.values});
      ++planned;
      if (plan == nullptr) continue;
      const std::lock_guard<std::mutex> dropping(dropped_mutex_);  // another thread may be about to apply it
      dropped_.push_back(std::move(plan));
    }
  }

  void launch_batches() {
    std::mt19937_64 random(2);
    while (!stop) {
      Batch batch;
      {
        const std::lock_guard<std::mutex> guard(queue_mutex_);
        if (!queue_.empty()) {
          batch = std::move(queue_.front());
          queue_.pop_front();
        }
      }
      if (batch.plan == nullptr) {
        std::this_thread::yield();
        continue;
      }
      const std::lock_guard<std::recursive_mutex> launch(launch_);
      apply(batch.plan.get());
      train(batch, random() % 3 == 0);
      if (random() % 2 == 0) land_one();
      ++launched;
      const std::lock_guard<std::mutex> guard(dropped_mutex_);
      dropped_.push_back(std::move(batch.plan));
    }
  }

  void drop_plans() {  // takes no lock of the embedding, like Python's garbage collector
    while (!stop) {
      std::deque<std::unique_ptr<Plan>> dropped;
      {
        const std::lock_guard<std::mutex> guard(dropped_mutex_);
        dropped.swap(dropped_);
      }
      if (dropped.empty()) std::this_thread::yield();
      for (const auto& plan : dropped) plan->release();
    }
  }

  void read() {
    std::mt19937_64 random(3);
    while (!stop) {
      TestBatch batch = random_batch(&random);
      const std::lock_guard<std::recursive_mutex> planning(planning_);
      const std::lock_guard<std::recursive_mutex> launch(launch_);
      apply(nullptr);
      const auto found = engine_->find(batch.input(), 0, 1);
      for (const uint64_t serial : found->sources) land(serial);
      std::vector<char> host(found->host_rows.size() * static_cast<size_t>(bytes()));
      engine_->read(*found, host.data());
      const size_t resident = found->resident_slots.size();
      for (size_t i = 0; i < batch.values.size(); ++i) {
        const size_t index = static_cast<size_t>(found->index[i]);
        const float given = found->all_resident ? cache_[index]
                            : index < resident  ? cache_[found->resident_slots[index]]
                                                : weight(&host[(index - resident) * bytes()]);
        CHECK(given == expected(batch.values[i]));
      }
      ++reads;
      std::this_thread::sleep_for(
          std::chrono::microseconds(50));  // lets other threads take the mutex, which is not fair
    }
  }

  void whole_tables() {
    std::mt19937_64 random(4);
    while (!stop) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      engine_->tables.stats();
      engine_->tables.memory();
      engine_->saves.version();
      const std::lock_guard<std::recursive_mutex> planning(planning_);
      const std::lock_guard<std::recursive_mutex> launch(launch_);
      apply(nullptr);
      while (!leaving_.empty()) land_one();
      check_table();
      if (random() % 2 == 0) write_one(&random);
      if (random() % 2 == 0) end_window();
      if (random() % 4 == 0) remove_one(&random);
      ++listings;
    }
  }

  // Checks, after the threads have ended, that no slot is in use and each row has its expected weight.
  void finish() {
    queue_.clear();
    dropped_.clear();
    apply(nullptr);
    while (!leaving_.empty()) land_one();
    check_table();
    CHECK(engine_->in_flight() == 0);
  }

  std::atomic<bool> stop{false};
  std::atomic<int64_t> planned{0}, launched{0}, reads{0}, listings{0};

 private:
  struct Batch {
    std::unique_ptr<Plan> plan;
    std::vector<int64_t> ids;
  };
  struct Leaving {
    std::unique_ptr<Plan> plan;
    std::vector<char> records;
    std::vector<float> sums;
  };

  int64_t bytes() const { return engine_->layout().bytes; }
  static float weight(const char* record) {
    float value;
    std::memcpy(&value, record, sizeof value);
    return value;
  }
  float expected(int64_t id) {
    const auto found = weights_.find(id);
    if (found != weights_.end()) return found->second;
    std::vector<char> record(static_cast<size_t>(bytes()));
    engine_->tables.initial_records(0, {&id, 1}, record.data());
    return weight(record.data());
  }

  void apply(const Plan* upto) {
    for (std::unique_ptr<Plan>& handle : engine_->unapplied(upto)) apply_one(std::move(handle));
  }

  void apply_one(std::unique_ptr<Plan> handle) {
    const PlanBuffers& p = **handle;
    for (const uint64_t serial : p.sources) land(serial);
    std::vector<char> in(static_cast<size_t>(p.rows_in * bytes()));
    std::vector<float> sums_in(static_cast<size_t>(p.window_in * 2 * kDim));
    engine_->read_in(*handle, in.data());
    engine_->read_sums(*handle, sums_in.data());
    Leaving leaving;
    leaving.records.resize(static_cast<size_t>(p.rows_out * bytes()));
    leaving.sums.resize(static_cast<size_t>(p.window_out * 2 * kDim));
    for (int64_t i = 0; i < p.rows_out; ++i) {
      std::memcpy(&leaving.records[i * bytes()], &cache_[p.swap_out_slots[i]], sizeof(float));
    }
    for (int64_t i = 0; i < p.window_out; ++i) leaving.sums[i * 2 * kDim] = sums_[p.window_out_slots[i]];
    Engine::start_plans({handle.get()});
    for (int64_t i = 0; i < p.window_out; ++i) sums_[p.window_out_slots[i]] = 0;
    for (int64_t i = 0; i < p.window_in; ++i) sums_[p.window_in_slots[i]] = sums_in[i * 2 * kDim];
    for (int64_t i = 0; i < p.rows_in; ++i) cache_[p.swap_in_slots[i]] = weight(&in[i * bytes()]);
    engine_->applied(*handle);
    const uint64_t serial = p.serial;
    if (p.rows_out == 0) return;
    leaving.plan = std::move(handle);
    leaving_.emplace(serial, std::move(leaving));
  }

  void train(const Batch& batch, bool window) {
    const PlanBuffers& p = **batch.plan;
    if (window) engine_->mark(*batch.plan);
    for (size_t i = 0; i < batch.ids.size(); ++i) {
      CHECK(cache_[p.slots[i]] == expected(batch.ids[i]));
      const auto sum = open_.find(batch.ids[i]);
      CHECK(sums_[p.slots[i]] == (sum == open_.end() ? 0 : sum->second));
    }
    for (size_t i = 0; i < batch.ids.size(); ++i) {
      ++updates_;
      if (window) {
        open_[batch.ids[i]] = sums_[p.slots[i]] = static_cast<float>(updates_ % 1000000);
      } else {
        weights_[batch.ids[i]] = cache_[p.slots[i]] = static_cast<float>(updates_ % 1000000);
      }
    }
  }

  void land(uint64_t serial) {
    const std::lock_guard<std::mutex> landing(landing_);
    const auto leaving = leaving_.find(serial);
    if (leaving == leaving_.end()) return;
    engine_->complete_write_back(*leaving->second.plan, leaving->second.records.data(),
                                 leaving->second.sums.data());
    leaving_.erase(leaving);
  }
  void land_one() {
    if (!leaving_.empty()) land(leaving_.begin()->first);
  }

  void check_table() {
    const auto [ids, slots, rows] = engine_->tables.rows(0);
    std::vector<char> records(ids.size() * static_cast<size_t>(bytes()));
    engine_->tables.read_rows(0, ids, rows, records.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      CHECK((slots[i] < 0 ? weight(&records[i * bytes()]) : cache_[slots[i]]) == expected(ids[i]));
    }
    CHECK(engine_->tables.row_count(0) == static_cast<int64_t>(ids.size()));
    engine_->saves.changed_ids(0, engine_->saves.version());
  }

  void write_one(std::mt19937_64* random) {
    const int64_t id = static_cast<int64_t>((*random)() % kIds);
    const auto [rows, slots] = engine_->tables.insert(0, {&id, 1});
    const float value = static_cast<float>(++updates_ % 1000000);
    std::vector<char> record(static_cast<size_t>(bytes()));
    std::memcpy(record.data(), &value, sizeof value);
    engine_->tables.write_rows(0, {&id, 1}, rows, record.data());
    if (slots[0] >= 0) cache_[slots[0]] = value;
    weights_[id] = value;
  }

  void end_window() {
    const Engine::WindowRows found = engine_->window_rows();
    CHECK(found.slots.size() + found.rows.size() == open_.size());
    for (const int32_t slot : found.slots) sums_[slot] = 0;
    engine_->close_window();
    open_.clear();
  }

  void remove_one(std::mt19937_64* random) {
    const int64_t id = static_cast<int64_t>((*random)() % kIds);
    try {
      if (engine_->tables.remove(0, {&id, 1}) == 1) weights_.erase(id);
    } catch (const std::runtime_error&) {  // a row is in flight, or has a sum in the window
    }
  }

  const std::shared_ptr<Engine> engine_;
  std::recursive_mutex planning_, launch_;
  std::mutex landing_, queue_mutex_, dropped_mutex_;
  std::deque<Batch> queue_;
  std::deque<std::unique_ptr<Plan>> dropped_;
  // `launch_` protects the following members.
  std::vector<float> cache_, sums_;
  std::map<uint64_t, Leaving> leaving_;
  std::map<int64_t, float> weights_, open_;
  int64_t updates_ = 0;
};

void stress(int64_t rounds) {
  Embedding embedding;
  std::vector<std::thread> threads;
  threads.emplace_back([&] { embedding.plan_batches(); });
  threads.emplace_back([&] { embedding.launch_batches(); });
  threads.emplace_back([&] { embedding.drop_plans(); });
  threads.emplace_back([&] { embedding.read(); });
  threads.emplace_back([&] { embedding.whole_tables(); });
  for (const std::atomic<int64_t>* done :
       {&embedding.planned, &embedding.launched, &embedding.reads, &embedding.listings}) {
    while (*done < rounds) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  embedding.stop = true;
  for (std::thread& thread : threads) thread.join();
  embedding.finish();
}

TEST(threads_of_an_embedding) {
  stress(300);
  set_parallel_runner(run_on_threads, eight_threads, 0);
  stress(30);
  set_parallel_runner(nullptr, nullptr);
}

}  // namespace
}  // namespace rec_sdk
