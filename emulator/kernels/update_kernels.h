// The kernels of update_rows and accumulate_rows, with the buffers that each of them may access. The
// parameter Run is a function (name, blocks, buffers, body) that runs a kernel, either in the order of a
// stream or immediately.
#pragma once

#include "emulator/kernels/buffers.h"
#include "op_kernels/accumulate_rows/ascendc.h"
#include "op_kernels/update_rows/ascendc_launch.h"

namespace rec_sdk::emulator {

using ascendc::HotWorkspace;

using GradientList = std::vector<Gradient>;

inline Buffers& read_gradient(Buffers& buffers, const Gradient& grad) {
  return buffers.read("grad", grad.data, values_in(grad.rows, grad.columns, grad.stride));
}

// `all_grads` is the contents of the list of gradients.
inline Buffers& read_segments(Buffers& buffers, const Segments& segments, const GradientList& all_grads) {
  const Lookups& lookups = segments.lookups;
  if (lookups.grad_source == nullptr) {
    read_gradient(buffers, lookups.grad);
  } else {
    for (const Gradient& grad : all_grads) read_gradient(buffers, grad);
    buffers.read("table of gradients", lookups.grads, lookups.grad_count);
  }
  return buffers.read("segment_offsets", segments.offsets, segments.rows + 1)
      .read("grad_source", lookups.grad_source, lookups.count)
      .read("grad_row", lookups.grad_row, lookups.count)
      .read("grad_column", lookups.grad_column, lookups.count)
      .read("scale", lookups.scale, lookups.count);
}

inline Buffers& read_hot_segments(Buffers& buffers, const Segments& segments) {
  return buffers.read("hot_segments", segments.hot_segments, segments.hot_segment_count);
}

inline int64_t workspace_sums(const Segments& segments, const HotWorkspace& workspace) {
  return ascendc::workspace_places(segments.lookups.count) * workspace.pitch;
}

// Adds the workspace for reading by the last launch.
inline Buffers& read_workspace(Buffers& buffers, const Segments& segments, const HotWorkspace& workspace) {
  if (workspace.sums == nullptr) return buffers;
  return read_hot_segments(buffers, segments)
      .read("chunk sums", workspace.sums, workspace_sums(segments, workspace));
}

inline GradientList gradients_of(const Lookups& lookups) {
  return lookups.grad_source != nullptr ? GradientList(lookups.grads, lookups.grads + lookups.grad_count)
                                        : GradientList();
}

template <class Run>
void run_gradient_table(const Run& run, Lookups* lookups, void* base) {
  ascendc::put_gradient_table(lookups, base, [&](const ascendc::GradientTablePart& part) {
    Buffers table;
    table.change("table of gradients", part.to, part.count);
    run("write_gradient_table", 1, table, [part] {
      AscendC::TPipe pipe;
      ascendc::write_gradient_table(&pipe, part);
    });
  });
}

template <class Run>
HotWorkspace run_hot_rows(const Run& run, const Segments& segments, const GradientList& grads, void* base,
                          int64_t cores) {
  const HotWorkspace workspace = ascendc::hot_workspace(base, segments);
  if (workspace.sums == nullptr) return workspace;
  Buffers all;
  read_hot_segments(read_segments(all, segments, grads), segments)
      .change("chunk sums", workspace.sums, workspace_sums(segments, workspace));
  run("sum_chunks", ascendc::chunk_blocks(segments, cores), all, [segments, workspace] {
    AscendC::TPipe pipe;
    ascendc::sum_chunks(&pipe, segments, workspace);
  });
  return workspace;
}

template <class Run>
struct UpdateLauncher {
  const Run& run;
  const UpdateRows& a;
  const GradientList& grads;
  HotWorkspace workspace;
  int64_t blocks;

  Buffers buffers() const {
    Buffers all;
    return read_workspace(read_segments(all, a.segments, grads), a.segments, workspace)
        .read("unique_slots", a.segments.unique_slots, a.segments.rows)
        .read("table_offsets", a.table_offsets, a.tables + 1)
        .read("coefficients", a.coefficients, a.tables * kCoefficients)
        .read("row_ids", a.row_ids, a.segments.rows)
        .read("rounding_seeds", a.rounding_seeds, a.tables)
        .change("row_norms", a.row_norms, 2 * a.segments.rows)
        .change("cache", a.cache, a.slots * a.layout.bytes);
  }

  template <class Optimizer, class Weights>
  void launch() const {
    run("update_rows", blocks, buffers(), [a = a, workspace = workspace] {
      AscendC::TPipe pipe;
      ascendc::update_rows<Optimizer, Weights>(&pipe, a, workspace);
    });
  }
};

template <class Run>
void run_update_rows(const Run& run, UpdateRows a, const char* optimizer, void* base, int64_t cores) {
  const int64_t blocks = ascendc::update_blocks(a.segments, a.layout.bytes, cores);
  if (blocks == 0) return;
  const GradientList grads = gradients_of(a.segments.lookups);
  run_gradient_table(run, &a.segments.lookups, base);
  const HotWorkspace workspace = run_hot_rows(run, a.segments, grads, base, cores);
  const UpdateLauncher<Run> launcher{run, a, grads, workspace, blocks};
  ascendc::launch_by_name(launcher, optimizer, a.layout.weight_dtype, REC_SDK_ISA::Optimizers{});
}

template <class Run>
void run_accumulate_rows(const Run& run, AccumulateRows a, void* base, int64_t cores) {
  const int64_t blocks = ascendc::update_blocks(a.segments, a.segments.dim * 8, cores);
  if (blocks == 0) return;
  const GradientList grads = gradients_of(a.segments.lookups);
  run_gradient_table(run, &a.segments.lookups, base);
  const HotWorkspace workspace = run_hot_rows(run, a.segments, grads, base, cores);
  Buffers all;
  read_workspace(read_segments(all, a.segments, grads), a.segments, workspace)
      .read("unique_slots", a.segments.unique_slots, a.segments.rows)
      .change("pending", a.pending, a.slots * 2 * a.segments.dim);
  run("accumulate_rows", blocks, all, [a, workspace] {
    AscendC::TPipe pipe;
    ascendc::accumulate_rows(&pipe, a, workspace);
  });
}

// Puts kernels on a stream until a launch fails.
struct OnStream {
  void* stream;

  template <class Body>
  void operator()(const char* name, int64_t blocks, const Buffers& buffers, const Body& body) const {
    if (launch_error() == 0) launch_kernel(stream, name, blocks, buffers.list(), body);
  }
};

}  // namespace rec_sdk::emulator
