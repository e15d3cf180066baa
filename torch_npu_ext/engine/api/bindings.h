// Helpers of the engine's bindings: argument arrays with checks, and the conversion of results to NumPy
// arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/engine.h"
#include "torch_npu_ext/engine/api/interpreter_lock.h"

namespace rec_sdk {

namespace py = pybind11;

using Dense = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Slots = py::array_t<int32_t, py::array::c_style>;
using Heats = py::array_t<float, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

// Array types of arguments, so that the stub shows their dtypes. matrix() and IntArgument check dtype and
// shape, and their errors name the allowed ones.
struct Ints : py::array {
  using py::array::array;
};
struct Records : py::array {
  using py::array::array;
};
struct Sums : py::array {
  using py::array::array;
};

}  // namespace rec_sdk

namespace pybind11::detail {

template <>
struct handle_type_name<rec_sdk::Ints> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.signedinteger[typing.Any]]");
};
template <>
struct handle_type_name<rec_sdk::Records> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.uint8]");
};
template <>
struct handle_type_name<rec_sdk::Sums> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.float32]");
};

// Converts a NumPy array to a Span. An array that is not contiguous is copied. For a Span of int64, arrays of
// other dtypes are converted.
template <class T>
class type_caster<rec_sdk::Span<T>> {
  static constexpr int kConverted = std::is_same_v<T, int64_t> ? array::forcecast : 0;
  using Array = array_t<T, array::c_style | kConverted>;

 public:
  static constexpr auto name = make_caster<Array>::name;
  template <class>
  using cast_op_type = rec_sdk::Span<T>;
  bool load(handle source, bool convert) { return array_.load(source, convert); }
  operator rec_sdk::Span<T>() {
    const Array& array = array_;
    return {array.data(), array.size()};
  }

 private:
  make_caster<Array> array_;
};

}  // namespace pybind11::detail

