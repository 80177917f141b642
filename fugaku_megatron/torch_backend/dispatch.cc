// ATen operators of the CPU whose large calls go to Python functions, and all others to PyTorch's own kernel.
//
// A call of Python costs about 10 us and a small operator 2, so the size of a call is compared here. Compiled for the torch that
// it runs with (build.py), because ATen has no stable ABI.
#include <ATen/CPUFunctions.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/_grouped_mm_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/cross_entropy_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace fm {
namespace {

using at::Tensor;

// Kernels of the calls of at least the smallest size: PyTorch's; ours; or for each shape the faster ones.
enum class Kernels { torch, native, automatic };
std::atomic<Kernels> kernels{Kernels::torch};
// The report counts and times every call.
std::atomic<bool> counting{false};

int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Calls of one shape that ran on one side's kernel.
struct Side {
  static constexpr int64_t WARM_UP = 1, TRIALS = 3;
  int64_t started = 0, timed = 0, total = 0, best = std::numeric_limits<int64_t>::max();

  bool tried() const { return started >= WARM_UP + TRIALS; }
  double mean() const { return static_cast<double>(total) / static_cast<double>(timed); }
  // Nanoseconds of call number `number`.
  void add(int64_t number, int64_t passed) {
    if (number < WARM_UP) return;
    ++timed;
    total += passed;
    best = std::min(best, passed);
  }
};

struct Shape {
  Side ours, torch;
  bool refused = false;

  bool chooses_ours() const {
    if (kernels == Kernels::native || at::globalContext().deterministicAlgorithms()) return true;
    if (refused) return false;
    if (ours.tried() && torch.tried()) return ours.best <= torch.best;
    return ours.started <= torch.started;
  }
};

// What a shape is: sizes, strides and types of the tensors, and integers among the other arguments.
using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (int64_t each : key) hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15u + 1;
    return hash ^ hash >> 32;
  }
};

struct Counts {
  int64_t calls = 0, served = 0, ns = 0;
};

// One replaced operator.
struct Operator {
  // Python function with the operator's arguments; NotImplemented hands a call to PyTorch. None: no call is served.
  std::atomic<py::object*> serve{nullptr};
  // Calls with a smaller size stay with PyTorch.
  std::atomic<int64_t> smallest{0};

  std::mutex mutex;  // of what follows
  std::unordered_map<Key, Shape, KeyHash> shapes;
  Counts small, large;

  // The shapes of a program that never repeats one (a growing cache) are forgotten.
  static constexpr size_t MOST_SHAPES = 4096;
};

std::map<std::string, Operator*>& operators() {
  static std::map<std::string, Operator*> rows;
  return rows;
}

// OpenMP's threads of this thread: a fork leaves a child without them, and it would wait for them forever.
thread_local bool has_team = false, lost_team = false;

void check_team() {
  if (at::get_num_threads() == 1) return;
  TORCH_CHECK(!lost_team,
              "this process was forked after its parent computed with several threads, which it "
              "lacks: call "
              "torch.set_num_threads(1) in it, or start processes by spawn");
  has_team = true;
}

// One call of at least the smallest size: the choice of its kernel, and its time.
class Trial {
 public:
  Trial(Operator& row, Key key) : row_(row), key_(std::move(key)) {
    check_team();
    std::lock_guard<std::mutex> locked(row_.mutex);
    if (row_.shapes.size() >= Operator::MOST_SHAPES) row_.shapes.clear();
    Shape& shape = row_.shapes[key_];
    ours_ = shape.chooses_ours();
    start(shape);
  }
  Trial(const Trial&) = delete;
  ~Trial() {
    if (!timed_) return;
    const int64_t passed = now() - begin_;
    std::lock_guard<std::mutex> locked(row_.mutex);
    Shape& shape = row_.shapes[key_];
    (ours_ ? shape.ours : shape.torch).add(number_, passed);
    ++row_.large.calls;
    row_.large.served += ours_;
    row_.large.ns += passed;
  }

  bool ours() const { return ours_; }
  // PyTorch's kernel runs after all.
  void refuse() {
    std::lock_guard<std::mutex> locked(row_.mutex);
    Shape& shape = row_.shapes[key_];
    --shape.ours.started;
    shape.refused = true;
    ours_ = false;
    start(shape);
  }

 private:
  void start(Shape& shape) {
    Side& side = ours_ ? shape.ours : shape.torch;
    timed_ = counting || !side.tried();
    number_ = side.started++;
    if (timed_) begin_ = now();
  }

  Operator& row_;
  Key key_;
  bool ours_, timed_;
  int64_t number_, begin_;
};

