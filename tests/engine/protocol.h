// The protocol of a batch: which thread does what in which order, as in rec_sdk_torch/tbe, on the real engine
// and a device that runs nothing by itself. Each step() is one thing that a thread, or a stream, does with
// nothing of another between. Functions have the names of the Python functions that they model.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

#include "tests/engine/model.h"
#include "tests/engine/protocol_device.h"
#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {

// Mistakes that a driver could make.
enum class Bug {
  kNone,
  kLandsEarly,        // rows are taken to the store before their copy has arrived there
  kForgetsLate,       // rows that were late are not brought in
  kEndsPinsAtLookup,  // a row may leave before its update is launched
  kDoesNotFollow,     // pins end when the update is launched, and the row leaves by another stream
  kReusesStaging,     // staging is handed out again while a copy uses it
  kReusesMemory,      // the same on the device: no record_stream()
  kScattersEarly,     // rows are brought in without waiting for their copy
  kFetchesEarly,      // rows leave without waiting for the kernel that took them out of their slots
  kWritesFirst,       // rows come into slots before those that leave have been read
  kReadsUnsettled,    // a save reads the cache, which the updates have not reached, from a stream of its own
  kKeepsPins,         // a batch is never released
  kKeepsLock,         // a thread that waited for a copy to land keeps others from landing
  kUpdatesUntaken,    // a row changes that a snapshot waits for, and it was not put aside
  kUpdatesFirst,      // it is put aside when its update is launched already
  kTakesUnlocked,     // a snapshot takes rows under the launch lock, and reads them after it
  kTakesUnordered,    // a snapshot reads the cache without waiting for the stream of the last batch
};

// The work of the thread that saves.
enum class Saver {
  kNone,
  kWhole,  // reads whole tables while no other thread goes on
  kAll,    // a snapshot of all rows: those that are left, as many as there are at a time
  kIds,    // a snapshot of ids: one at a time
};

enum class Kind {
  kTrain,    // forward, backward
  kForward,  // its output is dropped
  kAbandon,  // planned; the forward raises before it begins
  kSkip,     // prefetched; never comes
};

struct Scenario {
  struct Step {
    std::vector<int64_t> ids;
    Kind kind = Kind::kTrain;
    bool save = false;  // whole tables are read before it
    size_t delay = 0;   // its backward follows the backward of so many later batches
  };
  std::vector<Step> batches;
  int depth = 2;
  Saver saver = Saver::kNone;  // a thread of its own saves once, at any time
  bool direct = false;         // Transfers.direct: kernels use staging
  bool two_streams = false;    // every other batch is trained on another stream
  bool by_clocks = false;      // the device is not stepped: see protocol_device.h
  bool in_order = false;       // states are told apart by the order of all calls of the engine
  Bug bug = Bug::kNone;
};

class Protocol {
 public:
  static constexpr int64_t kSlots = 2;

  explicit Protocol(const Scenario& scenario)
      : scenario_(scenario),
        device_(kSlots, scenario.by_clocks,
                scenario.direct ? std::vector<int>{0, 1} : std::vector<int>{kOutward}) {
    GroupSpec spec{
        {{"t", true, 4, kSlots, 0, Initializer("uniform", -1, 1, 0, 1), 1, {}, BoundsCheck::kFatal}},
        make_record_layout(1, DType::kFloat32, nullptr, 0),
        {{0, 0, false}},
        false,
        "lru"};
    engine_ = std::make_shared<Engine>(std::move(spec));
    bytes_ = static_cast<size_t>(engine_->layout().bytes);
    device_.frees_early = has(Bug::kReusesStaging);
    for (size_t i = 0; i < scenario_.batches.size(); ++i) train(&trainer_, i);
    trainer_.settle();
    if (scenario_.saver == Saver::kWhole) save(&saver_);
    if (scenario_.saver == Saver::kAll || scenario_.saver == Saver::kIds) save_snapshot(&saver_);
    saver_.settle();
  }

