// Sums of gradient rows in the order of aggregate.h: lookups one after the other in blocks of 32, and block
// sums pairwise, like the carries of a binary counter. Blocks that an earlier launch completed (chunks) are
// read as sums.
#pragma once

#include "op_kernels/common/ascendc/gradient_table.h"
#include "op_kernels/common/ascendc/index_windows.h"
#include "op_kernels/common/ascendc/one_mask.h"

namespace rec_sdk {
namespace ascendc {

constexpr int64_t kSumBlock = 32;  // equal to kBlock of aggregate.h
constexpr int64_t kBlocksOfChunk = 4;
constexpr int64_t kChunk = kSumBlock * kBlocksOfChunk;  // a complete subtree, like any 2^k blocks

// The terms of one row: chunks [chunk, chunk + chunks) of the workspace, then lookups [lookup, lookup +
// lookups).
struct Terms {
  int64_t row;
  int64_t chunk, chunks;
  int64_t lookup, lookups;
};

// The columns of records and gradients that a tile contains.
struct TileColumns {
  int64_t column, width;
};

// The index arrays of lookups.
enum LookupArray { kGradRow, kGradColumn, kScale, kGradSource, kLookupArrays };
using LookupIndex = IndexWindows<kLookupArrays, 256>;

__aicore__ inline void open_lookup_index(LookupIndex* index, TPipe* pipe, const Lookups& lookups,
                                         int64_t end) {
  index->init(pipe);
  index->add(pipe, kGradRow, lookups.grad_row, end);
  index->add(pipe, kGradColumn, lookups.grad_column, end);
  index->add(pipe, kScale, reinterpret_cast<const int32_t*>(lookups.scale), end);
  index->add(pipe, kGradSource, lookups.grad_source, end);
}

__aicore__ inline int64_t lookup_arrays(const Lookups& lookups) {
  return 1 + (lookups.grad_column != nullptr) + (lookups.scale != nullptr) + (lookups.grad_source != nullptr);
}

__aicore__ inline int64_t lookup_index_bytes(const Lookups& lookups) {
  return lookup_arrays(lookups) * LookupIndex::kBytesOfArray;
}

// Returns the number of stack levels that the sum of so many lookups needs above the lowest one, which is the
// result itself.
__aicore__ inline constexpr int64_t sum_levels(int64_t lookups) {
  return maximum<int64_t>(1, floor_log2(maximum<int64_t>(1, ceil_div(lookups, kSumBlock))));
}

// The number of gradient rows in each half of the stream buffer. The buffer is large enough to keep copies in
// flight, and to hold the additional gradients of a tile's rows if each row has few lookups.
constexpr int64_t kMostStreamRows = 2 * kSumBlock;
__aicore__ inline constexpr int64_t stream_rows(int64_t pitch) {
  constexpr int64_t kStreamFloats = 4096;
  return minimum(kMostStreamRows, maximum<int64_t>(2, kStreamFloats / pitch));
}

__aicore__ inline constexpr int64_t sum_bytes(int64_t pitch, int64_t levels) {
  return (2 * stream_rows(pitch) + levels) * pitch * 4;
}

// The row at `place`, and the additional terms that are added to it: from the `end` of the previous row up to
// `end`.
struct ExtraGradients {
  uint32_t place, end;
};

class GradientSums {
 public:
  // chunk_sums: the sums of earlier completed chunks, [.., chunk_pitch], or null.
  __aicore__ inline void init(TPipe* pipe, LookupIndex* index, const Lookups& lookups, int64_t pitch,
                              int64_t levels, const float* chunk_sums, int64_t chunk_pitch) {
    index_ = index;
    lookups_ = lookups;
    pitch_ = pitch;
    chunk_sums_ = chunk_sums;
    chunk_pitch_ = chunk_pitch;
    batch_rows_ = stream_rows(pitch);
    pipe->InitBuffer(stream_, static_cast<uint32_t>(2 * batch_rows_ * pitch * 4));
    pipe->InitBuffer(stack_, static_cast<uint32_t>(levels * pitch * 4));
    for (int h = 0; h < 2; ++h) {
      arrived_[h].init(pipe);
      free_[h].init(pipe);
      free_[h].set();
    }
  }

