// Bindings of the simulation of caches.
#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/policy/simulation.h"

namespace rec_sdk {

void bind_simulation(py::module_& m) {
  py::class_<CacheTrace>(m, "CacheTrace",
                         "The ids of a table's batches, read once, and counts of caches of them.")
      .def(py::init([](const Dense& ids, const Dense& starts) {
             if (starts.size() == 0) throw py::value_error("starts must not be empty");
             const WithoutLock nogil;
             return std::make_unique<CacheTrace>(ids.data(), ids.size(), starts.data(), starts.size() - 1);
           }),
           py::arg("ids"), py::arg("starts"),
           R"(ids: [n] of all batches. starts: [batches + 1], where each begins, from 0 to n. ValueError:
          other starts.)")
      .def_property_readonly("distinct", &CacheTrace::distinct, "Different ids.")
      .def_property_readonly("largest", &CacheTrace::largest, "Different ids of the largest batch.")
      .def(
          "simulate",
          [](const CacheTrace& self, int64_t slots, const std::string& policy, int64_t ahead, int64_t warm) {
            const WithoutLock nogil;
            const SimulatedCounts counts = self.simulate(slots, policy, ahead, warm);
            return std::make_tuple(counts.rows, counts.new_rows, counts.misses, counts.rows_out);
          },
          py::arg("slots"), py::arg("policy"), py::arg("ahead") = 0, py::arg("warm") = 0,
          R"((rows, new rows, misses, rows out) of a training with these batches, each trained before the
          next, in a cache of so many slots. ahead: batches that are announced beside the one that is planned.
          warm: batches at the beginning that are not counted. CacheTooSmallError: a batch has more rows than
          slots. ValueError: no such policy. RuntimeError: too many batches are announced.)");
}

}  // namespace rec_sdk
