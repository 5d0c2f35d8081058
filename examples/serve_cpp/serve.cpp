// Answers requests with a model that `python -m fxopt export --package` has compiled: no Python in this process.
//   serve libfxopt.so model.pt2 requests.pt answers.pt
// requests.pt: a list of requests, each a list of tensors (torch.save). Batch sizes may differ from request to request.
// A model that was exported on a GPU runs there; requests come from the CPU, and answers go back to it.
#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

using Tensors = std::vector<at::Tensor>;

// An id outside its table.
struct BadId : std::out_of_range {
  std::string column, table;
  int64_t row, value, rows;  // of the request; the id; how many rows the table has

  BadId(std::string column, std::string table, int64_t row, int64_t value, int64_t rows)
      : std::out_of_range(column + ": id " + std::to_string(value) + " at row " + std::to_string(row) + " is outside table '" +
                          table + "' with " + std::to_string(rows) + " rows"),
        column(std::move(column)), table(std::move(table)), row(row), value(value), rows(rows) {}

  // Throws what the text of a kernel's error says; nothing where it is about something else.
  static void rethrow(const std::string& text) {
    const size_t at = text.find("fxopt-bad-id");
    long long row, value, rows;
    if (at == std::string::npos ||
        std::sscanf(text.c_str() + at, "fxopt-bad-id column=%*d row=%lld lane=%*d value=%lld rows=%lld", &row, &value, &rows) != 3)
      return;
    throw BadId(quoted(text, at, " name='"), quoted(text, at, " table='"), row, value, rows);
  }

 private:
  static std::string quoted(const std::string& text, size_t at, const std::string& key) {
    const size_t begin = text.find(key, at);
    if (begin == std::string::npos) return "";
    const size_t first = begin + key.size();
    return text.substr(first, text.find('\'', first) - first);
  }
};

class Model {
 public:
  explicit Model(const std::string& package) : loader_(package), device_(loader_.get_metadata().at("AOTI_DEVICE_KEY")) {
    if (!device_.is_cuda()) return;
    device_ = at::Device(at::kCUDA, 0);
    failed_ = reinterpret_cast<Failed>(dlsym(RTLD_DEFAULT, "fxopt_columns_failed"));
  }

  // Raises BadId, or std::runtime_error for a request that does not fit the model.
  Tensors operator()(const Tensors& inputs) {
    try {
      Tensors answers = moved(loader_.run(moved(inputs, device_)), at::kCPU);
      char text[1024];
      if (failed_ && failed_(0, text)) BadId::rethrow(text);  // a GPU tells of it when its work is done
      return answers;
    } catch (const BadId&) {
      throw;
    } catch (const std::exception& error) {
      BadId::rethrow(error.what());
      throw;
    }
  }

 private:
  using Failed = bool (*)(int device, char* text);

  static Tensors moved(Tensors tensors, at::Device device) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(device);
    return tensors;
  }

  torch::inductor::AOTIModelPackageLoader loader_;
  at::Device device_;
  Failed failed_ = nullptr;
};

static std::vector<char> bytes_of(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

static std::vector<Tensors> requests_of(const char* path) {
  std::vector<Tensors> requests;
  const c10::IValue saved = torch::jit::pickle_load(bytes_of(path));
  for (const c10::IValue& request : saved.toListRef()) {
    requests.emplace_back();
    for (const c10::IValue& tensor : request.toListRef()) requests.back().push_back(tensor.toTensor());
  }
  return requests;
}

static void write(const char* path, const std::vector<Tensors>& answers) {
  std::vector<c10::IValue> all;
  for (const Tensors& answer : answers) all.push_back(c10::ivalue::Tuple::create(std::vector<c10::IValue>(answer.begin(), answer.end())));
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(all)));
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

// Microseconds: the least of many calls, since other programs share the machine.
static double latency(Model& model, const Tensors& request) {
  using Clock = std::chrono::steady_clock;
  double best = 1e12;
  const auto end = Clock::now() + std::chrono::milliseconds(300);
  for (auto now = Clock::now(); now < end;) {
    model(request);
    const auto after = Clock::now();
    best = std::min(best, std::chrono::duration<double, std::micro>(after - now).count());
    now = after;
  }
  return best;
}

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: serve libfxopt.so model.pt2 requests.pt answers.pt\n");
    return 2;
  }
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "cannot load the kernels: %s\n", dlerror());
    return 1;
  }
  try {
    const c10::InferenceMode no_gradients;
    Model model(argv[2]);
    std::vector<Tensors> answers;
    std::map<int64_t, Tensors> by_batch;
    for (const Tensors& request : requests_of(argv[3])) {
      try {
        answers.push_back(model(request));
        by_batch.emplace(request[0].size(0), request);
      } catch (const BadId& error) {
        std::printf("request %zu: bad id %lld in column %s\n  %s\n", answers.size(), (long long)error.value, error.column.c_str(), error.what());
        answers.emplace_back();
      }
    }
    write(argv[4], answers);
    for (const auto& [batch, request] : by_batch) std::printf("batch %lld: %.1f us\n", (long long)batch, latency(model, request));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
