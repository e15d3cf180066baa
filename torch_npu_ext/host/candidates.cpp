#include "torch_npu_ext/host/candidates.h"

#include <algorithm>
#include <new>

namespace rec_sdk {

// At two thirds full a search looks at two places on the average, and at four for an id that is not there.
uint64_t Candidates::grown(int64_t extra) const {
  return std::max(places_for(size_ + extra), places_ + places_ / 2);
}

int64_t Candidates::growth(int64_t extra) const {
  if (places_for(size_ + extra) <= places_) return 0;
  return static_cast<int64_t>(grown(extra) * (sizeof(Entry) + (wide_ ? sizeof(Extra) : 0)));
}

void Candidates::reserve(int64_t extra) {
  if (growth(extra) > 0) rehash(grown(extra));
}

void Candidates::shrink() noexcept {
  const uint64_t wanted = places_for(size_ + size_ / 4);
  if (places_ / 4 < wanted) return;
  try {
    rehash(wanted);
  } catch (const std::bad_alloc&) {  // then it stays as it is
  }
}

void Candidates::rehash(uint64_t places) {
  Candidates other(wide_);
  other.entries_ = HugeArray<Entry>(places);
  if (wide_) other.extras_ = HugeArray<Extra>(places);
  other.places_ = places;
  for_each([&](int64_t id, const Values& values) { other.set(other.find_or_add(id), values); });
  *this = std::move(other);
}

int64_t Candidates::find_or_add(int64_t id) {
  uint64_t p = home(id);
  while (entries_[p].count != 0) {
    if (entries_[p].id == id) return static_cast<int64_t>(p);
    p = next(p);
  }
  entries_[p] = {id, 0, 0};
  if (wide_) extras_[p] = {0, 0, 0};  // another id may have been here
  ++size_;
  return static_cast<int64_t>(p);
}

// An entry may be moved to the hole when the hole is not before its home.
bool Candidates::erase(int64_t id) noexcept {
  const int64_t found = find(id);
  if (found < 0) return false;
  uint64_t hole = static_cast<uint64_t>(found);
  for (uint64_t p = next(hole); entries_[p].count != 0; p = next(p)) {
    const uint64_t from_home = (p + places_ - home(entries_[p].id)) % places_;
    if (from_home < (p + places_ - hole) % places_) continue;
    entries_[hole] = entries_[p];
    if (wide_) extras_[hole] = extras_[p];
    hole = p;
  }
  entries_[hole].count = 0;
  --size_;
  return true;
}

Candidates::Values Candidates::get(int64_t place) const {
  const Entry& entry = entries_[place];
  Values values{entry.count, entry.last_use, 0, 0};
  if (wide_) {
    values.clicks = extras_[place].clicks;
    values.timestamp = extras_[place].timestamp;
  }
  return values;
}

void Candidates::set(int64_t place, const Values& values) noexcept {
  entries_[place].count = values.count;
  entries_[place].last_use = values.last_use;
  if (wide_) extras_[place] = {values.timestamp, values.clicks, 0};
}

void Candidates::clear() { *this = Candidates(wide_); }

}  // namespace rec_sdk
