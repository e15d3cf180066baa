// Sums of gradient rows in the order of aggregate.h: lookups one after the other in blocks of 32, block sums
// pairwise, as a binary counter carries. Blocks complete since an earlier launch (chunks) come as their sums.
#pragma once

#include "op_kernels/common/ascendc/gradient_table.h"
#include "op_kernels/common/ascendc/index_windows.h"

namespace rec_sdk {
namespace ascendc {

constexpr int64_t kSumBlock = 32;  // kBlock of aggregate.h
constexpr int64_t kBlocksOfChunk = 4;
constexpr int64_t kChunk = kSumBlock * kBlocksOfChunk;  // a whole subtree, as blocks of 2^k are

// The terms of one row: chunks [chunk, chunk + chunks) of the workspace, then lookups [lookup, lookup +
// lookups).
struct Terms {
  int64_t row;
  int64_t chunk, chunks;
  int64_t lookup, lookups;
};

// Index arrays of lookups.
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

// Levels of the stack for the sum of that many lookups, above the lowest one, which is the result itself.
__aicore__ inline int64_t sum_levels(int64_t lookups) {
  return maximum<int64_t>(1, floor_log2(maximum<int64_t>(1, ceil_div(lookups, kSumBlock))));
}

// Rows of gradients under way at a time, twice: enough for long copies, a whole block of narrow rows.
__aicore__ inline int64_t stream_rows(int64_t pitch) {
  constexpr int64_t kStreamFloats = 4096;
  return minimum(kSumBlock, maximum<int64_t>(2, kStreamFloats / pitch));
}

__aicore__ inline int64_t sum_bytes(int64_t pitch, int64_t levels) {
  return (2 * stream_rows(pitch) + levels) * pitch * 4;
}

class GradientSums {
 public:
  // chunk_sums: [.., chunk_pitch] or null.
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

  // For each i < sums and t = terms_of(i): row t.row of out [.., pitch] becomes columns [column, column +
  // width) of the sum of the terms t, which are at least one. V.
  template <class TermsOf>
  __aicore__ inline void run(const TermsOf& terms_of, int64_t sums, int64_t column, int64_t width,
                             const LocalTensor<float>& out) {
    if (sums == 0) return;
    column_ = column;
    width_ = static_cast<int32_t>(width);
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

  // The address of a lookup's gradient, from `column` on.
  __aicore__ inline const float* gradient(int64_t lookup, int64_t column) {
    index_->reach(lookup);
    if (lookups_.grad_column != nullptr) column += index_->at(kGradColumn, lookup);
    const int64_t row = index_->at(kGradRow, lookup);
    if (lookups_.grad_source == nullptr) return lookups_.grad.data + row * lookups_.grad.stride + column;
    return row_of_gradient(lookups_, index_->at(kGradSource, lookup), row) + column;
  }
  __aicore__ inline bool scaled() const { return lookups_.scale != nullptr; }

  __aicore__ inline void finish() {
    for (int h = 0; h < 2; ++h) free_[h].wait();
  }

 private:
  struct Cursor {
    int64_t sum, sums;
    int64_t term;  // of the sum
    Terms terms;

    __aicore__ inline int64_t count() const { return terms.chunks + terms.lookups; }
    __aicore__ inline bool chunk() const { return term < terms.chunks; }
    __aicore__ inline bool first_of_block() const { return (term - terms.chunks) % kSumBlock == 0; }
    __aicore__ inline bool at_end() const { return sum == sums; }
    template <class TermsOf>
    __aicore__ inline void advance(const TermsOf& terms_of) {
      if (++term < count()) return;
      term = 0;
      if (++sum < sums) terms = terms_of(sum);
    }
  };

  // Starts the copies of the next terms; returns how many.
  template <class TermsOf>
  __aicore__ inline int64_t fill(const TermsOf& terms_of, Cursor* cursor, int half) {
    if (cursor->at_end()) return 0;
    free_[half].wait();
    int64_t count = 0;
    for (; count < batch_rows_ && !cursor->at_end(); ++count) {
      const Terms& terms = cursor->terms;
      const int64_t lookup = terms.lookup + cursor->term - terms.chunks;
      const bool chunk = cursor->chunk();
      const float* from = chunk ? chunk_sums_ + (terms.chunk + cursor->term) * chunk_pitch_ + column_
                                : gradient(lookup, column_);
      load_padded(term(half, count), from, width_);
      if (scaled()) scales_[half][count] = chunk ? 1.0f : index_->float_at(kScale, lookup);
      cursor->advance(terms_of);
    }
    arrived_[half].set();
    return count;
  }

  template <class TermsOf>
  __aicore__ inline void use(const TermsOf& terms_of, Cursor* cursor, int half, int64_t count) {
    arrived_[half].wait();
    if (scaled()) {
      for (int64_t i = 0; i < count; ++i) {
        AscendC::Muls(term(half, i), term(half, i), scales_[half][i], width_);
      }
      vector_barrier();
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool alone = i + 1 == count || cursor->term + 1 == cursor->count();
      if (cursor->chunk() || (cursor->first_of_block() && alone)) {
        push(*cursor, term(half, i));
      } else if (cursor->first_of_block()) {
        push_sum(*cursor, term(half, i), term(half, i + 1));
        cursor->advance(terms_of);
        ++i;
      } else {
        add_to(level(cursor->terms.row, depth_ - 1), term(half, i));
      }
      end_term(*cursor);
      cursor->advance(terms_of);
    }
    free_[half].set();
  }

  __aicore__ inline void push(const Cursor& at, const LocalTensor<float>& value) {
    copy_values(level(at.terms.row, depth_++), value, width_);
    vector_barrier();
  }
  // The first two terms of a block in one instruction.
  __aicore__ inline void push_sum(const Cursor& at, const LocalTensor<float>& first,
                                  const LocalTensor<float>& second) {
    AscendC::Add(level(at.terms.row, depth_++), first, second, width_);
    vector_barrier();
  }

  // Combines what the term completes.
  __aicore__ inline void end_term(const Cursor& at) {
    const int64_t row = at.terms.row, chunks = at.terms.chunks, lookup = at.term - chunks;
    const bool last = at.term + 1 == at.count();
    if (at.chunk()) {
      carry(row, at.term);
    } else if (last || lookup % kSumBlock == kSumBlock - 1) {
      carry(row, chunks * kBlocksOfChunk + lookup / kSumBlock);
    }
    if (!last) return;
    while (depth_ > 1) fold(row);
    depth_ = 0;
  }

  // After block i of the row, counted in units that are whole subtrees.
  __aicore__ inline void carry(int64_t row, int64_t i) {
    for (; i & 1; i >>= 1) fold(row);
  }
  __aicore__ inline void fold(int64_t row) {
    --depth_;
    add_to(level(row, depth_ - 1), level(row, depth_));
  }
  __aicore__ inline void add_to(const LocalTensor<float>& sum, const LocalTensor<float>& value) {
    AscendC::Add(sum, sum, value, width_);
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
  const float* chunk_sums_;
  LocalTensor<float> out_;
  Scratch stream_, stack_;
  float scales_[2][kSumBlock];
  Signal<HardEvent::MTE2_V> arrived_[2];
  Signal<HardEvent::V_MTE2> free_[2];
};

}  // namespace ascendc
}  // namespace rec_sdk
