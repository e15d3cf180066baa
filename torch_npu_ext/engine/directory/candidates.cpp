#include "torch_npu_ext/engine/directory/candidates.h"

#include <algorithm>
#include <new>

namespace rec_sdk {

// At a load factor of 2/3, a search visits two positions on average, or five for an id that is not in the
// map.
Candidates::Candidates(bool wide, uint64_t places, const IdSeed& seed)
    : cells_of_place_(wide ? 2 : 1),
      places_(places),
      seed_(seed),
      room_(ids_in(places)),
      cells_(places * cells_of_place_) {}

uint64_t Candidates::places_with(int64_t extra) const {
  const uint64_t needed = places_for(size_ + extra);
  return needed <= places_ ? places_ : std::max(needed, places_ + places_ / 2);
}

int64_t Candidates::growth(int64_t extra) const {
  return size_ + extra <= room_ ? 0
                                : static_cast<int64_t>(places_with(extra) * cells_of_place_ * sizeof(Cell));
}

void Candidates::reserve(int64_t extra) {
  if (size_ + extra > room_) rehash(places_with(extra));
}

void Candidates::shrink() noexcept {
  const uint64_t wanted = places_for(size_ + size_ / 4);
  if (places_ / 4 < wanted) return;
  try {
    rehash(wanted);
  } catch (const std::bad_alloc&) {  // the map keeps its size
  }
}

void Candidates::rehash(uint64_t places) {
  for (IdSeed seed = seed_.fresh();;) {
    Candidates other(wide(), places, seed);
    for (uint64_t p = 0; p < places_ && other.room_ != kCrowded; ++p) {
      if (entry(p).count == 0) continue;
      other.set(other.find_or_add(entry(p).id), get(static_cast<int64_t>(p)));
    }
    seed = other.seed_.fresh();
    if (other.room_ == kCrowded) continue;
    other.moves_ = moves_ + 1;
    *this = std::move(other);
    return;
  }
}

// Later entries move into the hole that the erased entry leaves. An entry may move there unless the hole is
// before its home position.
bool Candidates::erase(int64_t id) noexcept {
  const int64_t found = find(id);
  if (found < 0) return false;
  uint64_t hole = static_cast<uint64_t>(found);
  for (uint64_t p = next(hole); entry(p).count != 0; p = next(p)) {
    if (distance(home(entry(p).id), p) < distance(hole, p)) continue;
    entry(hole) = entry(p);
    if (wide()) extra(hole) = extra(p);
    hole = p;
  }
  entry(hole).count = 0;
  --size_;
  ++erased_;
  return true;
}

void Candidates::clear() { *this = Candidates(wide()); }

}  // namespace rec_sdk
