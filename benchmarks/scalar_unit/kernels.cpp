// Runs every operator's kernels on one batch, core after core. Prints the number of instructions that the
// scalar unit of each core issued, as JSON: {operator: {kernel: [number of each core]}}. See
// benchmarks/npu_scalar.py.
#include <cstdio>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "op_kernels/accumulate_rows/ascendc.h"
#include "op_kernels/gather_rows/ascendc.h"
#include "op_kernels/lookup_pooled/ascendc.h"
#include "op_kernels/lookup_sequence/ascendc.h"
#include "op_kernels/pooled_weights_grad/ascendc.h"
#include "op_kernels/scatter_rows/ascendc.h"
#include "op_kernels/swap_lookup_pooled/ascendc.h"
#include "op_kernels/swap_lookup_sequence/ascendc.h"
#include "op_kernels/swap_rows/ascendc.h"
#include "op_kernels/update_rows/ascendc.h"
#include "op_kernels/update_rows/ascendc_plan.h"
#include "torch_npu_ext/engine/batch/hot_segments.h"

// Incremented by code that is inserted into the assembler after compilation.
extern "C" volatile uint64_t scalar_unit_count;

namespace {

using namespace rec_sdk;
using namespace rec_sdk::ascendc;

// Compiles a kernel as a separate function, as it is on the chip.
template <class Body>
__attribute__((noinline)) void run_core(const Body& body) {
  body();
}

class Report {
 public:
  explicit Report(int64_t cores) : cores_(cores) {}

  void begin(const std::string& name) {
    std::printf("%s\"%s\": {", first_operator_ ? "{" : "},\n", name.c_str());
    first_operator_ = false;
    first_kernel_ = true;
  }
  template <class Body>
  void launch(const char* name, int64_t blocks, const Body& body) {
    if (blocks == 0) return;
    std::printf("%s\"%s\": [", first_kernel_ ? "" : ", ", name);
    first_kernel_ = false;
    scalar_unit_blocks = blocks;
    for (scalar_unit_block = 0; scalar_unit_block < blocks; ++scalar_unit_block) {
      scalar_unit_ub_used = 0;
      const uint64_t before = scalar_unit_count;
      run_core(body);
      std::printf("%s%llu", scalar_unit_block == 0 ? "" : ", ",
                  static_cast<unsigned long long>(scalar_unit_count - before));
    }
    std::printf("]");
  }
  void end() const { std::printf("}}\n"); }
  int64_t cores() const { return cores_; }

 private:
  int64_t cores_;
  bool first_operator_ = true, first_kernel_ = true;
};

// Lookups of a table, and the segments of their rows.
struct Batch {
  int64_t rows, dim;
  std::vector<int32_t> slots, unique, offsets, positions;
  std::vector<HotSegment> hot;
  std::vector<float> grad;

  Batch(const char* path, int64_t rows_, int64_t dim_) : rows(rows_), dim(dim_) {
    std::ifstream file(path, std::ios::binary);
    for (int32_t slot; file.read(reinterpret_cast<char*>(&slot), sizeof slot);) slots.push_back(slot);
    std::vector<std::vector<int32_t>> lookups(static_cast<size_t>(rows));
    for (size_t j = 0; j < slots.size(); ++j) lookups[slots[j]].push_back(static_cast<int32_t>(j));
    offsets.push_back(0);
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<int32_t>& of_row = lookups[static_cast<size_t>(row)];
      if (of_row.empty()) continue;
      unique.push_back(static_cast<int32_t>(row));
      positions.insert(positions.end(), of_row.begin(), of_row.end());
      offsets.push_back(static_cast<int32_t>(positions.size()));
    }
    hot = hot_segments_of(offsets);
    grad.resize(slots.size() * static_cast<size_t>(dim));
  }

  int64_t count() const { return static_cast<int64_t>(slots.size()); }
  Segments segments() const {
    Segments all{};
    all.lookups = {
        {grad.data(), dim, count(), dim}, positions.data(), nullptr, nullptr, count(), nullptr, nullptr, 0};
    all.dim = dim;
    all.unique_slots = unique.data();
    all.offsets = offsets.data();
    all.rows = static_cast<int64_t>(unique.size());
    all.hot_segments = hot.data();
    all.hot_segment_count = static_cast<int64_t>(hot.size());
    return all;
  }
};

template <class Optimizer>
RecordLayout layout_of(int64_t dim, DType dtype) {
  int64_t states[kMaxStates], count = 0;
  for (int s = 0; s < Optimizer::kElementStates; ++s) states[count++] = dim;
  for (int s = 0; s < Optimizer::kRowStates; ++s) states[count++] = 1;
  return make_record_layout(dim, dtype, states, count);
}

std::vector<uint8_t> records_of(const Batch& batch, const RecordLayout& layout) {
  return std::vector<uint8_t>(static_cast<size_t>(batch.rows * layout.bytes));
}

