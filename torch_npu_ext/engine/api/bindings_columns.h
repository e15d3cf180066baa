// Conversion of the columns of rows and of candidates to NumPy arrays.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

template <class Values, class T>
struct Field {
  const char* name;
  Column column;
  T Values::* member;
};

// Calls visit(field) for each column that Values has; candidates have no score.
template <class Values, class Visit>
void for_each_field(const Visit& visit) {
  visit(Field<Values, uint32_t>{"count", Column::kCount, &Values::count});
  visit(Field<Values, uint32_t>{"last_use", Column::kLastUse, &Values::last_use});
  visit(Field<Values, uint32_t>{"clicks", Column::kClicks, &Values::clicks});
  visit(Field<Values, int64_t>{"timestamp", Column::kTimestamp, &Values::timestamp});
  if constexpr (std::is_same_v<Values, RowColumnValues>) {
    visit(Field<Values, double>{"score", Column::kScore, &Values::score});
  }
}

// Integer columns become int64 in Python, because torch supports few operators on uint32.
template <class T>
using Item = std::conditional_t<std::is_integral_v<T>, int64_t, double>;

template <class Values>
Columns to_arrays(const std::vector<Values>& values, ColumnSet kept) {
  Columns result;
  for_each_field<Values>([&](auto field) {
    if (!kept.has(field.column)) return;
    using T = Item<std::decay_t<decltype(values[0].*(field.member))>>;
    std::vector<T> array;
    array.reserve(values.size());
    for (const Values& one : values) array.push_back(static_cast<T>(one.*(field.member)));
    result[field.name] = to_python(std::move(array));
  });
  return result;
}

}  // namespace rec_sdk
