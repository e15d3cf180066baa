#include "torch_npu_ext/serving/json.h"

#include <charconv>
#include <cstring>
#include <stdexcept>

namespace rec_sdk {
namespace {

constexpr int kMostNested = 64;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("JSON: " + what); }

void append_utf8(uint32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr uint32_t kFirst[] = {0, 0xC0, 0xE0, 0xF0};
  out += static_cast<char>(kFirst[more] | code >> 6 * more);
  for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
}

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : at_(text.data()), end_(at_ + text.size()) {}

  Json whole() {
    Json value = parse(0);
    skip();
    if (at_ != end_) fail("text behind the value");
    return value;
  }

 private:
  void skip() {
    while (at_ != end_ && std::strchr(" \n\r\t", *at_) != nullptr && *at_ != '\0') ++at_;
  }
  char next() {
    if (at_ == end_) fail("it ends in a value");
    return *at_++;
  }
  bool take(char wanted) {
    skip();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("no '") + wanted + "' where one belongs");
  }

  Json parse(int depth) {
    if (depth > kMostNested) fail("too deep");
    Json value;
    if (take('{')) {
      value.kind_ = Json::Kind::kObject;
      for (bool more = !take('}'); more; more = !take('}')) {
        if (!value.keys_.empty()) expect(',');
        expect('"');
        value.keys_.push_back(string());
        expect(':');
        value.items_.push_back(parse(depth + 1));
      }
    } else if (take('[')) {
      value.kind_ = Json::Kind::kList;
      for (bool more = !take(']'); more; more = !take(']')) {
        if (!value.items_.empty()) expect(',');
        value.items_.push_back(parse(depth + 1));
      }
    } else if (take('"')) {
      value.kind_ = Json::Kind::kString;
      value.text_ = string();
    } else {
      plain(value);
    }
    return value;
  }

  void plain(Json& value) {
    while (at_ != end_ && std::strchr(",]} \n\r\t", *at_) == nullptr) value.text_ += *at_++;
    const std::string& text = value.text_;
    if (text == "null") return;
    if (text == "true" || text == "false") {
      value.kind_ = Json::Kind::kBool;
    } else if (!text.empty() && text.find_first_not_of("0123456789+-.eE") == std::string::npos) {
      value.kind_ = Json::Kind::kNumber;
    } else {
      fail("no value: " + text.substr(0, 40));
    }
  }

  std::string string() {  // called after the opening quotation mark has been read
    std::string found;
    for (char c = next(); c != '"'; c = next()) {
      if (c == '\\') {
        escaped(found);
      } else {
        found += c;
      }
    }
    return found;
  }

  void escaped(std::string& out) {
    const char c = next();
    if (c == 'u') {
      uint32_t code = hex();
      if (code >= 0xD800 && code < 0xDC00) {  // the first half of a surrogate pair
        if (next() != '\\' || next() != 'u') fail("half a character");
        const uint32_t low = hex();
        if (low < 0xDC00 || low >= 0xE000) fail("half a character");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
      append_utf8(code, out);
      return;
    }
    constexpr char kNames[] = "\"\\/bfnrt", kValues[] = "\"\\/\b\f\n\r\t";
    const char* const name = c == '\0' ? nullptr : std::strchr(kNames, c);
    if (name == nullptr) fail("no character has this name");
    out += kValues[name - kNames];
  }

  uint32_t hex() {
    if (end_ - at_ < 4) fail("it ends in a value");
    uint32_t code = 0;
    const auto read = std::from_chars(at_, at_ + 4, code, 16);
    if (read.ptr != at_ + 4) fail("no four hexadecimal digits");
    at_ += 4;
    return code;
  }

  const char* at_;
  const char* end_;
};

Json Json::parse(const std::string& text) { return JsonParser(text).whole(); }

const Json* Json::find(const std::string& key) const {
  if (kind_ != Kind::kObject) fail("no object, which would have " + key);
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == key) return &items_[i];
  }
  return nullptr;
}

const Json& Json::operator[](const std::string& key) const {
  const Json* const found = find(key);
  if (found == nullptr) fail("no " + key);
  return *found;
}

const std::string& Json::string() const {
  if (kind_ != Kind::kString) fail("no string");
  return text_;
}

int64_t Json::integer() const {
  int64_t value = 0;
  const auto read = std::from_chars(text_.data(), text_.data() + text_.size(), value);
  if (kind_ != Kind::kNumber || read.ec != std::errc() || read.ptr != text_.data() + text_.size())
    fail("no integer");
  return value;
}

bool Json::boolean() const {
  if (kind_ != Kind::kBool) fail("neither true nor false");
  return text_ == "true";
}

const std::vector<Json>& Json::list() const {
  if (kind_ != Kind::kList) fail("no list");
  return items_;
}

}  // namespace rec_sdk
