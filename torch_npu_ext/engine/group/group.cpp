#include "torch_npu_ext/engine/group/group.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace rec_sdk {
namespace {

// The number of slots is limited, because slots and the missing rows of a batch share one 32-bit numbering.
constexpr int64_t kMaxSlots = int64_t{1} << 30;

int64_t count_slots(const GroupSpec& spec) {
  int64_t slots = 0;
  for (const TableSpec& table : spec.tables) {
    slots += std::min(table.slots, kMaxSlots + 1) + (table.default_row ? 1 : 0);
    if (slots > kMaxSlots) {
      throw std::invalid_argument("table '" + table.name +
                                  "': the device caches of a group may have 2^30 slots " + "together, got " +
                                  std::to_string(slots) + " up to this table");
    }
  }
  return slots;
}

void check_features(const GroupSpec& spec) {
  int32_t previous = 0;
  for (size_t f = 0; f < spec.features.size(); ++f) {
    const int32_t table = spec.features[f].table;
    if (table < previous || table >= static_cast<int32_t>(spec.tables.size())) {
      throw std::invalid_argument("feature_tables[" + std::to_string(f) + "] is " + std::to_string(table) +
                                  "; features must be ordered by table, and there are " +
                                  std::to_string(spec.tables.size()) + " tables");
    }
    previous = table;
  }
}

}  // namespace

Group::Group(GroupSpec spec)
    : layout(spec.layout),
      features((check_features(spec), spec.features)),
      pooled(spec.pooled),
      row_ids(spec.row_ids),
      origins(spec.origins),
      slots(count_slots(spec)),
      window(spec.layout.dim, slots) {
  sources = !pooled && features.size() > 1;
  for (const Feature& feature : features) scaled = scaled || (pooled && feature.mean);
  tables.reserve(spec.tables.size());
  int64_t first_slot = 0;
  for (TableSpec& table : spec.tables) {
    tables.emplace_back(std::move(table), layout, spec.policy, first_slot, &memory);
    first_slot = tables.back().end_slot();
  }
  stats.resize(tables.size());
  large_evictions.resize(tables.size());
  slot_ids = HugeArray<int64_t>(static_cast<size_t>(slots));
  if (origins) {
    origin_of_slot = HugeArray<int32_t>(static_cast<size_t>(slots));
    std::iota(origin_of_slot.data(), origin_of_slot.data() + slots, 0);
  }
  uses = SlotUses(slots);
  uses.start_at(spec.serial);
  future = FutureUses(slots, static_cast<int64_t>(tables.size()));
  bounds_warnings.reserve(tables.size());  // so that warn_bounds() cannot fail
}

void Group::warn_bounds(const BoundsError& error) {
  for (BoundsError& known : bounds_warnings) {
    if (known.table == error.table) {
      known.count += error.count;
      return;
    }
  }
  bounds_warnings.push_back(error);
}

}  // namespace rec_sdk
