// The protocol of a batch: the steps of the threads, in the same order as in rec_sdk_torch/tbe, on the real
// engine and a model of a device. Each step() executes one step of a thread or one operation of a stream, and
// nothing runs concurrently with it. Comments name the Python function that a function models.
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

// Mistakes that the Python code could make. The tests plant each of them and must find it.
enum class Bug {
  kNone,
  kLandsEarly,        // a write-back is completed before the copy to the host is done
  kForgetsLate,       // late rows are not uploaded
  kEndsPinsAtLookup,  // pins end before the update is launched, so the row may be evicted too early
  kDoesNotFollow,   // streams do not wait for each other, so another stream may evict a row before its update
  kReusesStaging,   // a staging buffer is reused while a copy uses it
  kReusesMemory,    // device memory is reused while a copy uses it: record_stream() is missing
  kScattersEarly,   // missing rows are written to the cache before their upload is done
  kFetchesEarly,    // victims are downloaded before the swap has read them from their slots
  kWritesFirst,     // missing rows are written to slots before the victims are read
  kReadsUnsettled,  // a save reads the cache on its own stream, before updates are done
  kKeepsPins,       // a batch never releases its pins
  kKeepsLock,       // a thread keeps the lock of write-backs after it has waited for a copy
  kUpdatesUntaken,  // a pending row of a snapshot changes before it is captured
  kUpdatesFirst,    // a pending row is captured after its update was launched
  kTakesUnlocked,   // a snapshot takes rows under the launch lock, but reads them without it
  kTakesUnordered,  // a snapshot reads the cache without waiting for the last batch's stream
};

// The work of the thread that saves.
enum class Saver {
  kNone,
  kWhole,  // saves whole tables while the other threads wait
  kAll,    // saves a snapshot of all rows: each call takes as many pending rows as possible
  kIds,    // saves a snapshot of given ids, one id at a time
};

enum class Kind {
  kTrain,    // forward and backward
  kForward,  // only a forward: its output is dropped
  kAbandon,  // the batch is planned, but its forward raises before the plan is started
  kSkip,     // the batch is prefetched, but never looked up
};

struct Scenario {
  struct Step {
    std::vector<int64_t> ids;
    Kind kind = Kind::kTrain;
    bool save = false;  // whether whole tables are saved before the batch
    size_t delay = 0;   // number of later batches whose backward is before this one's
  };
  std::vector<Step> batches;
  int depth = 2;
  Saver saver = Saver::kNone;  // what another thread saves, once at any time
  bool direct = false;         // Transfers.direct: kernels access staging buffers directly
  bool two_streams = false;    // whether every other batch is trained on another stream
  bool by_clocks = false;      // which model of the device is used; see protocol_device.h
  bool in_order = false;       // whether the order of all engine calls distinguishes states
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

  // The actors are first the threads, then the streams of the device.
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
  // Checks, after the last step, that the tables are right and that no slots, write-backs or memory are left.
  void check_end();
  const std::string& problem() const { return problem_.empty() ? device_.problem() : problem_; }
  int64_t late_rows() const { return late_rows_; }

  // Returns a hash of the state. States with equal hashes have the same possible continuations.
  Hash::Value state() const;

 private:
  using Action = std::function<void()>;
  using Guard = std::function<bool()>;

  // A step of a thread. A thread is represented by its remaining steps; the last one in `todo` is the next
  // one.
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
  using Handle = std::shared_ptr<Plan>;  // does not pin slots
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
  struct Staged {  // tbe.cache.plan.StagedPlan
    Arrival arena;
    Lock lock;
    Buffer leaving, rows;  // victims in host memory, and the buffer to which swap_rows writes them
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
  // ---- Defined in protocol_device_calls.h: operations on the device
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

  // ---- Defined in protocol_threads.h: the threads
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

  // ---- Defined in protocol_swap.h: class Swap
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

  // ---- Defined in protocol_snapshot.h: class Snapshot
  void save_snapshot(Thread* t);
  void open_snapshot();
  void pieces(Thread* t, size_t place, int passes_without);
  void take_rest(Thread* t, Action then);
  void end_snapshot(Thread* t);
  void before_update(Thread* t, const Made& made, Action then);
  void read_taken(Thread* t, const TakenRows& taken, Action then);
  void compare_taken(int64_t id, float found);

  float& weight(int64_t id);  // the weight that a run on one thread would have now
  void changed(std::initializer_list<uint64_t> call);

  Scenario scenario_;
  Device device_;
  std::shared_ptr<Engine> engine_;
  size_t bytes_ = 0;
  std::map<uint64_t, StagedPtr> staged_;    // Plan.staged
  std::map<uint64_t, StagedPtr> applying_;  // plans that a thread applies on the way to a later plan
  std::map<uint64_t, Departure> leaving_;
  std::deque<PrefetchedPtr> coming_;
  std::vector<std::pair<Buffer, Event>> in_use_;  // Transfers._in_use
  Lock planning_, launch_, coming_lock_, landing_;
  size_t added_ = 0;
  bool idle_ = true;                // whether the worker is idle
  std::map<size_t, MadePtr> made_;  // plans of batches whose backward has not run yet
  int stream_ = 0, last_stream_ = -1;
  std::vector<float> saved_;

  bool snapshot_ = false;                               // whether a snapshot is open
  std::map<int64_t, float> moment_;                     // the rows at its moment: id -> weight
  std::set<int64_t> taken_;                             // ids of rows that were captured
  std::map<const Thread*, std::vector<float>> copies_;  // weights that each thread reads

  std::map<int64_t, float> weights_;
  std::set<int64_t> came_, may_be_known_;
  Hash plans_;                    // all plans, each with the engine calls before it
  Hash::Value changes_ = {0, 0};  // sum of the hashes of all engine calls
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
