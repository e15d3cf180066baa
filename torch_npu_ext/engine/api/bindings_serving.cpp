// rec_sdk_torch._engine: indexes of saves, and lookups in them.
#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/store/serving.h"

namespace rec_sdk {

void bind_serving(py::module_& m) {
  py::class_<IndexWriter>(
      m, "IndexWriter",
      R"(Writes the index of a table in a save, id -> file and row. A later entry replaces an
          earlier one of the same id.)")
      .def(py::init<const std::string&, int64_t, const std::string&>(),
           R"(path: of a new file. save: the save's id, 32 characters. OSError where the disk has no
          room.)",
           py::arg("path"), py::arg("most_ids"), py::arg("save"))
      .def(
          "add",
          [](IndexWriter& w, const Dense& ids, uint32_t file, uint32_t first_row) {
            const WithoutLock nogil;
            w.add(ids.data(), ids.size(), file, first_row);
          },
          R"(Ids [n] of rows first_row and following of the file of this number. ValueError beyond
          most_ids.)",
          py::arg("ids"), py::arg("file"), py::arg("first_row"))
      .def(
          "remove",
          [](IndexWriter& w, const Dense& ids) {
            const WithoutLock nogil;
            w.remove(ids.data(), ids.size());
          },
          "Takes out ids [n], which have no row any more.", py::arg("ids"))
      .def("finish", &IndexWriter::finish, "Returns when the index is on the disk.",
           py::call_guard<WithoutLock>());
  using Files = std::vector<std::tuple<std::string, int64_t, int64_t>>;
  py::class_<ServedTable>(
      m, "ServedTable", "Weights of a table in saves, mapped read-only. Lookups may run on several threads.")
      .def(py::init(
               [](const std::vector<std::tuple<std::string, std::string, Files>>& given, int64_t row_bytes) {
                 std::vector<ServedSave> saves;
                 for (const auto& [index, id, files] : given) {
                   saves.push_back({index, id, {}});
                   for (const auto& [path, begin, rows] : files)
                     saves.back().files.push_back({path, begin, rows});
                 }
                 const WithoutLock nogil;
                 return std::make_unique<ServedTable>(saves, row_bytes);
               }),
           R"(saves: the newest first: index file, id of the save, and of each file of rows its path,
          the first byte of its weights and their number.

          OSError, or ValueError for files that are damaged or of another save.)",
           py::arg("saves"), py::arg("row_bytes"))
      .def(
          "lookup",
          [](const ServedTable& t, const Dense& ids, const Bytes& missing, Records out) {
            char* const rows =
                reinterpret_cast<char*>(matrix<uint8_t, true>(out, "out", ids.size(), missing.size()));
            std::unique_ptr<bool[]> found(new bool[static_cast<size_t>(ids.size()) + 1]);
            {
              const WithoutLock nogil;
              t.lookup(ids.data(), ids.size(), reinterpret_cast<const char*>(missing.data()), rows,
                       found.get());
            }
            return py::array_t<bool>(ids.size(), found.get());
          },
          R"(Fills out [n, row_bytes] with the weights of ids [n], or `missing` [row_bytes]; gives
          which were there.

          ValueError for a damaged index.)",
          py::arg("ids"), py::arg("missing"), py::arg("out"));
}

}  // namespace rec_sdk
