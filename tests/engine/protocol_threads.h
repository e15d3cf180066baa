// The threads of the protocol: the training loop, the worker that plans ahead, and the thread that saves.
// They model embedding.py, step/step.py, step/prefetch_queue.py and rows/table_view.py of rec_sdk_torch/tbe.
// protocol.h includes this file.
#pragma once

#include "tests/engine/protocol.h"

namespace rec_sdk {

// Trains on a batch of `for batch in prefetch(batches, tables, depth)`.
inline void Protocol::train(Thread* t, size_t batch) {
  t->then(
      "add", batch, [=] { return coming_lock_.free_for(t); }, [=] { add_until(batch + scenario_.depth); });
  if (scenario_.batches[batch].save) save(t);
  if (scenario_.batches[batch].kind != Kind::kSkip) forward(t, batch);
  for (size_t before = 0; before <= batch; ++before) {
    if (before + scenario_.batches[before].delay != batch) continue;
    if (scenario_.batches[before].kind == Kind::kTrain || scenario_.batches[before].kind == Kind::kForward) {
      t->then("backward", before, [=] { return launch_.free_for(t); }, [=] { backward(t, before); });
    }
  }
}

// Models PrefetchQueue.add.
inline void Protocol::add_until(size_t last) {
  for (; added_ <= last && added_ < scenario_.batches.size(); ++added_) {
    coming_.push_back(std::make_shared<Prefetched>(Prefetched{added_, nullptr, std::nullopt}));
    if (coming_.front()->plan == nullptr) go_on();
  }
}

// Models TableBatchedEmbedding._lookup, up to the forward of the step.
inline void Protocol::forward(Thread* t, size_t batch) {
  t->then(
      "take", batch, [=] { return coming_lock_.free_for(t); },
      [=] {
        made_[batch] = pop(batch);
        if (made_[batch] == nullptr) plans_of(t, batch);
        const std::vector<int64_t>& ids = scenario_.batches[batch].ids;
        may_be_known_.insert(ids.begin(), ids.end());
        if (scenario_.batches[batch].kind == Kind::kAbandon) {
          t->then("abandon", batch, nullptr, [=] {
            release(made_.at(batch)->host.get());
            made_.erase(batch);
          });
          return;
        }
        t->then(
            "launch lock", batch, [=] { return launch_.free_for(t); },
            [=] {
              launch_.owner = t;
              stream_ = stream_of(batch);
              run_batch(t, made_.at(batch));
            });
      });
}

// Models PrefetchQueue.take.
inline void Protocol::plans_of(Thread* t, size_t batch) {
  const auto guard = [=] { return planning_.free_for(t) && coming_lock_.free_for(t); };
  t->then("plans of", batch, guard, [=] {
    planning_.owner = t;
    made_[batch] = pop(batch);
    if (made_[batch] != nullptr) {
      planning_.owner = nullptr;
      return;
    }
    coming_lock_.owner = t;
    drop_all(t);
    t->then("forget skipped batches", batch, nullptr, [=] {
      while (!coming_.empty() && coming_.front()->batch <= batch) coming_.pop_front();
      coming_lock_.owner = nullptr;
    });
    plan(t, batch, [=](MadePtr made) {
      if (made == nullptr) violation("no room for a batch alone");
      made_[batch] = std::move(made);
      planning_.owner = nullptr;
    });
  });
}

// Models PrefetchQueue._pop.
inline Protocol::MadePtr Protocol::pop(size_t batch) {
  if (coming_.empty() || coming_.front()->plan == nullptr || coming_.front()->batch != batch) return nullptr;
  MadePtr made = std::move(coming_.front()->plan);
  coming_.pop_front();
  return made;
}

// Models PrefetchQueue._drop_plans and Swap.drop.
inline void Protocol::drop_all(Thread* t) {
  for (auto coming = coming_.rbegin(); coming != coming_.rend(); ++coming) {
    const MadePtr plan = std::exchange((*coming)->plan, nullptr);
    if (plan == nullptr) continue;
    const uint64_t serial = (*plan->host)->serial;
    const auto staged = [=] { return staged_.count(serial) == 0 ? nullptr : staged_.at(serial); };
    const auto guard = [=] { return staged() == nullptr || staged()->lock.free_for(t); };
    t->then("drop", serial, guard, [=] { release(plan->host.get()); });
  }
}

// Models Step.forward.
inline void Protocol::run_batch(Thread* t, const MadePtr& made) {
  const uint64_t serial = (*made->host)->serial;
  const size_t batch = made->batch;
  follow();
  stage(t, made);
  t->then("begin", serial, nullptr, [=] {
    Engine::start_plans({made->host.get()});
    changed({3, serial});
    const std::vector<int64_t>& ids = scenario_.batches[batch].ids;
    came_.insert(ids.begin(), ids.end());
    finish(t, made);
  });
  t->then("lookup", batch, nullptr, [=] {
    wait(made->arena);
    launch_lookup(*made);
    launch_.owner = nullptr;
    if (has(Bug::kEndsPinsAtLookup)) release(made->host.get());
  });
  t->then("go on", batch, [=] { return coming_lock_.free_for(t); }, [=] { go_on(); });
}

// Models Step.backward.
inline void Protocol::backward(Thread* t, size_t batch) {
  const MadePtr made = made_.at(batch);
  if (scenario_.batches[batch].kind != Kind::kTrain) return end_backward(batch);
  launch_.owner = t;
  stream_ = stream_of(batch);
  follow();
  const bool late = has(Bug::kUpdatesFirst);
  if (late) launch_update(*made);
  before_update(t, *made, [=] {
    if (!late) launch_update(*made);
    launch_.owner = nullptr;
    end_backward(batch);
  });
}

inline void Protocol::end_backward(size_t batch) {
  if (has(Bug::kKeepsPins)) return;
  release(made_.at(batch)->host.get());
  made_.erase(batch);
}

// ---- The worker

// Models PrefetchQueue._next_to_plan.
inline Protocol::PrefetchedPtr Protocol::next() {
  for (const PrefetchedPtr& prefetched : coming_) {
    if (prefetched->plan != nullptr) continue;
    const std::optional<int64_t>& refused = prefetched->refused_beside;
    return !refused.has_value() || engine_->in_flight() < *refused ? prefetched : nullptr;
  }
  return nullptr;
}

inline void Protocol::go_on() {
  if (!idle_ || next() == nullptr) return;
  idle_ = false;
  plan_all(&worker_);
  worker_.settle();
}

// Models PrefetchQueue._plan_all.
inline void Protocol::plan_all(Thread* t) {
  t->then(
      "what is next", 0, [=] { return coming_lock_.free_for(t); },
      [=] {
        const PrefetchedPtr prefetched = next();
        idle_ = prefetched == nullptr;
        if (idle_) return;
        prepare(t, prefetched);
        plan_all(t);
      });
}

// Models PrefetchQueue._plan_and_stage and _plan_ahead.
inline void Protocol::prepare(Thread* t, const PrefetchedPtr& prefetched) {
  const size_t batch = prefetched->batch;
  t->then(
      "plan ahead", batch, [=] { return planning_.free_for(t); },
      [=] {
        if (next() != prefetched) return;  // the forward has taken the batch meanwhile
        planning_.owner = t;
        plan(t, batch, [=](const MadePtr& made) {
          if (made == nullptr) {
            prefetched->refused_beside = engine_->in_flight();
            planning_.owner = nullptr;
            return;
          }
          t->then(
              "planned", (*made->host)->serial, [=] { return coming_lock_.free_for(t); },
              [=] {
                prefetched->plan = made;
                planning_.owner = nullptr;
                read_ahead(t, made);
              });
        });
      });
}

// ---- Whole tables

// Models a save of whole tables: Locks.exclusive and TableView.chunks.
inline void Protocol::save(Thread* t) {
  settled(t, [=] { compare_tables(t); });
}

// Models Locks.exclusive and Swap.settle. `then` must release the planning lock and the launch lock.
inline void Protocol::settled(Thread* t, Action then) {
  t->then("save: planning lock", 0, [=] { return planning_.free_for(t); }, [=] { planning_.owner = t; });
  const auto guard = [=] { return launch_.free_for(t) && coming_lock_.free_for(t); };
  t->then("save: launch lock", 0, guard, [=] {
    launch_.owner = t;
    coming_lock_.owner = t;
    drop_all(t);
    t->then("save: settle", 0, nullptr, [=] {
      coming_lock_.owner = nullptr;
      stream_ = has(Bug::kReadsUnsettled) ? 1 : 0;
      if (!has(Bug::kReadsUnsettled)) follow();
      apply_all(t, nullptr, true);
      t->then("save: land", 0, nullptr, [=] {
        for (const auto& left : leaving_) land(t, left.first);
        t->then("save: settled", 0, nullptr, then);
      });
    });
  });
}

inline void Protocol::compare_tables(Thread* t) {
  t->then("save: read", 0, nullptr, [=] {
    saved_.clear();
    if (!has(Bug::kReadsUnsettled)) follow();
    std::vector<Touch> touches;
    for (int32_t slot = 0; slot < kSlots; ++slot) touches.push_back(reads_slot(slot));
    device_.launch(stream_, "a copy of the cache", {}, std::move(touches), [=] { saved_ = device_.cache; });
    const Event read = device_.tail(stream_);
    t->then(
        "save: compare", 0, [=] { return device_.done(read); },
        [=] {
          device_.waited(read);
          const auto [ids, slots, rows] = engine_->tables.rows(0);
          std::vector<char> records(ids.size() * bytes_);
          engine_->tables.read_rows(0, ids, {rows.data(), static_cast<int64_t>(ids.size())}, records.data());
          std::set<int64_t> seen;
          for (size_t i = 0; i < ids.size(); ++i) {
            const float found = slots[i] >= 0 ? saved_[static_cast<size_t>(slots[i])]
                                              : protocol::value_of(&records[i * bytes_]);
            if (protocol::bits_of(found) != protocol::bits_of(weight(ids[i]))) {
              violation("a save reads " + std::to_string(found) + " for id " + std::to_string(ids[i]) +
                        ", which is " + std::to_string(weight(ids[i])));
            }
            seen.insert(ids[i]);
            if (may_be_known_.count(ids[i]) == 0) violation("a save has an id that no forward has had");
          }
          for (const int64_t id : came_) {
            if (seen.count(id) == 0) violation("a save lacks an id that has come");
          }
          saved_.clear();
          launch_.owner = planning_.owner = nullptr;
        });
  });
}

inline void Protocol::check_end() {
  // PrefetchQueue.remove, when the iterator ends.
  Thread end;
  const auto run = [&] {
    end.settle();
    while (!end.todo.empty()) {
      if (!end.todo.back().ready || end.todo.back().ready()) {
        end.step();
        continue;
      }
      bool moved = false;
      for (int stream = 0; stream < kStreams; ++stream) {
        for (; device_.ready(stream); moved = true) device_.step(stream);
      }
      if (!moved) return violation("the last save waits for ever");
    }
  };
  try {
    save(&end);
    run();
  } catch (const std::exception& error) {
    violation(std::string("an exception at the end: ") + error.what());
  }
  coming_.clear();
  for (int stream = 0; stream < kStreams; ++stream) {
    while (device_.ready(stream)) device_.step(stream);
  }
  if (!device_.idle()) violation("a stream waits for ever");
  end_uses();
  if (engine_->in_flight() != 0) violation("a plan holds its slots for ever");
  if (!staged_.empty() || !applying_.empty() || !leaving_.empty())
    violation("a plan stays staged, or never lands");
  if (device_.held() != 0)
    violation(std::to_string(device_.held()) + " blocks of memory are never given back");
}

inline Hash::Value Protocol::state() const {
  Hash hash;
  hash.add(plans_.value());
  hash.add(changes_);
  device_.add_to(&hash);
  for (const Thread* thread : threads_) {
    for (const Step& step : thread->todo) {
      hash.add(reinterpret_cast<uint64_t>(step.name));
      hash.add(step.what);
    }
    hash.add(~uint64_t{0});
  }
  const auto add_arrival = [&](const Arrival& arrival) {
    hash.add(arrival.memory == nullptr ? 0 : arrival.memory->name);
    device_.add_event(arrival.event, &hash);
  };
  const auto owner = [&](const Lock& lock) {
    hash.add(uint64_t(std::find(threads_.begin(), threads_.end(), lock.owner) - threads_.begin()));
  };
  for (const Lock* lock : {&planning_, &launch_, &coming_lock_, &landing_}) owner(*lock);
  for (const auto* const map : {&staged_, &applying_}) {
    for (const auto& [serial, staged] : *map) {
      hash.add(serial);
      owner(staged->lock);
      add_arrival(staged->arena);
      add_arrival({staged->leaving, {}});
      add_arrival(staged->records);
      add_arrival(staged->late_rows);
      for (const int32_t place : staged->late) hash.add(uint64_t(place));
      hash.add(~uint64_t{0});
    }
  }
  for (const auto& [serial, left] : leaving_) {
    hash.add(serial);
    add_arrival({left.staging, left.event});
  }
  for (const PrefetchedPtr& coming : coming_) {
    hash.add(coming->batch);
    hash.add(coming->plan == nullptr ? 0 : (*coming->plan->host)->serial);
    hash.add(uint64_t(coming->refused_beside.value_or(-1)));
  }
  for (const auto& [buffer, event] : in_use_) add_arrival({buffer, event});
  for (const auto& [id, value] : weights_) hash.add(Hash{uint64_t(id), protocol::bits_of(value)}.word());
  for (const float value : saved_) hash.add(protocol::bits_of(value));
  hash.add(snapshot_);
  for (const auto& [id, value] : moment_) hash.add(Hash{uint64_t(id), protocol::bits_of(value)}.word());
  for (const int64_t id : taken_) hash.add(uint64_t(id));
  for (const auto& [thread, values] : copies_) {
    hash.add(uint64_t(std::find(threads_.begin(), threads_.end(), thread) - threads_.begin()));
    for (const float value : values) hash.add(protocol::bits_of(value));
  }
  for (const auto& [batch, made] : made_) {
    hash.add(batch);
    if (made == nullptr) continue;
    hash.add((*made->host)->serial);
    hash.add(made->host->released());
    add_arrival(made->arena);
  }
  hash.add(uint64_t(added_) << 8 | uint64_t(idle_) << 4 | uint64_t(stream_) << 2 |
           uint64_t(last_stream_ + 1));
  return hash.value();
}

}  // namespace rec_sdk