  // Rows of at most kSumBlock lookups are summed in place: the first gradient is loaded into the row,
  // additional ones into one half of the stream, together with the tile and without a cursor. run() must not
  // be called between open() and add_extra() of a half.
  __aicore__ inline int64_t capacity() const { return batch_rows_; }
  __aicore__ inline LocalTensor<float> open(int half) {  // [capacity, pitch]
    free_[half].wait();
    return term(half, 0);
  }
  // Loads gradients of lookups to rows of `to` [.., pitch]. Engine: MTE2.
  template <bool kPlain>
  __aicore__ inline void load_lookups(const LocalTensor<float>& to, int64_t lookup, int64_t n,
                                      const TileColumns& columns) {
    const auto gradients_at = gradients<kPlain>(columns.column);
    const auto pitch = static_cast<uint32_t>(pitch_);
    const int64_t end = lookup + n;
    for (uint32_t place = 0; lookup < end;) {
      const auto rows = index_->reached_run(kGradRow, lookup, end - lookup);
      const auto count = static_cast<uint32_t>(rows.count);
      for (uint32_t i = 0; i < count; ++i, place += pitch) {
        load_gradient<kPlain>(to[place], gradients_at(lookup + i, rows.values.GetValue(i)), columns.width);
      }
      lookup += rows.count;
    }
  }
  // Adds the additional terms of a half to the rows of `out` that `sums` lists. The terms of a row end where
  // the terms of the next row begin. Engine: vector unit.
  __aicore__ inline void add_extra(int half, const ExtraGradients* sums, int64_t n, int64_t width,
                                   const LocalTensor<float>& out) {
    const LocalTensor<float> terms = term(half, 0);
    const auto pitch = static_cast<uint32_t>(pitch_);
    uint32_t place = 0;
    if (n > 0) OneMask::begin(width);
    for (const ExtraGradients* sum = sums; sum != sums + n; ++sum) {
      const LocalTensor<float> to = out[sum->place];
      do {
        OneMask::add(to, to, terms[place]);
        vector_barrier();
        place += pitch;
      } while (place != sum->end);
    }
    if (n > 0) OneMask::end();
    free_[half].set();
  }

  // For each i < sums and t = terms_of(i): sets row t.row of out [.., pitch] to columns [column, column +
  // width) of the sum of the terms t, of which there is at least one. Engine: vector unit.
  template <class TermsOf>
  __aicore__ inline void run(const TermsOf& terms_of, int64_t sums, int64_t column, int64_t width,
                             const LocalTensor<float>& out) {
    if (sums == 0) return;
    column_ = column;
    width_ = static_cast<int32_t>(width);
    plain_ = plain({column, width});
    out_ = out;
    depth_ = 0;
    Cursor next{0, sums, 0, terms_of(0)}, done = next;
    int half = 0;
    int64_t ahead = fill(terms_of, &next, half);
    while (ahead > 0) {
      const int64_t count = ahead;
      ahead = fill(terms_of, &next, 1 - half);
      use(terms_of, &done, half, count);
      half = 1 - half;
    }
  }

