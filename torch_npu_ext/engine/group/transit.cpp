#include "torch_npu_ext/engine/group/transit.h"

#include <algorithm>

namespace rec_sdk {

void add_source(std::vector<uint64_t>* sources, uint64_t serial) {
  if (serial != 0 && std::find(sources->begin(), sources->end(), serial) == sources->end()) {
    sources->push_back(serial);
  }
}

namespace {

// `place`: of a row that comes in.
void note_late(PlanBuffers* plan, int32_t place, uint64_t serial) {
  if (serial == 0) return;
  add_source(&plan->sources, serial);
  plan->late.push_back({place, serial});
}

}  // namespace

void Transit::prepare(bool looks_up) {
  if (departures_.size() == departures_.capacity()) {
    const std::lock_guard<std::mutex> guard(mutex_);
    departures_.reserve(2 * departures_.size() + 4);
  }
  spare_.reserve(departures_.capacity());
  if (!looks_up) return;
  for (Departure& departure : departures_) {
    if (!departure.indexed) index(&departure);
  }
}

void Transit::index(Departure* departure) {
  if (!spare_.empty()) {
    departure->rows = std::move(spare_.back());
    spare_.pop_back();
  }
  departure->rows.assign(departure->plan->out_offsets, departure->plan->swap_out_rows);
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
  if (found == departures_.end()) return;
  if (found->indexed && spare_.size() < spare_.capacity()) spare_.push_back(std::move(found->rows));
  departures_.erase(found);
}

std::shared_ptr<PlanBuffers> Transit::find(uint64_t serial) const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const Departure& departure : departures_) {
    if (departure.plan->serial == serial) return departure.plan;
  }
  return nullptr;
}

uint64_t Transit::serial_of(int32_t table, uint32_t row) const noexcept {
  const uint64_t hash = RowSet::hash(row);
  for (auto departure = departures_.rbegin(); departure != departures_.rend(); ++departure) {
    if (departure->rows.has(table, row, hash)) return departure->plan->serial;
  }
  return 0;
}

void Transit::find_sources(PlanBuffers* plan) const noexcept {
  for (int32_t t = 0; t < static_cast<int32_t>(plan->tables); ++t) {
    for (int32_t i = plan->in_offsets[t]; i < plan->in_offsets[t + 1]; ++i) {
      note_late(plan, i, serial_of(t, plan->swap_in_rows[i]));
    }
  }
}

// Where several plans took out the same row, the newest lands last.
std::vector<int32_t> Transit::late_rows(const PlanBuffers& plan) const {
  std::vector<int32_t> late;
  for (const PlanBuffers::Late& row : plan.late) {
    const auto has_it = [&row](const Departure& departure) { return departure.plan->serial == row.source; };
    if (std::any_of(departures_.begin(), departures_.end(), has_it)) late.push_back(row.place);
  }
  return late;
}

}  // namespace rec_sdk
