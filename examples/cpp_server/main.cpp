// Answers each line of the standard input with rows of a table, until the input ends: cpp_server TABLE
// FOLDER... [< questions]
//
//   find ID...          for each id a line: 1 or 0, whether it is there, and its weights
//   sum ID... | mean    the pooled row
//   refresh             "later" or "same": whether there was a later save; other lines are then answered from
//   it
//
// For a line that cannot be answered, the output is "error: " and the reason.
#include <rec_sdk/table_reader.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

void print(const float* row, int64_t dim) {
  for (int64_t k = 0; k < dim; ++k)
    std::printf(" %.9g", static_cast<double>(row[k]));  // 9 digits: every bit of it
  std::printf("\n");
}

void find(const rec_sdk::TableReader& reader, const std::vector<int64_t>& ids) {
  const auto count = static_cast<int64_t>(ids.size());
  std::vector<float> rows(ids.size() * static_cast<size_t>(reader.dim()));
  const std::unique_ptr<bool[]> found(new bool[ids.size()]);
  reader.lookup(ids.data(), count, rows.data(), found.get());
  for (int64_t i = 0; i < count; ++i) {
    std::printf("%d", found[static_cast<size_t>(i)]);
    print(rows.data() + i * reader.dim(), reader.dim());
  }
}

void pool(const rec_sdk::TableReader& reader, const std::vector<int64_t>& ids, rec_sdk::Pooling pooling) {
  std::vector<float> sum(static_cast<size_t>(reader.dim()));
  const int64_t offsets[] = {0, static_cast<int64_t>(ids.size())};
  reader.lookup_pooled(ids.data(), offsets, 1, nullptr, pooling, sum.data());
  std::printf("pooled");
  print(sum.data(), reader.dim());
}

void answer(rec_sdk::TableReader& reader, const std::string& line) {
  std::istringstream words(line);
  std::string command;
  words >> command;
  std::vector<int64_t> ids;
  for (int64_t id; words >> id;) ids.push_back(id);
  if (command == "find") {
    find(reader, ids);
  } else if (command == "sum") {
    pool(reader, ids, rec_sdk::Pooling::kSum);
  } else if (command == "mean") {
    pool(reader, ids, rec_sdk::Pooling::kMean);
  } else if (command == "refresh") {
    std::printf("%s\n", reader.refresh() ? "later" : "same");
  } else {
    std::printf("error: expected find, sum, mean or refresh\n");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: cpp_server TABLE FOLDER...\n");
    return 2;
  }
  try {
    rec_sdk::TableReader reader(std::vector<std::string>(arguments + 2, arguments + count), arguments[1]);
    std::fprintf(stderr, "%s: %lld rows of %lld %s\n", reader.save().c_str(),
                 static_cast<long long>(reader.rows()), static_cast<long long>(reader.dim()),
                 reader.weight_type().c_str());
    for (std::string line; std::getline(std::cin, line); std::fflush(stdout)) {
      try {
        answer(reader, line);
      } catch (const std::exception& error) {
        std::printf("error: %s\n", error.what());
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_server: %s\n", error.what());
    return 1;
  }
  return 0;
}