  // Computes the addresses of lookups' gradients, from `column` on. kPlain: only for lookups for which
  // plain() is true.
  template <bool kPlain>
  struct Gradients {
    const Lookups& lookups;
    const LookupIndex& index;
    const uint8_t* data;
    int64_t pitch, column;
    int32_t short_pitch;  // the pitch in 32 bits, used if kPlain
    // Returns the address of the gradient of a lookup whose indices are in the index windows.
    __aicore__ inline const float* operator()(int64_t lookup) const {
      return (*this)(lookup, index.at(kGradRow, lookup));
    }
    // Returns the same address if the gradient's row is already known.
    __aicore__ inline const float* operator()(int64_t lookup, int32_t row) const {
      if (kPlain) return reinterpret_cast<const float*>(data + static_cast<int64_t>(row) * short_pitch);
      const int64_t from = lookups.grad_column != nullptr ? index.at(kGradColumn, lookup) : 0;
      if (lookups.grad_source == nullptr) return reinterpret_cast<const float*>(data + row * pitch) + from;
      return row_of_gradient(lookups, index.at(kGradSource, lookup), row) + column + from;
    }
  };
  // Computes the addresses of gradients of lookups whose row indices are consecutive in UB, from `first` on.
  template <bool kPlain>
  struct RunOfGradients {
    Gradients<kPlain> all;
    const LookupIndex::Run& rows;
    int32_t first;
    __aicore__ inline const float* operator()(int32_t lookup) const {
      return all(lookup, rows.values.GetValue(static_cast<uint32_t>(lookup - first)));
    }
  };
  template <bool kPlain>
  __aicore__ inline Gradients<kPlain> gradients(int64_t column) const {
    return {lookups_,
            *index_,
            reinterpret_cast<const uint8_t*>(lookups_.grad.data + column),
            lookups_.grad.stride * 4,
            column,
            static_cast<int32_t>(lookups_.grad.stride * 4)};
  }
  template <bool kPlain>
  __aicore__ inline void load_gradient(const LocalTensor<float>& to, const float* from, int64_t width) const {
    if (kPlain) {
      load(to, from, width);
    } else {
      load_padded(to, from, width);
    }
  }
  // Returns whether all gradients are unscaled rows of one array, less than 2 GiB apart, with a width of
  // whole UB blocks.
  __aicore__ inline bool plain(const TileColumns& columns) const {
    return lookups_.grad_column == nullptr && lookups_.grad_source == nullptr && !scaled() &&
           lookups_.grad.stride <= INT32_MAX / 4 && columns.width % (kUbBlock / 4) == 0;
  }
  __aicore__ inline bool scaled() const { return lookups_.scale != nullptr; }

  __aicore__ inline void finish() {
    for (int h = 0; h < 2; ++h) free_[h].wait();
  }

 private:
  struct Cursor {
    int64_t sum, sums;
    int64_t term;  // index within the sum
    Terms terms;

    __aicore__ inline int64_t count() const { return terms.chunks + terms.lookups; }
    __aicore__ inline bool chunk() const { return term < terms.chunks; }
    // Returns the index of the term in its block of lookups.
    __aicore__ inline int64_t in_block() const { return remainder(term - terms.chunks, kSumBlock); }
    __aicore__ inline int64_t left_of_block() const { return minimum(left(), kSumBlock - in_block()); }
    __aicore__ inline bool at_end() const { return sum == sums; }
    // Returns the number of terms that remain, including this one.
    __aicore__ inline int64_t left() const { return count() - term; }
    // Advances by at most the remaining terms.
    template <class TermsOf>
    __aicore__ inline void advance(const TermsOf& terms_of, int64_t by) {
      term += by;
      if (term < count()) return;
      term = 0;
      if (++sum < sums) terms = terms_of(sum);
    }
  };

  // Starts the copies of the next terms; returns their number.
  template <class TermsOf>
  __aicore__ inline int64_t fill(const TermsOf& terms_of, Cursor* cursor, int half) {
    if (cursor->at_end()) return 0;
    free_[half].wait();
    int64_t count = 0;
    while (count < batch_rows_ && !cursor->at_end()) {
      const Terms& terms = cursor->terms;
      const int64_t room = batch_rows_ - count;
      int64_t n;
      if (cursor->chunk()) {
        n = minimum(room, terms.chunks - cursor->term);
        load_chunks(half, count, terms.chunk + cursor->term, n);
      } else {
        n = minimum(room, cursor->left());
        const int64_t lookup = terms.lookup + cursor->term - terms.chunks;
        if (plain_) {
          load_lookups<true>(term(half, count), lookup, n, {column_, width_});
        } else {
          load_lookups<false>(term(half, count), lookup, n, {column_, width_});
        }
        if (scaled()) load_scales(half, count, lookup, n);
      }
      count += n;
      cursor->advance(terms_of, n);
    }
    arrived_[half].set();
    return count;
  }

  // Loads n chunk sums as terms [at, at + n) of a half.
  __aicore__ inline void load_chunks(int half, int64_t at, int64_t chunk, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      load_padded(term(half, at + i), chunk_sums_ + (chunk + i) * chunk_pitch_ + column_, width_);
      if (scaled()) scales_[half][at + i] = 1.0f;
    }
  }
  __aicore__ inline void load_scales(int half, int64_t at, int64_t lookup, int64_t n) {
    for (int64_t i = 0; i < n; ++i) scales_[half][at + i] = index_->float_at(kScale, lookup + i);
  }

