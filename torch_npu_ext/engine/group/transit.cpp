#include "torch_npu_ext/engine/group/transit.h"

#include <algorithm>

namespace rec_sdk {

void add_source(std::vector<uint64_t>* sources, uint64_t serial) {
  if (serial != 0 && std::find(sources->begin(), sources->end(), serial) == sources->end()) {
    sources->push_back(serial);
  }
}

void Transit::prepare(bool looks_up) {
  if (departures_.size() == departures_.capacity()) {
    const std::lock_guard<std::mutex> guard(mutex_);
    departures_.reserve(2 * departures_.size() + 4);
  }
  if (!looks_up) return;
  for (Departure& departure : departures_) {
    if (!departure.indexed) index(&departure);
  }
}

void Transit::index(Departure* departure) {
  const PlanBuffers& plan = *departure->plan;
  IdMap rows(plan.rows_out);
  for (int32_t t = 0; t < static_cast<int32_t>(plan.tables); ++t) {
    for (int32_t i = plan.out_offsets[t]; i < plan.out_offsets[t + 1]; ++i) {
      const int64_t id = key(t, plan.swap_out_rows[i]);
      bool added = false;
      rows.reserve(1);
      rows.find_or_add(id, IdMap::hash(id), 0, &added);
    }
  }
  departure->rows = std::move(rows);
  departure->indexed = true;
}

void Transit::depart(const std::shared_ptr<PlanBuffers>& plan) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  departures_.emplace_back();
  departures_.back().plan = plan;
}

void Transit::remove(const PlanBuffers& plan) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto same = [&plan](const Departure& departure) { return departure.plan.get() == &plan; };
  const auto found = std::find_if(departures_.begin(), departures_.end(), same);
  if (found != departures_.end()) departures_.erase(found);
}

std::shared_ptr<PlanBuffers> Transit::find(uint64_t serial) const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const Departure& departure : departures_) {
    if (departure.plan->serial == serial) return departure.plan;
  }
  return nullptr;
}

uint64_t Transit::serial_of(int32_t table, uint32_t row) const noexcept {
  const int64_t id = key(table, row);
  const uint64_t hash = IdMap::hash(id);
  for (auto departure = departures_.rbegin(); departure != departures_.rend(); ++departure) {
    if (departure->rows.find(id, hash)) return departure->plan->serial;
  }
  return 0;
}

void Transit::find_sources(PlanBuffers* plan) const noexcept {
  for (int32_t t = 0; t < static_cast<int32_t>(plan->tables); ++t) {
    for (int32_t i = plan->in_offsets[t]; i < plan->in_offsets[t + 1]; ++i) {
      add_source(&plan->sources, serial_of(t, plan->swap_in_rows[i]));
    }
  }
}

// A plan's sources were indexed when it was made.
std::vector<int32_t> Transit::late_rows(const PlanBuffers& plan) const {
  std::vector<const Departure*> sources;
  for (const Departure& departure : departures_) {
    const uint64_t serial = departure.plan->serial;
    if (std::find(plan.sources.begin(), plan.sources.end(), serial) != plan.sources.end()) {
      sources.push_back(&departure);
    }
  }
  std::vector<int32_t> late;
  if (sources.empty()) return late;
  for (int32_t t = 0; t < static_cast<int32_t>(plan.tables); ++t) {
    for (int32_t i = plan.in_offsets[t]; i < plan.in_offsets[t + 1]; ++i) {
      const int64_t id = key(t, plan.swap_in_rows[i]);
      const uint64_t hash = IdMap::hash(id);
      const auto has = [id, hash](const Departure* source) { return bool{source->rows.find(id, hash)}; };
      if (std::any_of(sources.begin(), sources.end(), has)) late.push_back(i);
    }
  }
  return late;
}

}  // namespace rec_sdk
