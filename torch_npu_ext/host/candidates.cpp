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
  return static_cast<int64_t>(grown(extra) * cells_of_place_ * sizeof(Cell));
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
  Candidates other(wide());
  other.cells_ = HugeArray<Cell>(places * cells_of_place_);
  other.places_ = places;
  for_each([&](int64_t id, const Values& values) { other.set(other.find_or_add(id), values); });
  *this = std::move(other);
}

int64_t Candidates::find_or_add(int64_t id) {
  uint64_t p = home(id);
  while (entry(p).count != 0) {
    if (entry(p).id == id) return static_cast<int64_t>(p);
    p = next(p);
  }
  entry(p) = {id, 0, 0};
  if (wide()) extra(p) = {0, 0, 0};  // another id may have been here
  ++size_;
  return static_cast<int64_t>(p);
}

// An entry may be moved to the hole when the hole is not before its home.
bool Candidates::erase(int64_t id) noexcept {
  const int64_t found = find(id);
  if (found < 0) return false;
  uint64_t hole = static_cast<uint64_t>(found);
  for (uint64_t p = next(hole); entry(p).count != 0; p = next(p)) {
    const uint64_t from_home = (p + places_ - home(entry(p).id)) % places_;
    if (from_home < (p + places_ - hole) % places_) continue;
    entry(hole) = entry(p);
    if (wide()) extra(hole) = extra(p);
    hole = p;
  }
  entry(hole).count = 0;
  --size_;
  return true;
}

void Candidates::clear() { *this = Candidates(wide()); }

}  // namespace rec_sdk