// One call below the smallest size.
class SmallCall {
 public:
  explicit SmallCall(Operator& row) : row_(row), timed_(counting), begin_(timed_ ? now() : 0) {}
  ~SmallCall() {
    if (!timed_) return;
    const int64_t passed = now() - begin_;
    std::lock_guard<std::mutex> locked(row_.mutex);
    ++row_.small.calls;
    row_.small.ns += passed;
  }

 private:
  Operator& row_;
  bool timed_;
  int64_t begin_;
};

void append(Key& key, const Tensor& x) {
  if (!x.defined()) return key.push_back(-1);
  key.push_back(x.dim() * 64 + static_cast<int64_t>(x.scalar_type()));
  key.insert(key.end(), x.sizes().begin(), x.sizes().end());
  key.insert(key.end(), x.strides().begin(), x.strides().end());
}
void append(Key& key, const std::optional<Tensor>& x) { append(key, x ? *x : Tensor()); }
void append(Key& key, at::TensorList tensors) {
  key.push_back(static_cast<int64_t>(tensors.size()));
  for (const Tensor& each : tensors) {
    key.push_back(each.numel() * 64 + static_cast<int64_t>(each.scalar_type()));
  }
}
void append(Key& key, const at::Scalar& x) {
  key.push_back(static_cast<int64_t>(x.toDouble() * 4096));
}
void append(Key& key, c10::string_view x) {
  key.push_back(static_cast<int64_t>(std::hash<std::string_view>()(x)));
}
// A number with a fraction (a learning rate) may change at each call.
template <class T>
void append(Key& key, const T& value) {
  if constexpr (std::is_integral_v<T>) key.push_back(static_cast<int64_t>(value));
}

template <class... A>
Key key_of(const A&... arguments) {
  Key key;
  key.reserve(32);
  key.push_back(at::get_num_threads());
  (append(key, arguments), ...);
  return key;
}

bool served_type(const Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
}

// Sizes of calls, of a list the mean; 0 for types that no kernel of ours has.
struct Elements {
  template <typename... Rest>
  static int64_t of(const Tensor& x, const Rest&...) {
    return served_type(x) ? x.numel() : 0;
  }
  template <typename... Rest>
  static int64_t of(at::TensorList tensors, const Rest&...) {
    int64_t total = 0;
    for (const Tensor& each : tensors) total += of(each);
    return tensors.empty() ? 0 : total / static_cast<int64_t>(tensors.size());
  }
};
struct MultiplyAdds {
  template <typename... Rest>
  static int64_t of(const Tensor& a, const Tensor& b, const Rest&...) {
    return served_type(a) && b.dim() > 0 ? a.numel() * b.size(-1) : 0;
  }
};
// Of a product that is added to its first argument.
struct AddedMultiplyAdds {
  template <typename... Rest>
  static int64_t of(const Tensor&, const Tensor& a, const Tensor& b, const Rest&...) {
    return MultiplyAdds::of(a, b);
  }
};

// Scores of a sample times elements of a head.
struct AttentionMultiplyAdds {
  template <typename... Rest>
  static int64_t of(const Tensor& query, const Tensor& key, const Tensor&, double, const Rest&...) {
    if (!served_type(query) || query.dim() != 4 || key.dim() != 4) return 0;
    return query.size(1) * query.size(2) * query.size(3) * key.size(2);
  }
  // Of the backward, whose first tensor is a gradient.
  template <typename... Rest>
  static int64_t of(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value,
                    const Rest&...) {
    return of(query, key, value, 0.0);
  }
};
// Of an operator that PyTorch composes of others: traces, modes, transforms and forward-mode derivatives need the others.
struct ComposedElements {
  static constexpr int64_t NEVER = -1;
  template <typename... Rest>
  static int64_t of(const Tensor& x, const Rest&... rest) {
    const bool plain = is_plain(x) && (is_plain(rest) && ...);
    return plain && !traced() ? Elements::of(x) : NEVER;
  }

 private:
  static bool traced() {
    using c10::DispatchKey;
    for (const auto key : {DispatchKey::FuncTorchDynamicLayerBackMode,
                           DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::Tracer}) {
      if (c10::impl::tls_is_dispatch_key_included(key)) return true;
    }
    return c10::impl::TorchDispatchModeTLS::any_modes_set();
  }
  static bool is_plain(const Tensor& x) {
    if (!x.defined()) return true;
    const bool wrapped = x.key_set().has_any(c10::python_ks) || x.is_neg() || x._is_zerotensor();
    return !wrapped && !x._fw_grad(0).defined();
  }
  static bool is_plain(const std::optional<Tensor>& x) { return !x || is_plain(*x); }
  template <typename T>
  static bool is_plain(const T&) {
    return true;
  }
};

template <typename T>
py::object to_python(const T& value) {
  return py::cast(value);
}
py::object to_python(at::TensorList tensors) { return py::cast(tensors.vec()); }
py::object to_python(at::IntArrayRef numbers) { return py::cast(numbers.vec()); }
py::object to_python(c10::SymIntArrayRef numbers) {
  return to_python(C10_AS_INTARRAYREF_SLOW(numbers));
}

