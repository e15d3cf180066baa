// A JSON parser with only the features that manifests and the headers of tensor files need.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace rec_sdk {

class Json {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kList, kObject };

  static Json parse(const std::string& text);  // throws std::invalid_argument

  bool is_null() const { return kind_ == Kind::kNull; }
  bool has(const std::string& key) const { return find(key) != nullptr; }
  // These accessors throw std::invalid_argument if the value has another type or lacks the key.
  const Json& operator[](const std::string& key) const;
  const std::string& string() const;
  int64_t integer() const;
  bool boolean() const;
  const std::vector<Json>& list() const;

 private:
  friend class JsonParser;
  const Json* find(const std::string& key) const;

  Kind kind_ = Kind::kNull;
  std::string text_;         // a string's text, a number's digits, "true" or "false"
  std::vector<Json> items_;  // items of a list, or values of an object
  std::vector<std::string> keys_;
};

}  // namespace rec_sdk