HotWorkspace prepare(Report* report, const Segments& segments, std::vector<uint8_t>* memory) {
  memory->resize(static_cast<size_t>(workspace_bytes(segments)));
  const HotWorkspace workspace = hot_workspace(memory->data(), segments);
  if (workspace.sums == nullptr) return workspace;
  report->launch("sum_chunks", chunk_blocks(segments, report->cores()), [&] {
    TPipe pipe;
    sum_chunks(&pipe, segments, workspace);
  });
  return workspace;
}

template <class Optimizer, class Weights>
void count_update(Report* report, const Batch& batch, DType dtype, const std::string& suffix) {
  report->begin(std::string("update_rows ") + Optimizer::name() + suffix);
  const RecordLayout layout = layout_of<Optimizer>(batch.dim, dtype);
  std::vector<uint8_t> cache = records_of(batch, layout), memory;
  const Segments segments = batch.segments();
  const int32_t tables[2] = {0, static_cast<int32_t>(segments.rows)};
  float coefficients[kCoefficients] = {__builtin_inff()};
  const UpdateRows a{segments, cache.data(), layout, tables, 1, coefficients, batch.rows, nullptr, nullptr};
  const HotWorkspace workspace = prepare(report, segments, &memory);
  report->launch("update_rows", update_blocks(segments, layout.bytes, report->cores()), [&] {
    TPipe pipe;
    update_rows<Optimizer, Weights>(&pipe, a, workspace);
  });
}

void count_accumulate(Report* report, const Batch& batch) {
  report->begin("accumulate_rows");
  std::vector<float> pending(static_cast<size_t>(batch.rows * 2 * batch.dim));
  std::vector<uint8_t> memory;
  const Segments segments = batch.segments();
  const AccumulateRows a{segments, pending.data(), batch.rows};
  const HotWorkspace workspace = prepare(report, segments, &memory);
  report->launch("accumulate_rows", update_blocks(segments, batch.dim * 8, report->cores()), [&] {
    TPipe pipe;
    accumulate_rows(&pipe, a, workspace);
  });
}

// Bags of 8, all summed.
struct EveryBag {
  static constexpr int64_t kLookups = 8;
  std::vector<int64_t> offsets;
  int64_t bags, columns[1] = {0};
  bool mean[1] = {false};

  explicit EveryBag(const Batch& batch) : bags(batch.count() / kLookups) {
    for (int64_t first = 0; first <= batch.count(); first += kLookups) offsets.push_back(first);
  }
  LookupPooled lookup(const Batch& batch, const Weights& weights, float* out) const {
    const Bags all{offsets.data(), bags, 0, bags, columns, mean, 1};
    return {weights, batch.slots.data(), nullptr, all, out, batch.dim, batch.dim, bags * kLookups};
  }
};

// lookup_pooled() of one stored type, without sample weights. Compiling all six variants would take minutes.
template <class Stored, class Source>
__aicore__ inline void sum_bags(const Source& weights, const LookupPooled& a) {
  TPipe pipe;
  PooledLookup<RowTiles<Stored, Source>, false> lookup;
  lookup.run(&pipe, weights, a);
}

template <class Stored>
void count_lookups(Report* report, const Batch& batch, DType dtype, const std::string& suffix) {
  const RecordLayout layout = layout_of<REC_SDK_ISA::Adagrad>(batch.dim, dtype);
  const std::vector<uint8_t> cache = records_of(batch, layout);
  const Weights weights{cache.data(), layout.bytes, batch.rows, batch.dim, dtype};
  std::vector<float> out(static_cast<size_t>(batch.count() * batch.dim));
  const LookupSequence sequence{weights, batch.slots.data(), out.data(), batch.count()};
  report->begin("lookup_sequence " + suffix);
  report->launch("lookup_sequence", blocks_of(sequence, report->cores()), [&] { lookup_sequence(sequence); });

  const EveryBag every(batch);
  const LookupPooled pooled = every.lookup(batch, weights, out.data());
  report->begin("lookup_pooled " + suffix);
  report->launch("lookup_pooled", blocks_of(pooled, report->cores()),
                 [&] { sum_bags<Stored>(pooled.weights, pooled); });

  std::vector<float> weights_grad(static_cast<size_t>(batch.count()));
  const PooledWeightsGrad grad{weights,   batch.slots.data(),  pooled.bags, batch.grad.data(),
                               batch.dim, weights_grad.data(), batch.dim,   pooled.lookups};
  report->begin("pooled_weights_grad " + suffix);
  report->launch("pooled_weights_grad", blocks_of(grad, report->cores()), [&] {
    TPipe pipe;
    WeightsGradient<Stored> gradient;
    gradient.run(&pipe, grad);
  });
}

