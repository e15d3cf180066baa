// rec_sdk_torch._engine: the calls of saves. Shapes and errors are documented in rec_sdk_torch/_engine.pyi.
#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

void bind_saves(EngineClass& engine) {
  engine
      .def(
          "scan_ids",
          [](Engine& e, int32_t table, int64_t begin, int64_t least) {
            std::vector<int64_t> ids;
            int64_t next = -1;
            {
              const WithoutLock nogil;
              next = e.scan_ids(table, begin, least, &ids);
            }
            return std::make_pair(to_numpy(std::move(ids)), next);
          },
          py::arg("table"), py::arg("begin"), py::arg("least"))
      .def("reserve_ids", &Engine::reserve_ids, py::arg("table"), py::arg("extra"),
           py::call_guard<WithoutLock>())
      .def(
          "removed_ids",
          [](Engine& e, int32_t table, uint64_t since) {
            std::vector<int64_t> ids;
            bool complete = false;
            {
              const WithoutLock nogil;
              complete = e.removed_ids(table, since, &ids);
            }
            return std::make_pair(to_numpy(std::move(ids)), complete);
          },
          py::arg("table"), py::arg("since"))
      .def("forget_changes", &Engine::forget_changes, py::arg("table"), py::arg("upto"),
           py::call_guard<WithoutLock>())
      .def("next_version", &Engine::next_version, py::call_guard<WithoutLock>())
      .def(
          "window_ids",
          [](Engine& e, int32_t table) {
            std::vector<int64_t> ids;
            {
              const WithoutLock nogil;
              ids = e.window_ids(table);
            }
            return to_numpy(std::move(ids));
          },
          py::arg("table"))
      .def(
          "put_away",
          [](Engine& e, int32_t table, const Dense& rows, py::array sums) {
            const float* in = matrix<float, false>(sums, "sums", rows.size(), 2 * e.layout().dim);
            const WithoutLock nogil;
            e.put_away(table, rows.data(), rows.size(), in);
          },
          py::arg("table"), py::arg("rows"), py::arg("sums"));
}

}  // namespace rec_sdk