  // Actors: threads, then streams.
  static constexpr int kThreads = 3, kActors = kThreads + kStreams;
  bool ready(int actor) const {
    if (actor >= kThreads) return device_.ready(actor - kThreads);
    const Thread& thread = *threads_[actor];
    return !thread.todo.empty() && (!thread.todo.back().ready || thread.todo.back().ready());
  }
  std::string name(int actor) const {
    static const char* const kNames[] = {"trainer",   "worker", "saver",  "compute 0",
                                         "compute 1", "inward", "outward"};
    const std::string what =
        actor >= kThreads ? device_.next(actor - kThreads) : threads_[actor]->todo.back().name;
    return std::string(kNames[actor]) + ": " + what;
  }
  void step(int actor) {
    try {
      if (actor >= kThreads) {
        device_.step(actor - kThreads);
      } else {
        threads_[actor]->step();
      }
    } catch (const std::exception& error) {
      violation(std::string("an exception: ") + error.what());
    }
  }
  bool finished() const {
    for (const Thread* thread : threads_) {
      if (!thread->todo.empty()) return false;
    }
    return device_.idle();
  }
  // Once it is finished: the tables are right, and nothing is held.
  void check_end();
  const std::string& problem() const { return problem_.empty() ? device_.problem() : problem_; }
  int64_t late_rows() const { return late_rows_; }

  // Equal for states from which the same can happen.
  Hash::Value state() const;

 private:
  using Action = std::function<void()>;
  using Guard = std::function<bool()>;

  // A thread is the steps that it has yet to do, the next one last.
  struct Step {
    const char* name;
    uint64_t what;
    Guard ready;
    Action run;
  };
  struct Thread {
    std::vector<Step> todo, added;
    void then(const char* name, uint64_t what, Guard ready, Action run) {
      added.push_back({name, what, std::move(ready), std::move(run)});
    }
    void settle() {
      std::move(added.rbegin(), added.rend(), std::back_inserter(todo));
      added.clear();
    }
    void step() {
      const Step now = std::move(todo.back());
      todo.pop_back();
      now.run();
      settle();
    }
  };
  struct Lock {
    const Thread* owner = nullptr;
    bool free_for(const Thread* t) const { return owner == nullptr || owner == t; }
  };

  struct Arrival {
    Buffer memory;
    Event event;
  };
  using Handle = std::shared_ptr<Plan>;  // does not pin
  struct Departure {
    Handle host;
    Buffer staging;
    Event event;
  };
  struct Made {  // tbe.cache.plan.Plan
    std::unique_ptr<Plan> host;
    size_t batch;
    Arrival arena;
  };
  using MadePtr = std::shared_ptr<Made>;
  struct Staged {  // tbe.cache.swap._Staged
    Arrival arena;
    Lock lock;
    Buffer leaving, rows;  // in host memory, and where swap_rows puts them
    Arrival records, late_rows;
    std::vector<int32_t> late;
  };
  using StagedPtr = std::shared_ptr<Staged>;
  struct Prefetched {
    size_t batch;
    MadePtr plan;
    std::optional<int64_t> refused_beside;
  };
  using PrefetchedPtr = std::shared_ptr<Prefetched>;

  bool has(Bug bug) const { return scenario_.bug == bug; }
  void violation(const std::string& text) {
    if (problem_.empty()) problem_ = text;
  }
  // ---- protocol_device_calls.h: what is launched
  void follow();
  void wait(const Arrival& arrival);
  Arrival send(const Buffer& staging);
  Arrival send_arena(const PlanBuffers& p, const Buffer& staging);
  void make_room(const PlanBuffers& p, Staged* staged);
  void swap(const PlanBuffers& p, const Block* arena, const Block* rows, Block* to);
  Departure send_out(const Handle& host, const Staged& staged);
  void write(const PlanBuffers& p, const Staged& staged);
  void launch_lookup(const Made& made);
  void launch_update(const Made& made);
  void used(const Buffer& staging);
  void end_uses();
  void scatter(const Block* slots, size_t offset, const Block* rows, size_t first,
               const std::vector<int32_t>& to);
  static int32_t number_at(const Block& arena, size_t offset, int64_t i);
  float* slot_at(const Block& arena, size_t offset, int64_t i);

