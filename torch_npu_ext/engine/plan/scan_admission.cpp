// Lookups of ids without a slot, in tables that do not admit every id.
#include "torch_npu_ext/engine/plan/scan.h"
#include "torch_npu_ext/engine/plan/scan_directories.h"

namespace rec_sdk {

void Scan::count_unknown(Group* group, int32_t t, const Batch& batch) {
  Candidates& candidates = group->tables[t].candidates;
  const int64_t moves = candidates.moves();
  std::vector<UnknownLookup>& unknown = unknown_[t];
  unknown.clear();
  int64_t total = 0;
  for (size_t p = tables_[t].first_part; p < tables_[t].end_part; ++p) total += parts_[p].missed;
  unknown.reserve(static_cast<size_t>(total));
  for (size_t p = tables_[t].first_part; p < tables_[t].end_part; ++p) {
    const Part& part = parts_[p];
    const uint32_t* const missed = missed_.data() + part.begin;
    UnknownLookup* const first = unknown.data() + unknown.size();
    with_ids(batch, *part.piece, [&](const auto* ids) {
      for (int64_t m = 0; m < part.missed; ++m) {
        const uint32_t lookup = missed[m] & ~kKnownRow;
        const int64_t known = (missed[m] & kKnownRow) != 0 ? UnknownLookup::kKnown : 0;
        unknown.push_back({ids[lookup - part.piece->begin], known, lookup});
      }
    });
    count_candidates(&group->tables[t], batch, *part.piece, first, unknown.data() + unknown.size(),
                     tables_[t].life);
  }
  if (candidates.moves() == moves) return;
  for (UnknownLookup& one : unknown) {
    if (one.candidate != UnknownLookup::kKnown) one.candidate = candidates.find(one.id);
  }
}

// Answers lookups of ids that get no row, and moves the others to the front, in order; how many. All are
// asked before any of them is added, so that the processor looks ahead across lookups.
size_t Scan::refuse(uint32_t slot, const Admission& admission, std::vector<UnknownLookup>* unknown) noexcept {
  UnknownLookup* const all = unknown->data();
  const size_t count = unknown->size();
  size_t accepted = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAdmissionDistance < count) admission.prefetch(all[i + kAdmissionDistance]);
    const UnknownLookup one = all[i];
    const bool known = one.candidate == UnknownLookup::kKnown;
    local[one.lookup] = slot;  // of the others too, for now
    all[accepted] = one;
    accepted += known || admission.admits(one);
  }
  return accepted;
}

}  // namespace rec_sdk
