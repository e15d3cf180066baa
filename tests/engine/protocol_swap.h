// The part of the protocol that models rec_sdk_torch/tbe/cache/swap.py. protocol.h includes this file.
#pragma once

#include "tests/engine/protocol.h"

namespace rec_sdk {

// Adds a call that changed the engine to the hash of the state. Calls between two plans commute: the
// resulting state does not depend on their order. The hash therefore contains the sum of their hashes. To
// check this assumption, it contains their order if `in_order` is set.
inline void Protocol::changed(std::initializer_list<uint64_t> call) {
  const Hash hash(call);
  if (scenario_.in_order) {
    plans_.add(hash.value());
    return;
  }
  changes_.first += hash.value().first;
  changes_.second += hash.value().second;
}

inline float& Protocol::weight(int64_t id) {
  const auto found = weights_.find(id);
  if (found != weights_.end()) return found->second;
  std::vector<char> record(bytes_);
  engine_->tables.initial_records(0, {&id, 1}, record.data());
  return weights_[id] = protocol::value_of(record.data());
}

inline void Protocol::release(Plan* plan) {
  if (plan->released()) return;
  plan->release();
  if ((*plan)->state == PlanState::kPlanned) staged_.erase((*plan)->serial);
  changed({1, (*plan)->serial});
}

// Models Swap.plan.
inline void Protocol::plan(Thread* t, size_t batch, std::function<void(MadePtr)> made) {
  const auto make = [=] {
    TestBatch input;
    input.values = scenario_.batches[batch].ids;
    input.batch_size = 1;
    input.offsets = {0, static_cast<int64_t>(input.values.size())};
    input.keys = {0};
    const Buffer staging = device_.take(-1, 1, engine_->arena_bytes(input.input()));
    auto plan = std::make_shared<Made>();
    plan->batch = batch;
    try {
      plan->host = engine_->plan(input.input(), {staging->bytes.data(), staging->bytes.size(), staging});
    } catch (const CacheTooSmallError&) {
      made(nullptr);
      return;
    }
    const PlanBuffers& p = **plan->host;
    plans_.add(changes_);
    plans_.add(batch);
    staging->name = Hash{1, p.serial}.word();
    staging->content = plans_.word();
    plan->arena = send(staging);
    if (p.rows_in > 0) {
      staged_[p.serial] = std::make_shared<Staged>();
      staged_[p.serial]->arena = plan->arena;
    }
    made(std::move(plan));
  };
  const auto any_arrived = [=] {
    return std::any_of(leaving_.begin(), leaving_.end(),
                       [&](const auto& left) { return arrived(left.second); });
  };
  const auto guard = [=] { return landing_.free_for(t) || !any_arrived(); };
  t->then("plan", batch, guard, [=] {
    if (!any_arrived()) return make();
    for (auto left = leaving_.begin(); left != leaving_.end();) {
      const uint64_t serial = (left++)->first;
      if (arrived(leaving_.at(serial))) land_now(serial);
    }
    t->then("plan, others landed", batch, nullptr, make);
  });
}

// Models Swap.read_ahead.
inline void Protocol::read_ahead(Thread* t, const MadePtr& made) {
  const uint64_t serial = (*made->host)->serial;
  const auto found = [=] {
    const auto staged = staged_.find(serial);
    return staged == staged_.end() ? nullptr : staged->second;
  };
  t->then(
      "read ahead: lock", serial, [=] { return found() == nullptr || found()->lock.free_for(t); },
      [=] {
        const StagedPtr staged = found();
        if (staged == nullptr || staged->records.memory != nullptr || made->host->released()) return;
        staged->lock.owner = t;
        for (const uint64_t source : (*made->host)->sources) {
          const auto left = leaving_.find(source);
          if (left != leaving_.end() && arrived(left->second)) land(t, source);
        }
        t->then("read ahead", serial, nullptr, [=] {
          staged->lock.owner = nullptr;
          const Buffer rows =
              device_.take(-1, Hash{3, serial}.word(), static_cast<size_t>((*made->host)->rows_in) * bytes_);
          try {
            staged->late = engine_->read_ahead(*made->host, rows->bytes.data());
          } catch (const std::runtime_error&) {
            return;  // the plan was started or dropped; PrefetchQueue ignores the error
          }
          late_rows_ += static_cast<int64_t>(staged->late.size());
          rows->content = protocol::content_of(*rows);
          staged->records = scenario_.direct ? Arrival{rows, {}} : send(rows);
        });
      });
}

inline Protocol::StagedPtr Protocol::staged_of(const Plan& host) {
  const auto applying = applying_.find(host->serial);
  if (applying != applying_.end()) return applying->second;
  StagedPtr& staged = staged_[host->serial];
  if (staged == nullptr) {
    staged = std::make_shared<Staged>();
    const Buffer arena = device_.take(-1, Hash{2, host->serial}.word(), host->device_bytes());
    std::copy_n(host->arena(), host->device_bytes(), arena->bytes.begin());
    arena->content = Hash{2, host->serial, plans_.word()}.word();
    staged->arena = send(arena);
  }
  return staged;
}

inline std::vector<Protocol::Handle> Protocol::unapplied(const Plan* upto) {
  std::vector<Handle> hosts;
  for (std::unique_ptr<Plan>& plan : engine_->unapplied(upto)) hosts.push_back(std::move(plan));
  return hosts;
}

// Models Swap.stage.
inline void Protocol::stage(Thread* t, const MadePtr& made) { apply_all(t, made->host.get(), false); }

// Models Swap.apply_all, or Swap.stage, which only stages the last plan.
inline void Protocol::apply_all(Thread* t, const Plan* upto, bool last_too) {
  const std::vector<Handle> hosts = unapplied(upto);
  for (const Handle& host : hosts) {
    const bool last = !last_too && host == hosts.back();
    if (!last || (*host)->rows_in > 0) stage_one(t, host, last);
    if (last) continue;
    t->then("begin, on the way", (*host)->serial, nullptr, [=] {
      Engine::start_plans({host.get()});
      changed({3, (*host)->serial});
    });
    finish_one(t, host);
  }
}

// Models Swap._stage_misses.
inline void Protocol::stage_one(Thread* t, const Handle& host, bool last) {
  const uint64_t serial = (*host)->serial;
  t->then("stage: room", serial, nullptr, [=] {
    const StagedPtr staged = staged_of(*host);
    if (!last) applying_[serial] = staged;
    wait(staged->arena);
    if ((*host)->rows_out > 0 && staged->leaving == nullptr) make_room(**host, staged.get());
    if ((*host)->rows_in > 0) bring_in(t, host, staged);
  });
}

inline void Protocol::bring_in(Thread* t, const Handle& host, const StagedPtr& staged) {
  const uint64_t serial = (*host)->serial;
  t->then(
      "stage: lock", serial, [=] { return staged->lock.free_for(t); },
      [=] {
        const bool all = staged->records.memory == nullptr;
        if (!all && (staged->late.empty() || staged->late_rows.memory != nullptr || has(Bug::kForgetsLate)))
          return;
        staged->lock.owner = t;
        for (const uint64_t source : (*host)->sources) land(t, source);
        if (all) {
          t->then("read in", serial, nullptr, [=] {
            const Buffer rows =
                device_.take(-1, Hash{4, serial}.word(), static_cast<size_t>((*host)->rows_in) * bytes_);
            engine_->read_in(*host, rows->bytes.data());
            rows->content = protocol::content_of(*rows);
            staged->records = scenario_.direct ? Arrival{rows, {}} : send(rows);
            staged->lock.owner = nullptr;
          });
          return;
        }
        t->then("read late", serial, nullptr, [=] {
          const int64_t count = static_cast<int64_t>(staged->late.size());
          const Buffer rows = device_.take(-1, Hash{5, serial}.word(),
                                           protocol::kSlotBytes + static_cast<size_t>(count) * bytes_);
          for (int64_t k = 0; k < count; ++k) {
            std::memcpy(&rows->bytes[static_cast<size_t>(k) * sizeof(int32_t)],
                        &(*host)->swap_in_slots[staged->late[static_cast<size_t>(k)]], sizeof(int32_t));
          }
          engine_->read_late(*host, staged->late, &rows->bytes[protocol::kSlotBytes]);
          rows->content = protocol::content_of(*rows);
          staged->late_rows = send(rows);
          staged->lock.owner = nullptr;
        });
      });
}

// Models Swap._swap.
inline void Protocol::finish_one(Thread* t, const Handle& host) {
  const uint64_t serial = (*host)->serial;
  t->then("write", serial, nullptr, [=] {
    if ((*host)->rows_in == 0) return;
    const StagedPtr staged = staged_of(*host);
    write(**host, *staged);
    if (staged->leaving != nullptr) leaving_[serial] = send_out(host, *staged);
  });
  t->then("applied", serial, nullptr, [=] {
    engine_->applied(*host);
    changed({4, serial});
    staged_.erase(staged_.begin(), staged_.upper_bound(serial));
    applying_.erase(serial);
  });
}

// Models Swap.apply.
inline void Protocol::finish(Thread* t, const MadePtr& made) {
  for (const Handle& host : unapplied(made->host.get())) finish_one(t, host);
}

// Models Swap.complete_write_back.
inline void Protocol::land(Thread* t, uint64_t serial) {
  t->then(
      "land: lock", serial, [=] { return landing_.free_for(t); },
      [=] {
        const auto left = leaving_.find(serial);
        if (left == leaving_.end()) return;
        if (arrived(left->second)) return land_now(serial);
        landing_.owner = t;
        t->then(
            "land: wait", serial, [=] { return arrived(leaving_.at(serial)); },
            [=] {
              land_now(serial);
              if (!has(Bug::kKeepsLock)) landing_.owner = nullptr;
            });
      });
}

inline void Protocol::land_now(uint64_t serial) {
  const auto left = leaving_.find(serial);
  if (!has(Bug::kLandsEarly)) device_.waited(left->second.event);
  device_.host_reads(*left->second.staging);
  engine_->complete_write_back(*left->second.host, left->second.staging->bytes.data(), nullptr);
  changed({5, serial, left->second.staging->content});
  leaving_.erase(left);
}

}  // namespace rec_sdk
