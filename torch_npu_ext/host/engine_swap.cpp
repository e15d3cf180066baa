// The engine's part in a swap: records between the host store and staging.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/host/engine.h"
#include "torch_npu_ext/host/parallel.h"

namespace rec_sdk {
namespace {

constexpr int32_t kRowsPerPiece = 1024;
constexpr int32_t kRowsAhead = 8;
constexpr int64_t kLookupsPerRecord = 4;
constexpr size_t kCacheLine = 64;

struct RowRange {
  int32_t table, begin, end;
};

// The rows [offsets[t], offsets[t + 1]) of every table, in pieces for threads.
std::vector<RowRange> split_rows(const std::vector<int32_t>& offsets) {
  std::vector<RowRange> pieces;
  for (size_t t = 0; t + 1 < offsets.size(); ++t) {
    for (int32_t begin = offsets[t]; begin < offsets[t + 1]; begin += kRowsPerPiece) {
      const int32_t end = std::min(begin + kRowsPerPiece, offsets[t + 1]);
      pieces.push_back({static_cast<int32_t>(t), begin, end});
    }
  }
  return pieces;
}

// copy(piece) for all; a record costs more than a lookup does.
template <class Copy>
void for_each_piece(const std::vector<RowRange>& pieces, int64_t rows, const Copy& copy) {
  const auto at = [&](int64_t p) noexcept { copy(pieces[static_cast<size_t>(p)]); };
  for_each_part(static_cast<int64_t>(pieces.size()), rows * kLookupsPerRecord, at);
}

REC_SDK_ALWAYS_INLINE void prefetch_record(const char* record, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(record + at, 0, 2);
}

}  // namespace

void Engine::write_back(const SwapPlan& plan, const char* records) {
  const auto guard = lock();
  const size_t bytes = static_cast<size_t>(group_.layout.bytes);
  const std::vector<RowRange> pieces = split_rows(plan->out_offsets);
  const uint32_t* const rows = plan->swap_out_rows;
  for (const RowRange& piece : pieces) {
    HostStore& store = group_.tables[piece.table].store;
    for (int32_t i = piece.begin; i < piece.end; ++i) store.map(rows[i]);
  }
  for (const RowRange& piece : pieces) {
    HostStore& store = group_.tables[piece.table].store;
    for (int32_t i = piece.begin; i < piece.end; ++i) store.mark(rows[i]);
  }
  for_each_piece(pieces, plan->rows_out, [&](const RowRange& piece) {
    const HostStore& store = group_.tables[piece.table].store;
    for (int32_t i = piece.begin; i < piece.end; ++i) {
      std::memcpy(store.record(rows[i]), records + static_cast<size_t>(i) * bytes, bytes);
    }
  });
}

void Engine::read_in(const SwapPlan& plan, char* records, InitialRows* initial) {
  const auto guard = lock();
  const size_t bytes = static_cast<size_t>(group_.layout.bytes);
  const std::vector<RowRange> pieces = split_rows(plan->in_offsets);
  const uint32_t* const rows = plan->swap_in_rows;
  for_each_piece(pieces, plan->rows_in, [&](const RowRange& piece) {
    const Table& table = group_.tables[piece.table];
    for (int32_t i = piece.begin; i < piece.end; ++i) {
      const int32_t ahead = i + kRowsAhead;
      if (ahead < piece.end && table.store.has(rows[ahead])) {
        prefetch_record(table.store.record(rows[ahead]), bytes);
      }
      char* const record = records + static_cast<size_t>(i) * bytes;
      if (table.store.has(rows[i])) {
        std::memcpy(record, table.store.record(rows[i]), bytes);
      } else {
        table.initializer.write(plan->swap_in_ids[i], record);
      }
    }
  });
  if (initial == nullptr) return;
  for (const RowRange& piece : pieces) {
    const HostStore& store = group_.tables[piece.table].store;
    for (int32_t i = piece.begin; i < piece.end; ++i) {
      if (!store.has(rows[i])) initial->add(i, piece.table);
    }
  }
}

void Engine::write_pending(const SwapPlan& plan, const float* sums) {
  const auto guard = lock();
  if (plan->pending_epoch != group_.pending.epoch()) return;  // cleared since
  const int64_t width = 2 * group_.layout.dim;
  for (const uint32_t place : plan->pending_out_sums) {
    std::memcpy(group_.pending.data(place), sums, static_cast<size_t>(width) * sizeof(float));
    sums += width;
  }
}

void Engine::read_pending(const SwapPlan& plan, float* sums) {
  const auto guard = lock();
  if (plan->pending_in_sums.empty()) return;
  if (plan.released() || plan->pending_epoch != group_.pending.epoch()) {
    throw std::runtime_error("the pending gradients of this plan were released or cleared before");
  }
  const int64_t width = 2 * group_.layout.dim;
  for (const uint32_t place : plan->pending_in_sums) {
    std::memcpy(sums, group_.pending.data(place), static_cast<size_t>(width) * sizeof(float));
    sums += width;
  }
}

}  // namespace rec_sdk
