// Radix sort by an integer key. It must be fast, because training waits while it sorts lists of changed rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace rec_sdk {

// Sorts stably in ascending order of key(item), a uint64_t. There is no pass for a digit that is equal in all
// keys. Throws std::bad_alloc.
template <class Item, class Key>
void radix_sort(std::vector<Item>* items, const Key& key) {
  constexpr int kBits = 11, kKeyBits = 64;
  constexpr size_t kFew = 512;  // for fewer items, clearing the counters takes longer than a comparison sort
  constexpr uint64_t kDigits = uint64_t{1} << kBits;
  if (items->size() < kFew) {
    std::stable_sort(items->begin(), items->end(),
                     [&key](const Item& a, const Item& b) { return key(a) < key(b); });
    return;
  }
  uint64_t all = ~uint64_t{0}, any = 0;
  for (const Item& item : *items) {
    all &= key(item);
    any |= key(item);
  }
  std::vector<Item> other(items->size());
  std::array<size_t, kDigits> places;
  for (int shift = 0; shift < kKeyBits; shift += kBits) {
    if (((all ^ any) >> shift) % kDigits == 0) continue;
    places.fill(0);
    for (const Item& item : *items) ++places[(key(item) >> shift) % kDigits];
    size_t sum = 0;
    for (size_t& place : places) {
      const size_t count = place;
      place = sum;
      sum += count;
    }
    for (const Item& item : *items) other[places[(key(item) >> shift) % kDigits]++] = item;
    items->swap(other);
  }
}

}  // namespace rec_sdk
