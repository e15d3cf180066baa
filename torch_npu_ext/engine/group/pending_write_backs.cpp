#include "torch_npu_ext/engine/group/pending_write_backs.h"

#include <algorithm>

namespace rec_sdk {

void add_source(std::vector<uint64_t>* sources, uint64_t serial) {
  if (serial != 0 && std::find(sources->begin(), sources->end(), serial) == sources->end()) {
    sources->push_back(serial);
  }
}

namespace {

// Records that the plan's row in at index `place` depends on the write-back of plan `serial`. A serial of 0
// means no plan.
void add_late(PlanBuffers* plan, int32_t place, uint64_t serial) {
  if (serial == 0) return;
  add_source(&plan->sources, serial);
  plan->late.push_back({place, serial});
}

}  // namespace

void PendingWriteBacks::prepare(bool looks_up) {
  if (write_backs_.size() == write_backs_.capacity()) {
    const std::lock_guard<std::mutex> guard(mutex_);
    write_backs_.reserve(2 * write_backs_.size() + 4);
  }
  spare_.reserve(write_backs_.capacity());
  if (!looks_up) return;
  for (WriteBack& write_back : write_backs_) {
    if (!write_back.indexed) index(&write_back);
  }
}

void PendingWriteBacks::index(WriteBack* write_back) {
  if (!spare_.empty()) {
    write_back->rows = std::move(spare_.back());
    spare_.pop_back();
  }
  write_back->rows.assign(write_back->plan->out_offsets, write_back->plan->swap_out_rows);
  write_back->indexed = true;
}

void PendingWriteBacks::add(const std::shared_ptr<PlanBuffers>& plan) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  write_backs_.emplace_back();
  write_backs_.back().plan = plan;
}

void PendingWriteBacks::remove(const PlanBuffers& plan) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto same = [&plan](const WriteBack& write_back) { return write_back.plan.get() == &plan; };
  const auto found = std::find_if(write_backs_.begin(), write_backs_.end(), same);
  if (found == write_backs_.end()) return;
  if (found->indexed && spare_.size() < spare_.capacity()) spare_.push_back(std::move(found->rows));
  write_backs_.erase(found);
}

std::shared_ptr<PlanBuffers> PendingWriteBacks::find(uint64_t serial) const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const WriteBack& write_back : write_backs_) {
    if (write_back.plan->serial == serial) return write_back.plan;
  }
  return nullptr;
}

uint64_t PendingWriteBacks::serial_of(int32_t table, uint32_t row) const noexcept {
  const uint64_t hash = RowSet::hash(row);
  for (auto write_back = write_backs_.rbegin(); write_back != write_backs_.rend(); ++write_back) {
    if (write_back->rows.has(table, row, hash)) return write_back->plan->serial;
  }
  return 0;
}

void PendingWriteBacks::find_sources(PlanBuffers* plan) const noexcept {
  for (int32_t t = 0; t < static_cast<int32_t>(plan->tables); ++t) {
    for (int32_t i = plan->in_offsets[t]; i < plan->in_offsets[t + 1]; ++i) {
      add_late(plan, i, serial_of(t, plan->swap_in_rows[i]));
    }
  }
}

// If several pending plans write back a row, the newest one completes last. Only that plan is recorded as the
// row's source.
std::vector<int32_t> PendingWriteBacks::late_rows(const PlanBuffers& plan) const {
  std::vector<int32_t> late;
  for (const PlanBuffers::Late& row : plan.late) {
    const auto has_it = [&row](const WriteBack& write_back) { return write_back.plan->serial == row.source; };
    if (std::any_of(write_backs_.begin(), write_backs_.end(), has_it)) late.push_back(row.place);
  }
  return late;
}

}  // namespace rec_sdk
