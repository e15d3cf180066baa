// rec_sdk_torch._engine: index files of saves, and lookups in saved tables.
#include <algorithm>

#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/store/index_file.h"
#include "torch_npu_ext/engine/store/serving.h"

namespace rec_sdk {
namespace {

void check_offsets(const Dense& offsets, int64_t count) {
  const int64_t* const begin = offsets.data();
  const int64_t* const end = begin + offsets.size();
  if (begin == end || *begin != 0 || end[-1] != count || !std::is_sorted(begin, end)) {
    throw py::value_error("offsets must ascend from 0 to the number of ids, " + std::to_string(count));
  }
}

}  // namespace

void bind_serving(py::module_& m) {
  py::class_<IndexWriter>(m, "IndexWriter",
                          R"(Writer of the index of a table in a save. The index maps each id to a file and a
          row in it.

          There are `rounds` rounds, and in each round all entries must be added in the same order. A later
          entry of an id replaces an earlier one.)")
      .def(py::init<const std::string&, int64_t, const std::string&, uint64_t>(), py::arg("path"),
           py::arg("most_ids"), py::arg("save"), py::arg("window"),
           R"(Creates the index file.

          path: a file that does not exist yet.
          most_ids: an upper bound of the number of ids.
          save: the save's id, 32 characters.
          window: the number of entries in memory at a time, 16 bytes each; a power of two.
          Raises OSError if the disk is full.)")
      .def_property_readonly("rounds", &IndexWriter::rounds)
      .def(
          "add",
          [](IndexWriter& w, const Dense& ids, uint32_t file, uint32_t first_row) {
            const WithoutLock nogil;
            w.add(ids.data(), ids.size(), file, first_row);
          },
          py::arg("ids"), py::arg("file"), py::arg("first_row"),
          R"(Adds ids [n], whose rows are first_row, first_row + 1, ... in file number `file`. Raises
          ValueError if the index would have more than most_ids ids.)")
      .def(
          "remove",
          [](IndexWriter& w, const Dense& ids) {
            const WithoutLock nogil;
            w.remove(ids.data(), ids.size());
          },
          py::arg("ids"), R"(Marks ids [n] as removed: they have no row any more.)")
      .def("end_round", unlocked(&IndexWriter::end_round), "Ends a round; all entries must have been added.")
      .def(
          "finish", [](IndexWriter& w) { w.finish(true); }, py::call_guard<WithoutLock>(),
          R"(Completes the index after the last round, and returns once the file is on the disk.)");
  m.def(
      "same_index",
      [](const std::string& path, const std::string& other, const std::string& save) {
        const WithoutLock nogil;
        return IndexFile(path, save).same(IndexFile(other, save));
      },
      py::arg("path"), py::arg("other"), py::arg("save"),
      R"(Returns whether two indexes of a save map every id to the same row. Raises ValueError for a file
          that is not an index of the save.)");
  using Files = std::vector<std::tuple<std::string, int64_t, int64_t>>;
  py::class_<ServedTable>(m, "ServedTable",
                          R"(The weights of one table in its saves, mapped read-only. Lookups may run on
          several threads.)")
      .def(py::init([](const std::vector<std::tuple<std::string, std::string, Files>>& save_files,
                       const std::string& format, int64_t dim) {
             std::vector<ServedSave> saves;
             for (const auto& [index, id, files] : save_files) {
               saves.push_back({index, id, {}});
               for (const auto& [path, begin, rows] : files)
                 saves.back().files.push_back({path, begin, rows});
             }
             const WithoutLock nogil;
             return std::make_unique<ServedTable>(saves, row_format(format), dim);
           }),
           py::arg("saves"), py::arg("format"), py::arg("dim"),
           R"(Opens a table from a save and the saves it is based on.

          saves: for each save, newest first: the index file, the save's id, and (path, first byte of the
          weights, number of rows) for each of its files of rows.
          format: the format of the rows, F32, F16, BF16, Q8 or Q4.
          dim: the number of weights of a row.
          Raises OSError, or ValueError for files that are damaged or belong to another save.)")
      .def_property_readonly("row_bytes", &ServedTable::row_bytes, R"(The size of a stored row in bytes.)")
      .def(
          "lookup",
          [](const ServedTable& t, const Dense& ids, const Bytes& missing, Records out) {
            char* const rows =
                reinterpret_cast<char*>(matrix<uint8_t, true>(out, "out", ids.size(), t.row_bytes()));
            if (missing.size() != t.row_bytes()) throw py::value_error("missing must have row_bytes bytes");
            std::unique_ptr<bool[]> found(new bool[static_cast<size_t>(ids.size()) + 1]);
            {
              const WithoutLock nogil;
              t.lookup(ids.data(), ids.size(), reinterpret_cast<const char*>(missing.data()), rows,
                       found.get());
            }
            return py::array_t<bool>(ids.size(), found.get());
          },
          py::arg("ids"), py::arg("missing"), py::arg("out"),
          R"(Fills out [n, row_bytes] with the weights of ids [n], or with `missing` [row_bytes]; returns
          which ids were found.

          Raises ValueError for a damaged index.)")
      .def(
          "lookup_floats",
          [](const ServedTable& t, const Dense& ids, float missing, Sums out) {
            float* const rows = matrix<float, true>(out, "out", ids.size(), t.dim());
            std::unique_ptr<bool[]> found(new bool[static_cast<size_t>(ids.size()) + 1]);
            {
              const WithoutLock nogil;
              t.lookup_floats(ids.data(), ids.size(), missing, rows, found.get());
            }
            return py::array_t<bool>(ids.size(), found.get());
          },
          py::arg("ids"), py::arg("missing"), py::arg("out"),
          R"(Fills out [n, dim] with the weights of ids [n] as float32, or with `missing`; returns which ids
          were found.

          Raises ValueError for a damaged index.)")
      .def(
          "lookup_pooled",
          [](const ServedTable& t, const Dense& ids, const Dense& offsets,
             const std::optional<py::array_t<float, py::array::c_style | py::array::forcecast>>& weights,
             bool mean, float missing, Sums out) {
            const int64_t bags = offsets.size() - 1;
            check_offsets(offsets, ids.size());
            if (weights && weights->size() != ids.size()) {
              throw py::value_error(std::to_string(weights->size()) + " weights of " +
                                    std::to_string(ids.size()) + " ids");
            }
            float* const sums = matrix<float, true>(out, "out", bags, t.dim());
            const BagLookups lookups{ids.data(), offsets.data(), bags, weights ? weights->data() : nullptr,
                                     mean};
            const WithoutLock nogil;
            t.lookup_pooled(lookups, missing, sums);
          },
          py::arg("ids"), py::arg("offsets"), py::arg("weights"), py::arg("mean"), py::arg("missing"),
          py::arg("out"),
          R"(Fills out [bags, dim] with the sum, or the mean, of the rows of each bag.

          Bag b has the ids [offsets[b], offsets[b + 1]) of ids [n], with offsets [bags + 1]. Each row is
          multiplied by its entry of weights [n], unless weights is None. Raises ValueError for a damaged
          index, and for offsets that do not ascend from 0 to n.)");
}

}  // namespace rec_sdk
