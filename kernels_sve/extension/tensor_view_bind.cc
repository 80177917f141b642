// TensorView of tensor_view.h. Tested by tests/kernels/test_dispatch.py.
#include <algorithm>
#include <array>

#include "extension/tensor_view.h"

namespace fm {
namespace {

struct DTypeEntry {
  DType dtype;
  const char* name;
  int64_t bytes;
};
constexpr std::array<DTypeEntry, 9> DTYPES = {{{DType::f32, "float32", 4},
                                               {DType::f64, "float64", 8},
                                               {DType::bf16, "bfloat16", 2},
                                               {DType::f16, "float16", 2},
                                               {DType::i32, "int32", 4},
                                               {DType::i64, "int64", 8},
                                               {DType::u8, "uint8", 1},
                                               {DType::b8, "bool", 1},
                                               {DType::i8, "int8", 1}}};

// The torch objects that every call compares with; made once and kept for the life of the process.
struct Torch {
  py::object tensor_type, dtypes[DTYPES.size()];
  PyObject *data_ptr, *shape, *stride, *dtype, *is_cpu;

  Torch() {
    py::module_ torch = py::module_::import("torch");
    tensor_type = torch.attr("Tensor");
    for (size_t i = 0; i < DTYPES.size(); ++i) dtypes[i] = torch.attr(DTYPES[i].name);
    data_ptr = PyUnicode_InternFromString("data_ptr");
    shape = PyUnicode_InternFromString("shape");
    stride = PyUnicode_InternFromString("stride");
    dtype = PyUnicode_InternFromString("dtype");
    is_cpu = PyUnicode_InternFromString("is_cpu");
  }
};

const Torch& torch_objects() {
  static const Torch* torch = new Torch();
  return *torch;
}

py::object attribute(py::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object call(py::handle object, PyObject* method) {
  PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

std::vector<int64_t> integers(py::handle tuple) {
  std::vector<int64_t> values(static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
  return values;
}

std::string text(const std::vector<int64_t>& values) {
  std::string out = "(";
  for (size_t i = 0; i < values.size(); ++i)
    out += (i ? ", " : "") + (values[i] < 0 ? "*" : std::to_string(values[i]));
  return out + (values.size() == 1 ? ",)" : ")");
}

}  // namespace

std::vector<BindFunction>& bind_functions() {
  static std::vector<BindFunction> functions;
  return functions;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::bf16x3:
      return "float32 in three bfloat16 parts";
    case DType::int8_of_f32:
      return "float32 as int8";
    case DType::int8_of_bf16:
      return "bfloat16 as int8";
    case DType::int8_of_f16:
      return "float16 as int8";
    default:
      return DTYPES[static_cast<size_t>(dtype)].name;
  }
}

TensorView::TensorView(const char* name, py::handle tensor) : name_(name) {
  const Torch& torch = torch_objects();
  const int is_tensor = PyObject_IsInstance(tensor.ptr(), torch.tensor_type.ptr());
  if (is_tensor < 0) throw py::error_already_set();
  if (!is_tensor) fail("a torch tensor", Py_TYPE(tensor.ptr())->tp_name);
  if (attribute(tensor, torch.is_cpu).ptr() != Py_True)
    fail("a tensor in CPU memory", py::str(tensor.attr("device")));
  const py::object dtype = attribute(tensor, torch.dtype);
  size_t i = 0;
  while (i < DTYPES.size() && !dtype.is(torch.dtypes[i])) ++i;
  if (i == DTYPES.size()) fail("a real dtype of this extension", py::str(dtype));
  dtype_ = DTYPES[i].dtype;
  sizes_ = integers(attribute(tensor, torch.shape));
  strides_ = integers(call(tensor, torch.stride));
  address_ = PyLong_AsSize_t(call(tensor, torch.data_ptr).ptr());
  numel_ = 1;
  int64_t last = 0;
  for (int d = 0; d < rank(); ++d) numel_ *= sizes_[d], last += (sizes_[d] - 1) * strides_[d];
  bytes_ = numel_ ? (last + 1) * DTYPES[i].bytes : 0;
}

void TensorView::fail(const std::string& expected, const std::string& got) const {
  throw py::value_error(std::string(name_) + ": expected " + expected + ", got " + got);
}

const TensorView& TensorView::dtype(std::initializer_list<DType> allowed) const {
  std::string names;
  for (DType candidate : allowed) {
    if (candidate == dtype_) return *this;
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(candidate));
  }
  fail("dtype " + names, dtype_name(dtype_));
}

const TensorView& TensorView::same_dtype(const TensorView& other) const {
  if (dtype_ != other.dtype_)
    fail(std::string("dtype ") + dtype_name(other.dtype_) + " as " + other.name_,
         dtype_name(dtype_));
  return *this;
}

const TensorView& TensorView::rank(int min, int max) const {
  if (rank() < min || rank() > max) {
    const std::string range =
        min == max ? std::to_string(min) : std::to_string(min) + " to " + std::to_string(max);
    fail(range + " dimensions", "shape " + shape_text());
  }
  return *this;
}

const TensorView& TensorView::shape(std::initializer_list<int64_t> expected) const {
  bool same = expected.size() == sizes_.size();
  size_t d = 0;
  for (int64_t size : expected) {
    if (same && size >= 0 && size != sizes_[d]) same = false;
    ++d;
  }
  if (!same) fail("shape " + text(std::vector<int64_t>(expected)), shape_text());
  return *this;
}

const TensorView& TensorView::same_shape(const TensorView& other) const {
  if (sizes_ != other.sizes_)
    fail("shape " + other.shape_text() + " as " + other.name_, shape_text());
  return *this;
}

const TensorView& TensorView::contiguous() const {
  int64_t expected = 1;
  for (int d = rank() - 1; d >= 0 && numel_; --d) {
    if (sizes_[d] != 1 && strides_[d] != expected)
      fail("a contiguous tensor", "shape " + shape_text() + " with strides " + text(strides_));
    expected *= sizes_[d];
  }
  return *this;
}

const TensorView& TensorView::last_contiguous() const {
  if (rank() && numel_ && size(-1) != 1 && stride(-1) != 1) {
    fail("a contiguous last dimension",
         "shape " + shape_text() + " with strides " + text(strides_));
  }
  return *this;
}

const TensorView& TensorView::aligned(int64_t bytes) const {
  if (address_ % bytes)
    fail("data aligned to " + std::to_string(bytes) + " bytes",
         "an offset of " + std::to_string(address_ % bytes));
  return *this;
}

bool TensorView::overlaps(const TensorView& other) const {
  return bytes_ && other.bytes_ && address_ < other.address_ + other.bytes_ &&
         other.address_ < address_ + bytes_;
}

const TensorView& TensorView::disjoint(std::initializer_list<const TensorView*> others) const {
  for (const TensorView* other : others) {
    if (overlaps(*other))
      fail(std::string("memory apart from ") + other->name_, "overlapping tensors");
  }
  return *this;
}

const TensorView& TensorView::same_or_disjoint(
    std::initializer_list<const TensorView*> others) const {
  for (const TensorView* other : others) {
    const bool same = address_ == other->address_ && dtype_ == other->dtype_ &&
                      strides_ == other->strides_ && sizes_ == other->sizes_;
    if (!same && overlaps(*other))
      fail(std::string("the memory of ") + other->name_ + " or memory apart from it",
           "partly overlapping tensors");
  }
  return *this;
}

std::string TensorView::shape_text() const { return text(sizes_); }

}  // namespace fm