  template <class TermsOf>
  __aicore__ inline void use(const TermsOf& terms_of, Cursor* cursor, int half, int64_t count) {
    arrived_[half].wait();
    OneMask::begin(width_);
    if (scaled()) {
      for (int64_t i = 0; i < count; ++i) OneMask::scale(term(half, i), scales_[half][i]);
      vector_barrier();
    }
    for (int64_t i = 0; i < count;) {
      const int64_t n = cursor->chunk() ? 1 : minimum(count - i, cursor->left_of_block());
      if (cursor->chunk()) {
        push(*cursor, term(half, i));
      } else {
        add_lookups(*cursor, half, i, n);
      }
      end_terms(*cursor, n);
      cursor->advance(terms_of, n);
      i += n;
    }
    OneMask::end();
    free_[half].set();
  }

  // Adds terms [i, i + n) of a half, lookups of one block; the first two are added by one instruction.
  __aicore__ inline void add_lookups(const Cursor& at, int half, int64_t i, int64_t n) {
    const LocalTensor<float> terms = term(half, i);
    const auto pitch = static_cast<uint32_t>(pitch_), end = static_cast<uint32_t>(n) * pitch;
    uint32_t place = 0;
    if (at.in_block() == 0) {
      if (n == 1) return push(at, terms);
      OneMask::add(level(at.terms.row, depth_++), terms, terms[pitch]);
      vector_barrier();
      place = 2 * pitch;
    }
    for (const LocalTensor<float> sum = level(at.terms.row, depth_ - 1); place != end; place += pitch) {
      OneMask::add(sum, sum, terms[place]);
      vector_barrier();
    }
  }

  __aicore__ inline void push(const Cursor& at, const LocalTensor<float>& value) {
    OneMask::copy(level(at.terms.row, depth_++), value);
    vector_barrier();
  }
  // Combines the sums that the terms complete: a chunk, or n lookups of one block.
  __aicore__ inline void end_terms(const Cursor& at, int64_t n) {
    const int64_t row = at.terms.row, chunks = at.terms.chunks, lookup = at.term - chunks + n - 1;
    const bool last = n == at.left();
    if (at.chunk()) {
      carry(row, at.term);
    } else if (last || remainder(lookup, kSumBlock) == kSumBlock - 1) {
      carry(row, chunks * kBlocksOfChunk + quotient(lookup, kSumBlock));
    }
    if (!last) return;
    while (depth_ > 1) fold(row);
    depth_ = 0;
  }

  // Combines completed sums after block i of the row, where blocks are counted in complete subtrees.
  __aicore__ inline void carry(int64_t row, int64_t i) {
    for (; i & 1; i >>= 1) fold(row);
  }
  __aicore__ inline void fold(int64_t row) {
    --depth_;
    add_to(level(row, depth_ - 1), level(row, depth_));
  }
  __aicore__ inline void add_to(const LocalTensor<float>& sum, const LocalTensor<float>& value) {
    OneMask::add(sum, sum, value);
    vector_barrier();
  }

  __aicore__ inline LocalTensor<float> level(int64_t row, int64_t depth) {
    if (depth == 0) return out_[static_cast<uint32_t>(row * pitch_)];
    return stack_.Get<float>()[static_cast<uint32_t>((depth - 1) * pitch_)];
  }
  __aicore__ inline LocalTensor<float> term(int half, int64_t i) {
    return stream_.Get<float>()[static_cast<uint32_t>((half * batch_rows_ + i) * pitch_)];
  }

  LookupIndex* index_;
  Lookups lookups_;
  int64_t pitch_, chunk_pitch_, batch_rows_, column_, depth_;
  int32_t width_;
  bool plain_;  // the result of plain() for the current columns
  const float* chunk_sums_;
  LocalTensor<float> out_;
  Landing stream_;
  Scratch stack_;
  float scales_[2][kMostStreamRows];
  Signal<HardEvent::MTE2_V> arrived_[2];
  Signal<HardEvent::V_MTE2> free_[2];
};

}  // namespace ascendc
}  // namespace rec_sdk