// The value of an operator: what `serve` returned, or the tensors that it was asked to write.
template <typename Return>
struct Result {
  template <typename... A>
  static Return of(const py::object& returned, A&...) {
    return returned.cast<Return>();
  }
};
// None: an undefined tensor.
template <typename... T>
struct Result<std::tuple<T...>> {
  template <typename... A>
  static std::tuple<T...> of(const py::object& returned, A&...) {
    return each(returned.cast<py::tuple>(), std::index_sequence_for<T...>());
  }

 private:
  template <size_t... I>
  static std::tuple<T...> each(const py::tuple& values, std::index_sequence<I...>) {
    return {values[I].is_none() ? T() : values[I].template cast<T>()...};
  }
};
template <>
struct Result<void> {
  template <typename... A>
  static void of(const py::object&, A&...) {}
};
template <>
struct Result<Tensor&> {
  template <typename... A>
  static Tensor& of(const py::object&, A&... arguments) {
    Tensor* out = nullptr;
    ((out = written(arguments, out)), ...);
    return *out;
  }

 private:
  static Tensor* written(Tensor& out, Tensor*) { return &out; }
  template <typename T>
  static Tensor* written(const T&, Tensor* before) {
    return before;
  }
};

// Tensors of Python's functions are plain ones: no default device, no subclass.
class NoTorchFunction {
 public:
  NoTorchFunction() : before_(TLS::get_disabled_state()) {
    TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~NoTorchFunction() { TLS::set_disabled_state(before_); }

 private:
  using TLS = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState before_;
};

// What `serve` returns; its exception is raised where the operator was called.
template <class... A>
py::object call_python(const py::object& serve, const A&... arguments) {
  const NoTorchFunction guard;
  try {
    return serve(to_python(arguments)...);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

template <auto Original, typename Size>
struct Replaced;

template <typename Return, typename... A, Return (*Original)(A...), typename Size>
struct Replaced<Original, Size> {
  static Operator row;

  static Return call(A... arguments) {
    if (kernels == Kernels::torch) return Original(std::forward<A>(arguments)...);
    const py::object* serve = row.serve;
    if (!serve || Size::of(arguments...) < row.smallest) {
      const SmallCall call(row);
      return Original(std::forward<A>(arguments)...);
    }
    Trial trial(row, key_of(arguments...));
    if (trial.ours()) {
      const py::gil_scoped_acquire locked;
      const py::object returned = call_python(*serve, arguments...);
      if (returned.ptr() != Py_NotImplemented) return Result<Return>::of(returned, arguments...);
      trial.refuse();
    }
    return Original(std::forward<A>(arguments)...);
  }
};
template <typename Return, typename... A, Return (*Original)(A...), typename Size>
Operator Replaced<Original, Size>::row;

template <auto Original, typename Size = Elements>
void replace(torch::Library& library, const char* name) {
  library.impl(name, &Replaced<Original, Size>::call);
  operators()[name] = &Replaced<Original, Size>::row;
}

// _fused_adam_ and _fused_adamw_ with a number as the learning rate.
using FusedStep = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                       at::TensorList, at::TensorList, double, double, double, double, double, bool,
                       bool, const std::optional<Tensor>&, const std::optional<Tensor>&);

void replace_all(torch::Library& cpu) {
  replace<&at::cpu::mm, MultiplyAdds>(cpu, "mm");
  replace<&at::cpu::mm_outf, MultiplyAdds>(cpu, "mm.out");
  replace<&at::cpu::addmm, AddedMultiplyAdds>(cpu, "addmm");
  replace<&at::cpu::addmm_outf, AddedMultiplyAdds>(cpu, "addmm.out");
  replace<&at::cpu::bmm, MultiplyAdds>(cpu, "bmm");
  replace<&at::cpu::bmm_outf, MultiplyAdds>(cpu, "bmm.out");
  replace<&at::compositeexplicitautograd::_grouped_mm, MultiplyAdds>(cpu, "_grouped_mm");
  replace<&at::cpu::embedding_dense_backward>(cpu, "embedding_dense_backward");
  replace<static_cast<FusedStep*>(&at::cpu::_fused_adam_)>(cpu, "_fused_adam_");
  replace<static_cast<FusedStep*>(&at::cpu::_fused_adamw_)>(cpu, "_fused_adamw_");
  replace<&at::cpu::_scaled_dot_product_flash_attention_for_cpu, AttentionMultiplyAdds>(
      cpu, "_scaled_dot_product_flash_attention_for_cpu");
  replace<&at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward, AttentionMultiplyAdds>(
      cpu, "_scaled_dot_product_flash_attention_for_cpu_backward");
  replace<&at::cpu::native_layer_norm>(cpu, "native_layer_norm");
  replace<&at::cpu::native_layer_norm_backward>(cpu, "native_layer_norm_backward");
  replace<&at::cpu::gelu>(cpu, "gelu");
  replace<&at::cpu::gelu_outf>(cpu, "gelu.out");
  replace<&at::cpu::gelu_>(cpu, "gelu_");
  replace<&at::cpu::gelu_backward>(cpu, "gelu_backward");
  replace<&at::cpu::gelu_backward_outf>(cpu, "gelu_backward.grad_input");
  replace<&at::cpu::silu>(cpu, "silu");
  replace<&at::cpu::silu_outf>(cpu, "silu.out");
  replace<&at::cpu::silu_>(cpu, "silu_");
  replace<&at::cpu::silu_backward>(cpu, "silu_backward");
  replace<&at::cpu::silu_backward_outf>(cpu, "silu_backward.grad_input");
}

// Operators without a derivative of their own; `serve` adds one.
void replace_composed(torch::Library& library) {
  using namespace at::compositeimplicitautograd;
  replace<&rms_norm_symint, ComposedElements>(library, "rms_norm");
  replace<&cross_entropy_loss_symint, ComposedElements>(library, "cross_entropy_loss");
}

// Drops the warning that a kernel of the same operator is replaced.
class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers every operator, once in a process: false the second time. The library is never destroyed: other threads may call it
// until the end.
bool install() {
  if (!operators().empty()) return false;
  pthread_atfork(nullptr, nullptr, [] { lost_team = has_team; });
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const auto library = [](c10::DispatchKey key) -> torch::Library& {
    return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  };
  torch::Library& cpu = library(c10::DispatchKey::CPU);
  replace_all(cpu);
  replace_composed(cpu);
  replace_composed(library(c10::DispatchKey::AutogradCPU));
  return true;
}

Operator& operator_of(const std::string& name) {
  const auto found = operators().find(name);
  if (found == operators().end()) throw py::key_error("no replaced operator " + name);
  return *found->second;
}

const std::map<std::string, Kernels> KERNELS = {
    {"torch", Kernels::torch}, {"native", Kernels::native}, {"auto", Kernels::automatic}};

void use(const std::string& name) {
  const auto found = KERNELS.find(name);
  if (found == KERNELS.end())
    throw py::value_error("kernels: expected one of auto, native, torch, got " + name);
  kernels = found->second;
}

std::string in_use() {
  for (const auto& [name, value] : KERNELS) {
    if (value == kernels) return name;
  }
  return "";
}

void set(const std::string& name, const py::object& serve, int64_t smallest) {
  Operator& row = operator_of(name);
  row.smallest = smallest;
  row.serve = new py::object(serve);
}

int64_t exchange_smallest(const std::string& name, int64_t smallest) {
  return operator_of(name).smallest.exchange(smallest);
}

// Nanoseconds that PyTorch's kernels would have taken longer than ours in the calls that we served, by the shapes that ran on both;
// not a number if none did.
double saved(const Operator& row) {
  bool known = row.large.served == 0;
  double sum = 0;
  for (const auto& [key, shape] : row.shapes) {
    if (!shape.ours.timed || !shape.torch.timed) continue;
    known = true;
    sum += static_cast<double>(shape.ours.started) * (shape.torch.mean() - shape.ours.mean());
  }
  return known ? sum : std::numeric_limits<double>::quiet_NaN();
}

// Of each operator that was called: its name, calls, calls that we served, their seconds, and those that PyTorch would have taken.
py::list counts() {
  py::list rows;
  for (const auto& [name, row] : operators()) {
    std::lock_guard<std::mutex> locked(row->mutex);
    const int64_t calls = row->small.calls + row->large.calls;
    const double ns = static_cast<double>(row->small.ns + row->large.ns);
    if (!calls) continue;
    rows.append(
        py::make_tuple(name, calls, row->large.served, ns * 1e-9, (ns + saved(*row)) * 1e-9));
  }
  return rows;
}

}  // namespace
}  // namespace fm

// A library that is compiled with newer ones loads with glibc 2.28 and GCC 8's libstdc++ (manylinux_2_28), too.
extern "C" {
char __libc_single_threaded = 0;  // libstdc++ then counts references atomically
}
#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
template std::string std::basic_stringbuf<char>::str() const&;
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace py::literals;
  module.def("install", &fm::install);
  module.def("set", &fm::set, "name"_a, "serve"_a, "smallest"_a);
  module.def("exchange_smallest", &fm::exchange_smallest, "name"_a, "smallest"_a);
  module.def("use", &fm::use, "kernels"_a);
  module.def("in_use", &fm::in_use);
  module.def("count", [](bool on) { fm::counting = on; }, "on"_a);
  module.def("counts", &fm::counts);
}
