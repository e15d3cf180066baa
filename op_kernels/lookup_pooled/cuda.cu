#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/bags.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/pairwise_sum.h"
#include "op_kernels/common/cuda/panels.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {
namespace {

using REC_SDK_ISA::BagCursor;
using REC_SDK_ISA::kBlock;
using REC_SDK_ISA::with_format;

constexpr int kLookups = kBlock;        // lookups of a block, which are added one after the other
constexpr int kGroup = 4;               // rows that a team loads at once
constexpr int kTeamLookups = 512;       // longer bags are summed by all teams of the block
constexpr int kTeamLevels = 4;          // enough for 2^4 blocks of 32 lookups
constexpr int kBlockLevels = 24;        // enough for 2^31 lookups in rounds of at least 8 blocks
constexpr int kBlocksPerProcessor = 4;  // 64 registers per thread; with fewer, nvcc would spill
constexpr int64_t kFewBlocks = 512;     // fewer blocks leave parts of a large device idle

static_assert(kTeamLookups <= kLookups << kTeamLevels, "the stack of a team is too small");

// The division of the items, which are panels of bags, among thread blocks and teams.
struct Plan {
  Panels panels;
  int64_t items;
  int items_per_block;  // one for each team, or one for all teams
  int team_lookups;     // longer bags are summed by all teams of the block
};

__device__ __forceinline__ int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// One item: N columns of its bag in each thread of its team.
template <class Format, int N>
class BagColumns {
 public:
  int length;  // number of lookups, below 2^31, which is also the limit of aggregate.h's stack

  __device__ __forceinline__ BagColumns(const LookupPooled& a, const Plan& plan, int64_t item,
                                        const Team& team)
      : a_(a), team_(team) {
    const PanelPlace place(plan.panels, item, team.lane, N);
    bag_ = place.row;
    inside_ = place.column < a.weights.dim;
    column_ = inside_ ? static_cast<int>(place.column) : 0;
    begin_ = __ldg(a.bags.offsets + bag_);
    length = static_cast<int>(__ldg(a.bags.offsets + bag_ + 1) - begin_);
  }

  __device__ __forceinline__ int blocks() const { return (length + kLookups - 1) / kLookups; }

  // Returns the sum of one block of lookups, in order. The lanes read the slots together, one window ahead.
  __device__ __forceinline__ Columns<N> sum_block(int block) const {
    const int64_t first = begin_ + static_cast<int64_t>(block) * kLookups;
    const int count = at_most(kLookups, length - block * kLookups);
    const int32_t* const slots = a_.slots + first;
    Columns<N> sum;
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = -0.0f;  // a term added to it keeps its bits
    int32_t next = __ldg(slots + at_most(team_.lane, count - 1));
#pragma unroll 1
    for (int window = 0; window < count; window += team_.width) {
      const int lookup = at_most(window + team_.lane, count - 1);
      const Lookup mine{next, weighted() ? __ldg(a_.per_sample_weights + first + lookup) : 1.0f};
      next = __ldg(slots + at_most(lookup + team_.width, count - 1));
      const int lanes = at_most(team_.width, count - window);
      int lane = 0;
#pragma unroll 1
      for (; lane + kGroup <= lanes; lane += kGroup) add_group<true>(mine, lane, lanes, sum);
      if (lane < lanes) add_group<false>(mine, lane, lanes, sum);
    }
    return sum;
  }

  __device__ __forceinline__ void write(Columns<N> sum) const {
    if (!inside_) return;
    const BagCursor cursor(a_.bags, bag_);
    if (cursor.mean() && length > 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] /= static_cast<float>(length);
    }
    store_anywhere<N>(a_.out + cursor.sample * a_.out_stride + cursor.column() + column_, sum);
  }

 private:
  struct Lookup {
    int32_t slot;
    float weight;
  };

  static __device__ __forceinline__ int at_most(int value, int bound) {
    return value < bound ? value : bound;
  }

  __device__ __forceinline__ bool weighted() const { return a_.per_sample_weights != nullptr; }