namespace rec_sdk {

using Columns = py::typing::Dict<py::str, py::array>;
// The location of each array in an arena: (first word, number of words), or None if the array is absent.
using Places = py::typing::Tuple<py::typing::Optional<py::typing::Tuple<py::int_, py::int_>>, py::ellipsis>;
template <class Field>
Places to_places(const std::vector<Field>& fields) {
  py::tuple places(fields.size());
  for (size_t i = 0; i < fields.size(); ++i) {
    places[i] = fields[i].begin < 0 ? py::object(py::none())
                                    : py::object(py::make_tuple(fields[i].begin, fields[i].words));
  }
  return Places(places);
}

// Checks for a C-contiguous [rows, columns] array of T and returns its data; the data is writable if
// kWritable.
template <class T, bool kWritable>
auto matrix(py::array& array, const char* name, int64_t rows, int64_t columns) {
  const bool layout =
      py::isinstance<py::array_t<T>>(array) && array.ndim() == 2 && (array.flags() & py::array::c_style) != 0;
  if (!layout || array.shape(0) != rows || array.shape(1) != columns) {
    std::string shape;
    for (py::ssize_t d = 0; d < array.ndim(); ++d) {
      shape += (d > 0 ? ", " : "") + std::to_string(array.shape(d));
    }
    throw py::value_error(std::string(name) + " must be a contiguous " +
                          std::string(py::str(py::dtype::of<T>())) + " array of shape [" +
                          std::to_string(rows) + ", " + std::to_string(columns) + "], got " +
                          std::string(py::str(array.dtype())) + " [" + shape + "]");
  }
  if constexpr (kWritable) {
    return static_cast<T*>(array.mutable_data());  // raises ValueError if the array is read-only
  } else {
    return static_cast<const T*>(array.data());
  }
}

inline char* records_out(py::array& array, const GroupAccess& group, int64_t rows) {
  return reinterpret_cast<char*>(matrix<uint8_t, true>(array, "records", rows, group.layout().bytes));
}
inline const char* records_in(py::array& array, const GroupAccess& group, int64_t rows) {
  return reinterpret_cast<const char*>(matrix<uint8_t, false>(array, "records", rows, group.layout().bytes));
}
template <bool kWritable>
auto sums_of(py::array& array, const GroupAccess& group, int64_t rows) {
  return matrix<float, kWritable>(array, "sums", rows, 2 * group.layout().dim);
}

// Converts a result for Python; vectors of numbers become NumPy arrays without a copy.
template <class T>
T to_python(T value) {
  return value;
}
template <class T>
py::array_t<T> to_python(std::vector<T> values) {
  auto* owner = new std::vector<T>(std::move(values));
  py::capsule base(owner, [](void* data) { delete static_cast<std::vector<T>*>(data); });
  return py::array_t<T>(static_cast<py::ssize_t>(owner->size()), owner->data(), base);
}
template <class First, class Second>
auto to_python(std::pair<First, Second> values) {
  return std::make_pair(to_python(std::move(values.first)), to_python(std::move(values.second)));
}
template <class... T>
auto to_python(std::tuple<T...> values) {
  return std::apply([](T&... each) { return std::make_tuple(to_python(std::move(each))...); }, values);
}

// Runs `call` without the GIL. Waiting for the engine's mutex with the GIL could deadlock, because the thread
// that holds the mutex takes the GIL to free the memory of a plan.
template <class Call>
auto call_unlocked(const Call& call) {
  const WithoutLock nogil;
  return call();
}

// Runs `call` without the GIL and converts its result for Python.
template <class Call>
auto run_unlocked(const Call& call) {
  if constexpr (std::is_void_v<decltype(call())>) {
    call_unlocked(call);
  } else {
    return to_python(call_unlocked(call));
  }
}

// Wraps a method of the engine so that its binding runs without the GIL.
template <class Api, class Result, class... Args>
auto unlocked(Result (Api::*method)(Args...)) {
  return [method](Api& self, Args... args) { return run_unlocked([&] { return (self.*method)(args...); }); };
}

// An int32 or int64 array argument. Only a strided array is copied.
struct IntArgument {
  IntArgument(const py::array& argument, const char* name)
      : array(py::array::ensure(argument, py::array::c_style)) {
    const py::dtype dtype = argument.dtype();
    const bool native = dtype.kind() == 'i' && dtype.byteorder() != '>';
    if (!native || (dtype.itemsize() != 4 && dtype.itemsize() != 8)) {
      throw py::type_error(std::string(name) + " must be int32 or int64, got " + std::string(py::str(dtype)));
    }
    if (argument.ndim() != 1) {
      throw py::value_error(std::string(name) + " must have one dimension, got " +
                            std::to_string(argument.ndim()));
    }
    view = {array.data(), dtype.itemsize() == 8, array.size()};
  }
  py::array array;
  IntArray view;
};

struct BatchArguments {
  BatchArguments(const py::array& values, const py::array& offset_array, const py::array& key_array,
                 int64_t batch_size)
      : ids(values, "ids"), offsets(offset_array, "offsets"), keys(key_array, "feature_keys") {
    input = {ids.view, offsets.view, keys.view, batch_size};
  }
  IntArgument ids, offsets, keys;
  BatchInput input;
};

// Returns the data of an optional array with one entry per lookup; null if there is no array.
template <class Array>
auto per_lookup(const std::optional<Array>& array, const char* name, const BatchArguments& batch) {
  if (array && (array->ndim() != 1 || array->size() != batch.input.values.size)) {
    throw py::value_error(std::string(name) + " must have one entry per id, " +
                          std::to_string(batch.input.values.size) + ", got " + std::to_string(array->size()));
  }
  return array ? array->data() : nullptr;
}

// Builds the features of a group; `columns` and `means` are empty unless the group is pooled.
std::vector<Feature> make_features(const std::vector<int32_t>& tables, const std::vector<int64_t>& columns,
                                   const std::vector<bool>& means);

using EngineClass = py::class_<Engine>;

void bind_rules(py::module_& m);
void bind_plan(py::module_& m);
void bind_tables(py::module_& m);
void bind_saves(py::module_& m);
void bind_lifecycle(py::module_& m);
void bind_batches(EngineClass& engine);
void bind_checksums(py::module_& m);
void bind_unique(py::module_& m);
void bind_serving(py::module_& m);
void bind_simulation(py::module_& m);

}  // namespace rec_sdk