  // ---- protocol_threads.h: the threads
  void train(Thread* t, size_t batch);
  void forward(Thread* t, size_t batch);
  void plans_of(Thread* t, size_t batch);
  void run_batch(Thread* t, const MadePtr& made);
  void backward(Thread* t, size_t batch);
  void end_backward(size_t batch);
  int stream_of(size_t batch) const { return scenario_.two_streams ? static_cast<int>(batch % 2) : 0; }
  void save(Thread* t);
  void settled(Thread* t, Action then);
  void compare_tables(Thread* t);
  void add_until(size_t batch);
  MadePtr pop(size_t batch);
  void drop_all(Thread* t);
  void go_on();
  PrefetchedPtr next();
  void plan_all(Thread* t);
  void prepare(Thread* t, const PrefetchedPtr& prefetched);

  // ---- protocol_swap.h: Swap
  void plan(Thread* t, size_t batch, std::function<void(MadePtr)> made);
  void read_ahead(Thread* t, const MadePtr& made);
  void stage(Thread* t, const MadePtr& made);
  void finish(Thread* t, const MadePtr& made);
  void apply_all(Thread* t, const Plan* upto, bool last_too);
  std::vector<Handle> unapplied(const Plan* upto);
  void stage_one(Thread* t, const Handle& host, bool last);
  void finish_one(Thread* t, const Handle& host);
  void bring_in(Thread* t, const Handle& host, const StagedPtr& staged);
  StagedPtr staged_of(const Plan& host);
  void land(Thread* t, uint64_t serial);
  void land_now(uint64_t serial);
  bool arrived(const Departure& departure) const {
    return has(Bug::kLandsEarly) || device_.done(departure.event);
  }
  void release(Plan* plan);

  // ---- protocol_snapshot.h: Snapshot
  void save_snapshot(Thread* t);
  void open_snapshot();
  void pieces(Thread* t, size_t place, int passes_without);
  void take_rest(Thread* t, Action then);
  void end_snapshot(Thread* t);
  void before_update(Thread* t, const Made& made, Action then);
  void read_taken(Thread* t, const TakenRows& taken, Action then);
  void compare_taken(int64_t id, float found);

  float& weight(int64_t id);  // in a run of one thread, up to now
  void changed(std::initializer_list<uint64_t> call);

  Scenario scenario_;
  Device device_;
  std::shared_ptr<Engine> engine_;
  size_t bytes_ = 0;
  std::map<uint64_t, StagedPtr> staged_;    // Plan.staged
  std::map<uint64_t, StagedPtr> applying_;  // held by a thread that applies a plan on the way to a later one
  std::map<uint64_t, Departure> leaving_;
  std::deque<PrefetchedPtr> coming_;
  std::vector<std::pair<Buffer, Event>> in_use_;  // Transfers._in_use
  Lock planning_, launch_, coming_lock_, landing_;
  size_t added_ = 0;
  bool idle_ = true;                // the worker
  std::map<size_t, MadePtr> made_;  // of batches whose backward is to come
  int stream_ = 0, last_stream_ = -1;
  std::vector<float> saved_;

  bool snapshot_ = false;                               // it is open
  std::map<int64_t, float> moment_;                     // what its rows were
  std::set<int64_t> taken_;                             // those that were read
  std::map<const Thread*, std::vector<float>> copies_;  // of slots, on their way to a thread

  std::map<int64_t, float> weights_;
  std::set<int64_t> came_, may_be_known_;
  Hash plans_;                    // all plans that were made, with what had happened before each
  Hash::Value changes_ = {0, 0};  // what happened, in any order
  std::string problem_;
  int64_t late_rows_ = 0;

  Thread trainer_, worker_, saver_;
  std::array<Thread*, kThreads> threads_{&trainer_, &worker_, &saver_};
};

}  // namespace rec_sdk

#include "tests/engine/protocol_device_calls.h"
#include "tests/engine/protocol_snapshot.h"
#include "tests/engine/protocol_swap.h"
#include "tests/engine/protocol_threads.h"
