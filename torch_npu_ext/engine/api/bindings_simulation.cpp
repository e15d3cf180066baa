// rec_sdk_torch._engine.CacheTrace: the simulation of caches.
#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/policy/simulation.h"

namespace rec_sdk {

void bind_simulation(py::module_& m) {
  py::class_<CacheTrace>(m, "CacheTrace",
                         R"(The recorded batches of a table, deduplicated once and ready to be simulated with
          caches of any size and policy.)")
      .def(py::init([](const Dense& ids, const Dense& starts) {
             if (starts.size() == 0) throw py::value_error("starts must not be empty");
             const WithoutLock nogil;
             return std::make_unique<CacheTrace>(ids.data(), ids.size(), starts.data(), starts.size() - 1);
           }),
           py::arg("ids"), py::arg("starts"),
           R"(Deduplicates the batches.

          ids: [n] the ids of all batches.
          starts: [batches + 1] the start of each batch, from 0 to n; other values raise ValueError.)")
      .def_property_readonly("distinct", &CacheTrace::distinct, R"(The number of distinct ids.)")
      .def_property_readonly("largest", &CacheTrace::largest, R"(The number of distinct ids in the batch that
          has the most.)")
      .def(
          "simulate",
          [](const CacheTrace& self, int64_t slots, const std::string& policy, int64_t ahead, int64_t warm) {
            const WithoutLock nogil;
            const SimulatedCounts counts = self.simulate(slots, policy, ahead, warm);
            return std::make_tuple(counts.rows, counts.new_rows, counts.misses, counts.rows_out);
          },
          py::arg("slots"), py::arg("policy"), py::arg("ahead") = 0, py::arg("warm") = 0,
          R"(Simulates training on the batches, one after another, with a cache; returns (rows, new rows,
          misses, rows out).

          slots: the number of rows that fit into the cache.
          ahead: the number of batches announced ahead of the one that is planned.
          warm: the number of batches at the beginning that are not counted.
          Raises CacheTooSmallError if a batch has more rows than slots, ValueError for an unknown policy,
          RuntimeError if too many batches are announced.)");
}

}  // namespace rec_sdk
