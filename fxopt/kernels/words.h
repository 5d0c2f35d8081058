// The words of a plan, one after the other.
#pragma once
#include <cstring>
#include <utility>

#include "entry.h"

namespace fxopt {

class Words {
 public:
  // The first word is the plan's version; `name` is the operator's, for what is said of a plan that does not fit.
  Words(const Request& request, int64_t version, const char* name)
      : at_(request.words), end_(request.words + request.n_words), name_(name) {
    if (next() != version) refused("fxopt.%s: expected a plan made by words()", name_);
  }
  int64_t next() {
    return *take(1);
  }
  const int64_t* take(int64_t count) {
    if (count < 0 || count > end_ - at_) refused("fxopt.%s: expected a whole plan", name_);
    return std::exchange(at_, at_ + count);
  }
  // A struct of int64 that lies in the words.
  template <class Record>
  const Record& record() {
    return reinterpret_cast<const Record&>(*take(sizeof(Record) / sizeof(int64_t)));
  }
  bool are_read() const { return at_ == end_; }
  double number() {
    const int64_t bits = next();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

 private:
  const int64_t *at_, *end_;
  const char* name_;
};

}  // namespace fxopt
