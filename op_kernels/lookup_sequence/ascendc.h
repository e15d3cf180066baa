#pragma once

#include "op_kernels/common/ascendc/move_rows.h"
#include "op_kernels/common/ascendc/stored_rows.h"

namespace rec_sdk {
namespace ascendc {

// Lookup of 16-bit weights: a tile of rows is loaded, widened by one instruction and stored with one copy.
template <class Stored, class Source>
class WideningLookup {
 public:
  __aicore__ inline void run(TPipe* pipe, const Source& weights, const LookupSequence& a) {
    weights_ = weights;
    out_ = a.out;
    parts_ = RowParts(a.count, a.weights.dim, kTile, kSmallestPart, kWidthMultiple);
    const Share share = share_of_core(parts_.units());
    if (share.begin == share.end) return;
    width_ = align_up(parts_.longest(), kWidthMultiple);
    const int64_t units = tile_rows(kTile / width_, share.end - share.begin);
    pipe->InitBuffer(stored_, 2, static_cast<uint32_t>(units * width_ * sizeof(Stored)));
    pipe->InitBuffer(widened_, 2, static_cast<uint32_t>(units * width_ * sizeof(float)));
    slots_.init(pipe);
    slots_.start(a.slots, parts_.row(share.begin), parts_.row(share.end - 1) + 1);
    for (int64_t first = share.begin; first < share.end; first += units) {
      const int64_t n = minimum(units, share.end - first);
      load_tile(first, n);
      widen_tile(first, n);
      store_tile(first, n);
    }
  }

 private:
  static constexpr int64_t kTile = 12288, kSmallestPart = 1024, kSlots = 1024;  // weights; slots
  static_assert(kTile / kWidthMultiple <= kMaxDmaBlocks, "a tile goes out in one copy");
  static_assert(2 * kTile * (sizeof(Stored) + sizeof(float)) + ScalarStream<int32_t, kSlots>::kBytes <=
                    kUbBytes,
                "UB");

  __aicore__ inline void load_tile(int64_t first, int64_t units) {
    LocalTensor<Stored> tile = stored_.template AllocTensor<Stored>();
    if (parts_.whole()) {
      load_rows_of_weights(tile, width_, weights_, &slots_, first, units, 0, weights_.dim);
    } else {
      for (int64_t u = 0; u < units; ++u) {
        load_rows_of_weights(tile[static_cast<uint32_t>(u * width_)], width_, weights_, &slots_,
                             parts_.row(first + u), 1, parts_.offset(first + u), parts_.size(first + u));
      }
    }
    stored_.EnQue(tile);
  }

  __aicore__ inline void widen_tile(int64_t first, int64_t units) {
    LocalTensor<Stored> from = stored_.template DeQue<Stored>();
    LocalTensor<float> to = widened_.template AllocTensor<float>();
    if (parts_.whole()) {  // also widens the padding between the rows
      widen(to, from, units * width_);
    } else {
      for (int64_t u = 0; u < units; ++u) {
        const auto at = static_cast<uint32_t>(u * width_);
        widen(to[at], from[at], parts_.size(first + u));
      }
    }
    widened_.EnQue(to);
    stored_.FreeTensor(from);
  }

  __aicore__ inline void store_tile(int64_t first, int64_t units) {
    LocalTensor<float> tile = widened_.template DeQue<float>();
    if (parts_.whole()) {
      store_rows(out_ + first * weights_.dim, tile, units, weights_.dim, weights_.dim, width_);
    } else {
      for (int64_t u = 0; u < units; ++u) {
        store(out_ + parts_.row(first + u) * weights_.dim + parts_.offset(first + u),
              tile[static_cast<uint32_t>(u * width_)], parts_.size(first + u));
      }
    }
    widened_.FreeTensor(tile);
  }

  Source weights_{};
  const float* out_ = nullptr;
  RowParts parts_;
  int64_t width_ = 0;
  AscendC::TQue<TPosition::VECIN, 2> stored_;
  AscendC::TQue<TPosition::VECOUT, 2> widened_;
  ScalarStream<int32_t, kSlots> slots_;
};

// weights: a.weights, or a StagedWeights that adds the rows of a staging buffer.
template <class Source>
__aicore__ inline void lookup_sequence_in(const Source& weights, const LookupSequence& a) {
  TPipe pipe;
  if (a.weights.dtype == DType::kFloat16) {
    WideningLookup<half, Source> lookup;
    lookup.run(&pipe, weights, a);
  } else if (a.weights.dtype == DType::kBFloat16) {
    WideningLookup<BFloat16, Source> lookup;
    lookup.run(&pipe, weights, a);
  } else {
    RowMover<Direction::kFromTable, TableOf<Source>> mover;
    mover.run(&pipe, {table_of(weights, 0), reinterpret_cast<const uint8_t*>(a.out), a.slots,
                      a.weights.dim * static_cast<int64_t>(sizeof(float)), a.count});
  }
}

__aicore__ inline void lookup_sequence(const LookupSequence& a) { lookup_sequence_in(a.weights, a); }

}  // namespace ascendc
}  // namespace rec_sdk
