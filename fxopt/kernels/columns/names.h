// The names that stand behind a plan's records: of each column its own and its table's.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>

#include "layout.h"

namespace fxopt {

// An error's text, and whose it is. words: of an encoded plan.
inline std::string with_names(const std::string& text, const int64_t* words, int64_t n_words, int64_t column) {
  const Plan plan(words);
  const char* at = reinterpret_cast<const char*>(plan.tiles + plan.header->n_tiles);
  const char* const end = reinterpret_cast<const char*>(words + n_words);
  const auto next = [&] {
    const std::string name(at, strnlen(at, size_t(end - at)));
    at = std::min(end, at + name.size() + 1);
    return name;
  };
  for (int64_t skipped = 0; skipped < 2 * column && at < end; skipped++) next();
  const std::string name = next(), table = next();
  return name.empty() ? text : text + " name='" + name + "' table='" + table + "'";
}

}  // namespace fxopt
