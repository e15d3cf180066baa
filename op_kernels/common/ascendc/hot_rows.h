// Hot rows, those with more than kChunk lookups: whole chunks of them are summed by all cores before the rows
// are updated, in launches of their own. The segments are known to the device only, so it also finds the hot
// rows.
//
//   find_hot_rows   each core scans a part of the rows, and lists the hot ones
//   sum_chunks      each core sums its share of all the chunks
//   update_rows     each core owns its share of the rows, counted in bytes to move
//
// A chunk of kChunk lookups contains exactly one multiple of kChunk, and that is its place in the workspace.
#pragma once

#include "op_kernels/common/ascendc/gradient_sums.h"

namespace rec_sdk {
namespace ascendc {

constexpr int64_t kMaxParts = 128;

// Up to here the two more launches take longer than the longest row can.
constexpr int64_t kLookupsWithoutChunks = 4096;

// What find_hot_rows says of a part of the rows.
enum PartField { kFirstRow, kFirstLookup, kFirstEntry, kHotRows, kChunks, kPartFields = 8 };
// A hot row. kChunksBefore: of the hot rows before it in its part.
enum EntryField { kRow, kLookup, kRowChunks, kChunksBefore, kEntryFields };

struct HotWorkspace {
  int32_t* parts;    // [part_count, kPartFields]
  int32_t* entries;  // [places, kEntryFields]: of each part from its kFirstEntry on
  float* sums;       // [places, pitch]
  int64_t part_count;
  int64_t pitch;
};

__aicore__ inline int64_t first_place(int64_t lookup) { return ceil_div(lookup, kChunk); }

__aicore__ inline int64_t chunks_of(int64_t lookups, const HotWorkspace& workspace) {
  return workspace.part_count > 0 && lookups > kChunk ? lookups / kChunk : 0;
}

// Lists the hot rows of this core's share of the rows.
class HotRowFinder {
 public:
  __aicore__ inline void run(TPipe* pipe, const Segments& segments, const HotWorkspace& workspace) {
    workspace_ = workspace;
    const Share share = share_of_core(segments.rows);
    offsets_.init(pipe);
    offsets_.add(pipe, 0, segments.offsets, share.end + 1);
    pipe->InitBuffer(entries_, kBatch * kEntryFields * 4);
    pipe->InitBuffer(part_, kPartFields * 4);
    written_.init(pipe);
    stored_.init(pipe);
    const int64_t first_lookup = offsets_.get(0, share.begin);
    first_entry_ = first_place(first_lookup);
    hot_rows_ = chunks_ = 0;
    scan(share, first_lookup);
    if (hot_rows_ % kBatch > 0) store_entries(hot_rows_ % kBatch);
    store_part(share.begin, first_lookup);
    offsets_.finish();
  }

 private:
  static constexpr int64_t kBatch = 256;
  static constexpr int64_t kStride = 32;  // rows that cannot be hot if all of them together are not

  __aicore__ inline void scan(const Share& share, int64_t first_lookup) {
    int64_t begin = first_lookup;
    for (int64_t row = share.begin; row < share.end;) {
      const int64_t next = minimum(row + kStride, share.end), end = offsets_.get(0, next);
      if (end - begin > kChunk) scan_each(row, next, begin);
      row = next;
      begin = end;
    }
  }

  __aicore__ inline void scan_each(int64_t row, int64_t last, int64_t begin) {
    for (; row < last; ++row) {
      const int64_t end = offsets_.get(0, row + 1);
      if (end - begin > kChunk) list(row, begin, (end - begin) / kChunk);
      begin = end;
    }
  }

  __aicore__ inline void list(int64_t row, int64_t lookup, int64_t chunks) {
    const LocalTensor<int32_t> entry =
        entries_.Get<int32_t>()[static_cast<uint32_t>(hot_rows_ % kBatch * kEntryFields)];
    entry.SetValue(kRow, static_cast<int32_t>(row));
    entry.SetValue(kLookup, static_cast<int32_t>(lookup));
    entry.SetValue(kRowChunks, static_cast<int32_t>(chunks));
    entry.SetValue(kChunksBefore, static_cast<int32_t>(chunks_));
    ++hot_rows_;
    chunks_ += chunks;
    if (hot_rows_ % kBatch == 0) store_entries(kBatch);
  }

  __aicore__ inline void store_entries(int64_t count) {
    written_.order();
    int32_t* to = workspace_.entries + (first_entry_ + hot_rows_ - count) * kEntryFields;
    store(to, entries_.Get<int32_t>(), count * kEntryFields);
    stored_.order();
  }

  __aicore__ inline void store_part(int64_t row, int64_t lookup) {
    const LocalTensor<int32_t> part = part_.Get<int32_t>();
    part.SetValue(kFirstRow, static_cast<int32_t>(row));
    part.SetValue(kFirstLookup, static_cast<int32_t>(lookup));
    part.SetValue(kFirstEntry, static_cast<int32_t>(first_entry_));
    part.SetValue(kHotRows, static_cast<int32_t>(hot_rows_));
    part.SetValue(kChunks, static_cast<int32_t>(chunks_));
    for (uint32_t unused = kChunks + 1; unused < kPartFields; ++unused) part.SetValue(unused, 0);
    written_.order();
    store(workspace_.parts + AscendC::GetBlockIdx() * kPartFields, part, kPartFields);
  }

  HotWorkspace workspace_;
  IndexWindows<1, 1024> offsets_;
  Scratch entries_, part_;
  int64_t first_entry_, hot_rows_, chunks_;
  Signal<HardEvent::S_MTE3> written_;
  Signal<HardEvent::MTE3_S> stored_;
};

// The parts, for a later launch.
class HotParts {
 public:
  __aicore__ inline void init(TPipe* pipe, const HotWorkspace& workspace) {
    workspace_ = workspace;
    if (workspace.part_count == 0) return;
    pipe->InitBuffer(buffer_, static_cast<uint32_t>(workspace.part_count * kPartFields * 4));
    load(buffer_.Get<int32_t>(), workspace.parts, workspace.part_count * kPartFields);
    Signal<HardEvent::MTE2_S> arrived;
    arrived.init(pipe);
    arrived.order();
  }
  __aicore__ inline int64_t count() const { return workspace_.part_count; }
  __aicore__ inline int64_t get(int64_t part, PartField field) {
    return buffer_.Get<int32_t>().GetValue(static_cast<uint32_t>(part * kPartFields + field));
  }
  // [kHotRows, kEntryFields]
  __aicore__ inline const int32_t* entries(int64_t part) {
    return workspace_.entries + get(part, kFirstEntry) * kEntryFields;
  }
  // Of hot row i of a part. By the scalar unit from GM: a search reads few of them.
  __aicore__ inline int64_t entry(int64_t part, int64_t i, EntryField field) {
    const int64_t at = (get(part, kFirstEntry) + i) * kEntryFields + field;
    return global(workspace_.entries, at + 1).GetValue(static_cast<uint64_t>(at));
  }

 private:
  HotWorkspace workspace_;
  Scratch buffer_;
};

}  // namespace ascendc
}  // namespace rec_sdk