void count_copies(Report* report, const Batch& batch) {
  const RecordLayout layout = layout_of<REC_SDK_ISA::Adagrad>(batch.dim, DType::kFloat32);
  std::vector<uint8_t> cache = records_of(batch, layout);
  const auto count = static_cast<int64_t>(batch.unique.size());
  std::vector<uint8_t> rows(static_cast<size_t>(count * layout.bytes));
  const CopyRows a{cache.data(), rows.data(), batch.unique.data(), layout.bytes, batch.rows, count};
  report->begin("gather_rows");
  report->launch("gather_rows", blocks_of(a, report->cores()), [&] { gather_rows(a); });
  report->begin("scatter_rows");
  report->launch("scatter_rows", blocks_of(a, report->cores()), [&] { scatter_rows(a); });

  std::vector<uint8_t> victims(rows.size());
  std::vector<int32_t> victim_indices(batch.unique.size());
  std::iota(victim_indices.begin(), victim_indices.end(), 0);
  const SwapRows swap{
      cache.data(), rows.data(), victims.data(), batch.unique.data(), victim_indices.data(), layout.bytes,
      batch.rows,   count,       count};
  report->begin("swap_rows");
  report->launch("swap_rows", blocks_of(swap, report->cores()), [&] { swap_rows(swap); });
}

// A swap as in operator_cases.py: every other row of the batch is a miss, and each evicts one victim.
template <class Stored>
void count_swap_lookups(Report* report, const Batch& batch, DType dtype, const std::string& suffix) {
  const RecordLayout layout = layout_of<REC_SDK_ISA::Adagrad>(batch.dim, dtype);
  std::vector<uint8_t> cache = records_of(batch, layout);
  std::vector<int32_t> coming, victim_indices, of_row(static_cast<size_t>(batch.rows)), origins;
  std::iota(of_row.begin(), of_row.end(), 0);
  for (size_t u = 0; u < batch.unique.size(); u += 2) {
    victim_indices.push_back(static_cast<int32_t>(coming.size()));
    of_row[static_cast<size_t>(batch.unique[u])] = static_cast<int32_t>(batch.rows + victim_indices.back());
    coming.push_back(batch.unique[u]);
  }
  for (const int32_t slot : batch.slots) origins.push_back(of_row[static_cast<size_t>(slot)]);
  const auto count = static_cast<int64_t>(coming.size());
  std::vector<uint8_t> rows(static_cast<size_t>(count * layout.bytes)), victims(rows.size());
  const SwapRows swap{cache.data(), rows.data(), victims.data(), coming.data(), victim_indices.data(),
                      layout.bytes, batch.rows,  count,          count};
  const Weights weights{cache.data(), layout.bytes, batch.rows, batch.dim, dtype};
  std::vector<float> out(static_cast<size_t>(batch.count() * batch.dim));
  const SwapLookupSequence sequence{
      swap, {weights, batch.slots.data(), out.data(), batch.count()}, origins.data()};
  report->begin("swap_lookup_sequence " + suffix);
  report->launch("swap_lookup_sequence", blocks_of(sequence, report->cores()),
                 [&] { swap_lookup_sequence(sequence); });

  const EveryBag every(batch);
  const SwapLookupPooled pooled{swap, every.lookup(batch, weights, out.data()), origins.data()};
  report->begin("swap_lookup_pooled " + suffix);
  report->launch("swap_lookup_pooled", blocks_of(pooled, report->cores()), [&] {
    write_staged_rows(pooled.swap);
    LookupPooled lookup = pooled.lookup;
    lookup.slots = pooled.origins;
    sum_bags<Stored>(with_staging(lookup.weights, pooled.swap), lookup);
  });
}

}  // namespace

// Arguments: a file with the slots as int32, the number of rows of the table, dim, and the number of cores.
int main(int, char** arguments) {
  const Batch batch(arguments[1], std::stoll(arguments[2]), std::stoll(arguments[3]));
  Report report(std::stoll(arguments[4]));
  count_lookups<float>(&report, batch, DType::kFloat32, "float32");
  count_lookups<BFloat16>(&report, batch, DType::kBFloat16, "bfloat16");
  count_copies(&report, batch);
  count_swap_lookups<float>(&report, batch, DType::kFloat32, "float32");
  count_update<REC_SDK_ISA::Sgd, FloatWeights>(&report, batch, DType::kFloat32, "");
  count_update<REC_SDK_ISA::RowWiseAdagrad, FloatWeights>(&report, batch, DType::kFloat32, "");
  count_update<REC_SDK_ISA::Adam, FloatWeights>(&report, batch, DType::kFloat32, "");
  count_update<REC_SDK_ISA::RowWiseAdagrad, BFloat16Weights>(&report, batch, DType::kBFloat16, " bfloat16");
#ifdef REC_SDK_EVERY  // each optimizer's form of a record with each data type: twice as long to compile
  count_swap_lookups<BFloat16>(&report, batch, DType::kBFloat16, "bfloat16");
  count_update<REC_SDK_ISA::Adagrad, FloatWeights>(&report, batch, DType::kFloat32, "");
  count_update<REC_SDK_ISA::Sgd, BFloat16Weights>(&report, batch, DType::kBFloat16, " bfloat16");
  count_update<REC_SDK_ISA::Adagrad, BFloat16Weights>(&report, batch, DType::kBFloat16, " bfloat16");
  count_update<REC_SDK_ISA::Adam, BFloat16Weights>(&report, batch, DType::kBFloat16, " bfloat16");
#endif
  count_accumulate(&report, batch);
  report.end();
}
