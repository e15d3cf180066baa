#include "torch_npu_ext/engine/group/window.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace rec_sdk {

SpilledSums::SpilledSums(int64_t dim) : sums_(static_cast<size_t>(2 * dim) * sizeof(float)) {}

void SpilledSums::reserve(int64_t extra) {
  places_.reserve(extra);
  sums_.extend(static_cast<size_t>(used_ + extra));
  const size_t places = static_cast<size_t>(used_ + extra);
  if (free_.capacity() < places) free_.reserve(2 * places);  // so that free() cannot fail
}

uint32_t SpilledSums::put(int32_t table, uint32_t row) {
  uint32_t place = used_;
  if (free_.empty()) {
    ++used_;
  } else {
    place = free_.back();
    free_.pop_back();
  }
  bool added = false;
  const int64_t id = key(table, row);
  places_.find_or_add(id, IdMap::hash(id), place, &added);
  sorted_valid_ = false;
  return place;
}

uint32_t SpilledSums::take(int32_t table, uint32_t row) {
  const int64_t id = key(table, row);
  const uint64_t hash = IdMap::hash(id);
  const IdMap::Entry entry = places_.find(id, hash);
  if (!entry) return kNone;
  const uint32_t place = entry.row();
  places_.erase(id, hash);
  sorted_valid_ = false;
  return place;
}

void SpilledSums::put_back(int32_t table, uint32_t row, uint32_t place) {
  bool added = false;
  const int64_t id = key(table, row);
  places_.find_or_add(id, IdMap::hash(id), place, &added);  // cannot fail: take() left a free entry
  sorted_valid_ = false;
}

const std::vector<SpilledSums::Spilled>& SpilledSums::sorted() {
  if (!sorted_valid_) {
    sorted_.clear();
    sorted_.reserve(static_cast<size_t>(places_.size()));
    places_.for_each([&](int64_t id, const IdMap::Entry& entry) { sorted_.push_back({id, entry.row()}); });
    std::sort(sorted_.begin(), sorted_.end(),
              [](const Spilled& a, const Spilled& b) { return a.key < b.key; });
    sorted_valid_ = true;
  }
  return sorted_;
}

void SpilledSums::drop_table(int32_t table) {
  for (const Spilled& spilled : sorted()) {
    if (spilled.table() != table) continue;
    places_.erase(spilled.key, IdMap::hash(spilled.key));
    free(spilled.place);
  }
  sorted_valid_ = false;
}

void SpilledSums::clear() {
  if (used_ == 0) return;
  places_.clear();
  free_.clear();
  used_ = 0;
  sorted_valid_ = false;
  ++epoch_;
}

Window::Bound Window::bound(int64_t out, int64_t in) const {
  return {std::min(out, resident_), std::min(in, spilled_.size())};
}

void Window::reserve(const Bound& bound, PlanBuffers* plan) {
  plan->pending_out.clear();
  plan->pending_in.clear();
  plan->pending_out_sums.clear();
  plan->pending_in_sums.clear();
  plan->pending_out.reserve(static_cast<size_t>(bound.out));
  plan->pending_out_sums.reserve(static_cast<size_t>(bound.out));
  plan->pending_in.reserve(static_cast<size_t>(bound.in));
  plan->pending_in_sums.reserve(static_cast<size_t>(bound.in));
  const size_t slots =
      slots_.size() + static_cast<size_t>(bound.in + bound.out);  // undo() needs bound.out of them
  if (slots > slots_.capacity()) slots_.reserve(2 * slots);
  if (bound.out > 0) spilled_.reserve(bound.out);
  plan->window_epoch = spilled_.epoch();
}

void Window::move(PlanBuffers* plan) noexcept {
  for (int32_t t = 0; t < static_cast<int32_t>(plan->tables); ++t) {
    for (int32_t i = plan->out_offsets[t]; i < plan->out_offsets[t + 1]; ++i) {
      const int32_t slot = plan->swap_out_slots[i];
      if (flags_[slot] == 0) continue;
      clear(slot);
      plan->window_out_slots[plan->window_out++] = slot;
      plan->pending_out.push_back(i);
      plan->pending_out_sums.push_back(spilled_.put(t, plan->swap_out_rows[i]));
    }
    for (int32_t i = plan->in_offsets[t]; i < plan->in_offsets[t + 1]; ++i) {
      const uint32_t place = spilled_.take(t, plan->swap_in_rows[i]);
      if (place == SpilledSums::kNone) continue;
      mark(plan->swap_in_slots[i]);
      plan->window_in_slots[plan->window_in++] = plan->swap_in_slots[i];
      plan->pending_in.push_back(i);
      plan->pending_in_sums.push_back(place);
    }
  }
}

void Window::undo(PlanBuffers* plan) noexcept {
  if (plan->window_epoch != spilled_.epoch()) return;
  int32_t t = 0;
  for (size_t k = 0; k < plan->pending_in.size(); ++k) {
    const int32_t m = plan->pending_in[k];
    while (m >= plan->in_offsets[t + 1]) ++t;
    clear(plan->swap_in_slots[m]);
    spilled_.put_back(t, plan->swap_in_rows[m], plan->pending_in_sums[k]);
  }
  t = 0;
  for (const int32_t o : plan->pending_out) {
    while (o >= plan->out_offsets[t + 1]) ++t;
    spilled_.free(spilled_.take(t, plan->swap_out_rows[o]));
    mark(plan->swap_out_slots[o]);
  }
}

void Window::finish(const PlanBuffers& plan) noexcept {
  if (plan.window_epoch != spilled_.epoch()) return;
  for (const uint32_t place : plan.pending_in_sums) spilled_.free(place);
}

void Window::write(const PlanBuffers& plan, const float* sums) {
  if (plan.window_epoch != spilled_.epoch()) return;  // the window was closed in the meantime
  const size_t bytes = static_cast<size_t>(2 * dim_) * sizeof(float);
  for (const uint32_t place : plan.pending_out_sums) {
    std::memcpy(spilled_.data(place), sums, bytes);
    sums += 2 * dim_;
  }
}

void Window::read(const PlanBuffers& plan, float* sums) const {
  if (plan.window_epoch != spilled_.epoch()) {
    throw std::runtime_error("the window of this plan was closed before its sums were read");
  }
  const size_t bytes = static_cast<size_t>(2 * dim_) * sizeof(float);
  for (const uint32_t place : plan.pending_in_sums) {
    std::memcpy(sums, spilled_.data(place), bytes);
    sums += 2 * dim_;
  }
}

std::vector<int32_t> Window::resident_slots() const {
  std::vector<int32_t> slots(slots_);
  slots.erase(std::remove_if(slots.begin(), slots.end(), [this](int32_t slot) { return flags_[slot] == 0; }),
              slots.end());
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  return slots;
}

void Window::put_spilled(int32_t table, const int64_t* rows, int64_t count, const float* sums) {
  spilled_.reserve(count);
  for (int64_t i = 0; i < count; ++i, sums += 2 * dim_) {
    const uint32_t place = spilled_.put(table, static_cast<uint32_t>(rows[i]));
    std::memcpy(spilled_.data(place), sums, static_cast<size_t>(2 * dim_) * sizeof(float));
  }
}

void Window::drop_slots(int64_t begin, int64_t end) noexcept {
  for (int64_t slot = begin; slot < end; ++slot) clear(slot);
}

void Window::close() {
  spilled_.clear();
  for (const int32_t slot : slots_) clear(slot);
  slots_.clear();
}

}  // namespace rec_sdk
