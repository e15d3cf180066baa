#include <cstring>

#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/arguments.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/optimizers.h"
#include "op_kernels/common/rounding.h"
#include "op_kernels/update_rows/cpu_norms.h"
#include "op_kernels/update_rows/cpu_states.h"

namespace rec_sdk {
namespace REC_SDK_ISA {
namespace {

template <int kStates>
struct Element {
  float weight, states[kStates + 1], g;
};

// Runs the passes over a row from kPass on. Returns the values of the last begin_row, which every element
// uses.
template <int kPass, class Optimizer, class ElementAt, class Values>
REC_SDK_INLINE auto measured(const Optimizer& optimizer, int64_t dim, const ElementAt& element,
                             float* row_states, const Values& values) {
  if constexpr (kPass == Optimizer::kMeasures) {
    return values;
  } else {
    constexpr Pass<kPass> kThis{};
    const auto terms = [&](int64_t k) {
      const auto e = element(k);
      return optimizer.measure(kThis, e.weight, e.states, e.g, values);
    };
    const auto sums = lane_sums(dim, terms);
    const auto known = optimizer.begin_row(kThis, row_states, sums, static_cast<float>(dim), values);
    return measured<kPass + 1>(optimizer, dim, element, row_states, known);
  }
}

// Updates the record of a row with its gradient g. random: the row's numbers for stochastic rounding.
template <class Optimizer, class Format, int64_t kDim, bool kStochastic>
REC_SDK_INLINE void update_record(const Optimizer& optimizer, const RecordLayout& layout, float max_gradient,
                                  const float* __restrict g, RowNumbers random, uint8_t* record,
                                  WidenedStates* widened) {
  constexpr int kStates = Optimizer::kElementStates;
  static_assert(Optimizer::kRowStates == 0 || Optimizer::kMeasures > 0, "begin_row changes row states");
  const int64_t dim = kDim > 0 ? kDim : layout.dim;
  typename Format::Storage* weights = reinterpret_cast<typename Format::Storage*>(record);
  if (widened->needed()) widened->load(record);
  float* states[kStates + 1];
  for (int s = 0; s < kStates; ++s) states[s] = widened->state(record, s);
  // Row states are consecutive, because each is one float.
  float* row_states = Optimizer::kRowStates > 0 ? widened->state(record, kStates) : nullptr;

  const auto element = [&](int64_t k) {
    Element<kStates> e;
    e.g = clip(g[k], max_gradient);
    e.weight = Format::load(weights[k]);
    for (int s = 0; s < kStates; ++s) e.states[s] = states[s][k];
    optimizer.advance(e.states, e.g);
    return e;
  };
  const auto values = measured<0>(optimizer, dim, element, row_states, NoValues{});
#pragma GCC ivdep
  for (int64_t k = 0; k < dim; ++k) {
    Element<kStates> e = element(k);
    optimizer.element(e.weight, e.states, e.g, values);
    if constexpr (kStochastic) {
      weights[k] = Format::store(e.weight, random.at(static_cast<uint32_t>(k)));
    } else {
      weights[k] = Format::store(e.weight);
    }
    for (int s = 0; s < kStates; ++s) states[s][k] = e.states[s];
  }
  if (widened->needed()) widened->store(record);
}

template <class Optimizer, class Format, int64_t kDim, bool kStochastic>
void update_range(const UpdateRows& a, int64_t begin, int64_t end, float* scratch) {
  const RecordLayout layout = a.layout;
  int64_t table = 0;
  while (begin >= a.table_offsets[table + 1]) ++table;
  const float* coefficients = a.coefficients + table * kCoefficients;
  Optimizer optimizer(coefficients);
  WidenedStates widened(layout);
  for_each_row<kDim>(a.segments, a.cache, layout.bytes, begin, end, scratch,
                     [&](int64_t u, uint8_t* record, const float* g) {
                       if (u >= a.table_offsets[table + 1]) {
                         while (u >= a.table_offsets[table + 1]) ++table;
                         coefficients = a.coefficients + table * kCoefficients;
                         optimizer = Optimizer(coefficients);
                       }
                       if (a.row_norms != nullptr) {
                         norms_of_row<kDim>(g, layout.dim, a.row_norms + u,
                                            a.row_norms + a.segments.rows + u);
                       }
                       const RowNumbers random =
                           kStochastic ? row_numbers(a.row_ids[u], a.rounding_seeds[table]) : RowNumbers{};
                       update_record<Optimizer, Format, kDim, kStochastic>(optimizer, layout, coefficients[0],
                                                                           g, random, record, &widened);
                     });
}

template <class Optimizer>
void update_with(const UpdateRows& a, int64_t begin, int64_t end, float* scratch) {
  if (begin == end) return;
  with_format(a.layout.weight_dtype, [&](auto format) {
    using Format = decltype(format);
    with_dim(a.layout.dim, [&](auto dim) {
      constexpr int64_t kDim = decltype(dim)::value;
      if (Format::kRounds && a.row_ids != nullptr) {
        update_range<Optimizer, Format, kDim, Format::kRounds>(a, begin, end, scratch);
      } else {
        update_range<Optimizer, Format, kDim, false>(a, begin, end, scratch);
      }
    });
  });
}

using UpdateKernel = void (*)(const UpdateRows&, int64_t, int64_t, float*);

template <class... Optimizer>
UpdateKernel find(const char* name, OptimizerList<Optimizer...>) {
  UpdateKernel found = nullptr;
  ((strcmp(name, Optimizer::name()) == 0 ? void(found = update_with<Optimizer>) : void()), ...);
  return found;
}

}  // namespace

UpdateKernel update_rows(const char* optimizer) { return find(optimizer, Optimizers{}); }

void sum_chunks(const SumChunks& a, int64_t begin, int64_t end) {
  with_dim(a.dim, [&](auto dim) {
    for (int64_t i = begin; i < end; ++i) {
      sum_lookups<decltype(dim)::value>(a.lookups, a.chunks[i].begin, a.chunks[i].end, a.dim,
                                        a.out + i * a.dim);
    }
  });
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
