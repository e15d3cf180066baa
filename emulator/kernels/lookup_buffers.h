// The buffers that each kernel for lookups and copies may access.
#pragma once

#include "emulator/kernels/buffers.h"
#include "op_kernels/common/arguments.h"

namespace rec_sdk::emulator {

inline Buffers& read_weights(Buffers& buffers, const Weights& w) {
  return buffers.read("weights", w.data, values_in(w.rows, w.dim * dtype_bytes(w.dtype), w.stride_bytes));
}

inline Buffers& read_bags(Buffers& buffers, const Bags& bags) {
  return buffers.read("offsets", bags.offsets, bags.count + 1)
      .read("columns", bags.columns, bags.features)
      .read("mean", bags.mean, bags.features);
}

inline Buffers buffers_of(const LookupSequence& a) {
  Buffers buffers;
  read_weights(buffers, a.weights)
      .read("slots", a.slots, a.count)
      .write("out", a.out, a.count * a.weights.dim);
  return buffers;
}

inline Buffers buffers_of(const LookupPooled& a) {
  Buffers buffers;
  read_bags(read_weights(buffers, a.weights), a.bags)
      .read("slots", a.slots, a.lookups)
      .read("per_sample_weights", a.per_sample_weights, a.lookups)
      .change("out", a.out, values_in(a.bags.batch_size, a.out_columns, a.out_stride));
  return buffers;
}

inline Buffers buffers_of(const PooledWeightsGrad& a) {
  Buffers buffers;
  read_bags(read_weights(buffers, a.weights), a.bags)
      .read("slots", a.slots, a.lookups)
      .read("grad", a.grad, values_in(a.bags.batch_size, a.grad_columns, a.grad_stride))
      .write("out", a.out, a.lookups);
  return buffers;
}

inline Buffers gather_buffers(const CopyRows& a) {
  Buffers buffers;
  buffers.read("cache", a.cache, a.cache_slots * a.bytes)
      .read("slots", a.slots, a.count)
      .write("rows", a.rows, a.count * a.bytes);
  return buffers;
}

inline Buffers scatter_buffers(const CopyRows& a) {
  Buffers buffers;
  buffers.change("cache", a.cache, a.cache_slots * a.bytes)
      .read("slots", a.slots, a.count)
      .read("rows", a.rows, a.count * a.bytes);
  return buffers;
}

inline Buffers buffers_of(const SwapRows& a) {
  Buffers buffers;
  buffers.change("cache", a.cache, a.cache_slots * a.bytes)
      .read("slots", a.slots, a.count)
      .read("victim_indices", a.victim_indices, a.count)
      .read("rows", a.rows, a.count * a.bytes)
      .write("victims", a.victims, a.victim_count * a.bytes);
  return buffers;
}

// The cache, which contains the weights, is writable because the swap changes it. The slots of the lookups
// are not listed, because the kernel does not read them.
inline Buffers buffers_of(const SwapLookupSequence& a) {
  return buffers_of(a.swap)
      .read("origins", a.origins, a.lookup.count)
      .write("out", a.lookup.out, a.lookup.count * a.lookup.weights.dim);
}

inline Buffers buffers_of(const SwapLookupPooled& a) {
  Buffers buffers = buffers_of(a.swap);
  const LookupPooled& lookup = a.lookup;
  return read_bags(buffers, lookup.bags)
      .read("origins", a.origins, lookup.lookups)
      .read("per_sample_weights", lookup.per_sample_weights, lookup.lookups)
      .change("out", lookup.out, values_in(lookup.bags.batch_size, lookup.out_columns, lookup.out_stride));
}

}  // namespace rec_sdk::emulator