  // Adds the lookups of kGroup lanes from `lane` on. Lanes after the last lookup load it again without adding
  // it, so that there is no branch between the loads.
  template <bool kFull>
  __device__ __forceinline__ void add_group(const Lookup& mine, int lane, int lanes, Columns<N>& sum) const {
    Packed<Format, N> rows[kGroup];
#pragma unroll
    for (int u = 0; u < kGroup; ++u) {
      const int32_t slot = __shfl_sync(team_.mask, mine.slot, lane + u, team_.width);
      rows[u] = load_constant<Format, N>(row_of<Format>(a_.weights, slot) + column_);
    }
#pragma unroll
    for (int u = 0; u < kGroup; ++u) {
      const float weight = __shfl_sync(team_.mask, mine.weight, lane + u, team_.width);
      const Columns<N> row = rows[u].unpack();
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float term = weighted() ? weight * row[k] : row[k];
        sum[k] += kFull || lane + u < lanes ? term : -0.0f;
      }
    }
  }

  const LookupPooled& a_;
  const Team& team_;
  int64_t bag_, begin_;
  int column_;  // 0 if not inside_; the sum is then not used
  bool inside_;
};

// Pools a bag of at most kTeamLookups lookups in one team.
template <class Format, int N>
__device__ __forceinline__ void pool_in_team(const BagColumns<Format, N>& bag) {
  Columns<N> stack[kTeamLevels];
  PairwiseSum<N> total(stack);
  const int blocks = bag.blocks();
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) total.push(block, bag.sum_block(block));
  bag.write(total.total());
}

// Pools a bag of any length in all teams of the thread block. Each round sums one block of lookups per team,
// and adds the sums as a tree. If the right block of a pair is missing, the left sum does not change.
template <class Format, int N>
__device__ __forceinline__ void pool_in_block(const BagColumns<Format, N>& bag, const Team& team) {
  __shared__ Columns<N> sums[kBlockThreads];
  Columns<N>& mine = sums[threadIdx.x];
  const int teams = kBlockThreads / team.width, blocks = bag.blocks();
  Columns<N> stack[kBlockLevels];
  PairwiseSum<N> total(stack);
#pragma unroll 1
  for (int block = team.place; block - team.place < blocks; block += teams) {
    if (block < blocks) mine = bag.sum_block(block);
#pragma unroll 1
    for (int step = 1; step < teams; step *= 2) {
      __syncthreads();
      const bool left = team.place % (2 * step) == 0;
      if (left && block + step < blocks) mine += sums[threadIdx.x + step * team.width];
    }
    if (team.place == 0) total.push(block / teams, mine);
    __syncthreads();
  }
  if (team.place == 0) bag.write(total.total());
}

template <class Format, int N>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor)
    pool_bags(const __grid_constant__ LookupPooled a, const __grid_constant__ Plan plan) {
  __shared__ bool any_long;
  const Team team(plan.panels.width);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * plan.items_per_block;
  const int items = static_cast<int>(smaller(plan.items_per_block, plan.items - first));
  if (threadIdx.x == 0) any_long = false;
  __syncthreads();
  if (team.place < items) {
    const BagColumns<Format, N> bag(a, plan, first + team.place, team);
    if (bag.length <= plan.team_lookups) {
      pool_in_team(bag);
    } else {
      any_long = true;
    }
  }
  __syncthreads();
  if (!any_long) return;
  for (int i = 0; i < items; ++i) {
    const BagColumns<Format, N> bag(a, plan, first + i, team);
    if (bag.length > plan.team_lookups) pool_in_block(bag, team);
  }
}

// If bags are few and longer than a block of lookups on average, each item gets its own thread block, and
// panels are narrow, so that more multiprocessors share the columns. The plan uses the average, because only
// the device can read the lengths of single bags.
Plan plan_of(const LookupPooled& a, int elements) {
  const int64_t bags = a.bags.count;
  Panels panels = panels_of(a.weights.dim, elements);
  const int teams = kBlockThreads / panels.width;
  if (a.lookups <= bags * kLookups || blocks_of(bags * panels.count, panels.width) >= kFewBlocks) {
    return {panels, bags * panels.count, teams, kTeamLookups};
  }
  while (panels.width > 4 && bags * panels.count < kFewBlocks) {
    panels = panels_of(a.weights.dim, elements, panels.width / 2);
  }
  return {panels, bags * panels.count, 1, kLookups};
}

template <class Format, int N>
cudaError_t launch_bags(const LookupPooled& a, cudaStream_t stream) {
  const Plan plan = plan_of(a, N);
  const int64_t blocks = (plan.items + plan.items_per_block - 1) / plan.items_per_block;
  return launch(pool_bags<Format, N>, blocks, stream, a, plan);
}

}  // namespace

cudaError_t lookup_pooled(const LookupPooled& a, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  with_format(a.weights.dtype, [&](auto format) {
    using Format = decltype(format);
    error = in_vectors<Format>(a.weights) ? launch_bags<Format, kVector>(a, stream)
                                          : launch_bags<Format, 1>(a, stream);
  });
  return error;
}

}  // namespace cuda
}  // namespace rec_sdk
