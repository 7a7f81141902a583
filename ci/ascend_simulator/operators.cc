// Kernels of the operators that encoder towers use. One that is missing here fails, naming itself.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>

using namespace sim;

extern "C" {

// ---- objects
static at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT64: return at::kLong;
    case ACL_INT32: return at::kInt;
    case ACL_INT16: return at::kShort;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    default: TORCH_CHECK(false, "the simulator has no data type ", (int)type);
  }
}
static at::Tensor view(void *data, at::IntArrayRef shape, at::IntArrayRef strides, int64_t offset, aclDataType type) {
  at::ScalarType scalar = scalar_type(type);
  char *first = static_cast<char *>(data) + offset * (int64_t)c10::elementSize(scalar);
  return at::from_blob(first, shape, strides, at::TensorOptions(scalar));
}
size_t aclDataTypeSize(aclDataType type) { return c10::elementSize(scalar_type(type)); }
aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dims, aclDataType type, const int64_t *strides, int64_t offset, aclFormat, const int64_t *, uint64_t, void *data) {
  OnlyKernels guard;
  at::IntArrayRef sizes(shape, dims);
  Ints dense(dims, 1);
  for (int64_t d = (int64_t)dims - 2; d >= 0; d--) dense[d] = dense[d + 1] * shape[d + 1];
  return new aclTensor{view(data, sizes, strides ? at::IntArrayRef(strides, dims) : at::IntArrayRef(dense), offset, type)};
}
aclScalar *aclCreateScalar(void *value, aclDataType type) {
  OnlyKernels guard;
  return new aclScalar{view(value, {}, {}, 0, type).item()};
}
aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t n) { return new aclIntArray{Ints(values, values + n)}; }
aclFloatArray *aclCreateFloatArray(const float *values, uint64_t n) { return new aclFloatArray{{values, values + n}}; }
aclBoolArray *aclCreateBoolArray(const bool *values, uint64_t n) { return new aclBoolArray{{values, values + n}}; }
aclTensorList *aclCreateTensorList(const aclTensor *const *tensors, uint64_t n) {
  auto **first = const_cast<aclTensor **>(tensors);
  return new aclTensorList{{first, first + n}};
}
aclScalarList *aclCreateScalarList(const aclScalar *const *scalars, uint64_t n) {
  auto **first = const_cast<aclScalar **>(scalars);
  return new aclScalarList{{first, first + n}};
}
int aclDestroyTensor(const aclTensor *tensor) { delete tensor; return 0; }
int aclDestroyScalar(const aclScalar *scalar) { delete scalar; return 0; }
int aclDestroyIntArray(const aclIntArray *ints) { delete ints; return 0; }
int aclDestroyFloatArray(const aclFloatArray *floats) { delete floats; return 0; }
int aclDestroyBoolArray(const aclBoolArray *bools) { delete bools; return 0; }
int aclDestroyTensorList(const aclTensorList *list) {
  if (list) for (aclTensor *tensor : list->tensors) delete tensor;
  delete list;
  return 0;
}
int aclDestroyScalarList(const aclScalarList *list) {
  if (list) for (aclScalar *scalar : list->scalars) delete scalar;
  delete list;
  return 0;
}
int aclDestroyAclOpExecutor(aclOpExecutor *) { return 0; }
int aclGetViewShape(const aclTensor *tensor, int64_t **shape, uint64_t *dims) {
  *dims = tensor->view.dim();
  *shape = new int64_t[*dims];  // the caller deletes it
  std::copy_n(tensor->view.sizes().begin(), *dims, *shape);
  return 0;
}

// ---- launch phase of every operator; an executor is missing where nothing prepared a kernel
int cann_stub_launch2(const char *name, void *prepared, void *stream) {
  std::lock_guard<std::recursive_mutex> lock(mu);
  std::unique_ptr<aclOpExecutor> executor(static_cast<aclOpExecutor *>(prepared));
  if (aclError code = injected(name, ACL_ERROR_RT_AICORE_EXCEPTION)) return code;
  if (!executor && !setting("CANN_SIM_ALLOW_UNKNOWN", 0))
    return fail(ACL_ERROR_OP_NOT_FOUND, std::string("no simulated kernel for ") + name);
  Op op;
  op.name = name;
  if (executor) {
    op.name += executor->note;
    op.run = std::move(executor->run);
  }
  return enqueue(stream_of(stream), std::move(op));
}

// The older operator interface, which torch_npu takes for internal formats among others: no kernels.
static aclError graph_engine_operator(const char *name) {
  if (setting("CANN_SIM_ALLOW_UNKNOWN", 0)) return 0;
  return fail(ACL_ERROR_OP_NOT_FOUND, std::string("no simulated kernel for the graph engine's ") + name);
}
aclError aclopCompileAndExecute(const char *name, int, const aclTensorDesc *const[], const aclDataBuffer *const[], int, const aclTensorDesc *const[], aclDataBuffer *const[], const aclopAttr *, aclopEngineType, aclopCompileType, const char *, aclrtStream) {
  return graph_engine_operator(name);
}
aclError aclopCompileAndExecuteV2(const char *name, int, aclTensorDesc *[], aclDataBuffer *[], int, aclTensorDesc *[], aclDataBuffer *[], aclopAttr *, aclopEngineType, aclopCompileType, const char *, aclrtStream) {
  return graph_engine_operator(name);
}

#define OUT uint64_t *ws, aclOpExecutor **ex
#define T const aclTensor *
#define N const aclScalar *
#define I const aclIntArray *
#define OP(name, ...) __attribute__((used)) int aclnn##name##GetWorkspaceSize(__VA_ARGS__, OUT)
#define RUN(parameters, body, ...) { return prepare(ws, ex, [] parameters { body; }, __VA_ARGS__); }

#define UNARY(name, function) OP(name, T a, T o) RUN((auto a, auto o), put(o, function(a)), a, o)
#define INPLACE_UNARY(name, function) OP(Inplace##name, T a) RUN((auto a), put(a, function(a)), a)
#define BINARY(name, function) OP(name, T a, T b, T o) RUN((auto a, auto b, auto o), put(o, function(a, b)), a, b, o)
#define WITH_SCALAR(name, function) OP(name, T a, N b, T o) RUN((auto a, auto b, auto o), put(o, function(a, b)), a, b, o)

// ---- filling, copying, casting
OP(InplaceCopy, T d, T s) RUN((auto d, auto s), d.copy_(s), d, s)
OP(ForeachCopy, const aclTensorList *s, const aclTensorList *d)
RUN((auto s, auto d), for (size_t i = 0; i < d.size(); i++) d[i].copy_(s[i]), s, d)
OP(ForeachZeroInplace, const aclTensorList *d) RUN((auto d), for (at::Tensor &one : d) one.zero_(), d)
OP(InplaceZero, T d) RUN((auto d), d.zero_(), d)
OP(InplaceOne, T d) RUN((auto d), d.fill_(1), d)
OP(InplaceFillScalar, T d, N v) RUN((auto d, auto v), d.fill_(v), d, v)
OP(InplaceFillTensor, T d, T v) RUN((auto d, auto v), d.fill_(v), d, v)
OP(Arange, N start, N end, N step, T o) RUN((auto start, auto end, auto step, auto o), put(o, at::arange(start, end, step, o.options())), start, end, step, o)
OP(Linspace, N start, N end, int64_t steps, T o) RUN((auto start, auto end, auto steps, auto o), put(o, at::linspace(start, end, steps, o.options())), start, end, steps, o)
OP(ConstantPadNd, T a, I pad, N v, T o) RUN((auto a, auto pad, auto v, auto o), put(o, at::constant_pad_nd(a, pad, v)), a, pad, v, o)
OP(Cat, const aclTensorList *list, int64_t dim, T o) RUN((auto list, auto dim, auto o), put(o, at::cat(list, dim)), list, dim, o)
OP(Stack, const aclTensorList *list, int64_t dim, T o) RUN((auto list, auto dim, auto o), put(o, at::stack(list, dim)), list, dim, o)
OP(Repeat, T a, I n, T o) RUN((auto a, auto n, auto o), put(o, a.repeat(n)), a, n, o)
OP(RepeatInterleave, T a, T n, int64_t size, T o)  // of the flattened input
RUN((auto a, auto n, auto size, auto o), put(o, at::repeat_interleave(a, n.to(at::kLong), std::nullopt, size)), a, n, size, o)
OP(Flip, T a, I dims, T o) RUN((auto a, auto dims, auto o), put(o, at::flip(a, dims)), a, dims, o)

// Random numbers are repeatable; they are not those of the hardware's generator.
static at::Generator seeded(int64_t seed, int64_t offset) { return at::make_generator<at::CPUGeneratorImpl>((uint64_t)(seed + offset)); }
OP(InplaceNormal, T a, float mean, float deviation, int64_t seed, int64_t offset)
RUN((auto a, auto mean, auto deviation, auto seed, auto offset), a.normal_(mean, deviation, seeded(seed, offset)), a, mean, deviation, seed, offset)

// ---- arithmetic
OP(Add, T a, T b, N k, T o) RUN((auto a, auto b, auto k, auto o), put(o, at::add(a, b, k)), a, b, k, o)
OP(Adds, T a, N b, N k, T o) RUN((auto a, auto b, auto k, auto o), put(o, at::add(a, b, k)), a, b, k, o)
OP(Addcmul, T a, T b, T c, N k, T o) RUN((auto a, auto b, auto c, auto k, auto o), put(o, at::addcmul(a, b, c, k)), a, b, c, k, o)
OP(InplaceAddcmul, T a, T b, T c, N k) RUN((auto a, auto b, auto c, auto k), put(a, at::addcmul(a, b, c, k)), a, b, c, k)
OP(InplaceAdd, T a, T b, N k) RUN((auto a, auto b, auto k), put(a, at::add(a, b, k)), a, b, k)
OP(InplaceAdds, T a, N b, N k) RUN((auto a, auto b, auto k), put(a, at::add(a, b, k)), a, b, k)
OP(Sub, T a, T b, N k, T o) RUN((auto a, auto b, auto k, auto o), put(o, at::sub(a, b, k)), a, b, k, o)
OP(Subs, T a, N b, N k, T o) RUN((auto a, auto b, auto k, auto o), put(o, at::sub(a, b, k)), a, b, k, o)
OP(Rsubs, T a, N b, N k, T o) RUN((auto a, auto b, auto k, auto o), put(o, at::rsub(a, b, k)), a, b, k, o)
OP(InplaceSub, T a, T b, N k) RUN((auto a, auto b, auto k), put(a, at::sub(a, b, k)), a, b, k)
OP(InplaceSubs, T a, N b, N k) RUN((auto a, auto b, auto k), put(a, at::sub(a, b, k)), a, b, k)
BINARY(Mul, at::mul)
WITH_SCALAR(Muls, at::mul)
OP(InplaceMul, T a, T b) RUN((auto a, auto b), put(a, at::mul(a, b)), a, b)
OP(InplaceMuls, T a, N b) RUN((auto a, auto b), put(a, at::mul(a, b)), a, b)
BINARY(Div, at::div)
WITH_SCALAR(Divs, at::div)
OP(InplaceDiv, T a, T b) RUN((auto a, auto b), put(a, at::div(a, b)), a, b)
OP(InplaceDivs, T a, N b) RUN((auto a, auto b), put(a, at::div(a, b)), a, b)
BINARY(FloorDivide, at::floor_divide)
WITH_SCALAR(FloorDivides, at::floor_divide)
BINARY(RemainderTensorTensor, at::remainder)
WITH_SCALAR(RemainderTensorScalar, at::remainder)
BINARY(Maximum, at::maximum)
BINARY(Minimum, at::minimum)
WITH_SCALAR(PowTensorScalar, at::pow)
OP(PowScalarTensor, N a, T b, T o) RUN((auto a, auto b, auto o), put(o, at::pow(a, b)), a, b, o)
BINARY(Polar, at::polar)
OP(Clamp, T a, N low, N high, T o) {  // one of the bounds may be missing
  auto from = low ? std::optional(low->value) : std::nullopt, to = high ? std::optional(high->value) : std::nullopt;
  return prepare(ws, ex, [=](auto a, auto o) { put(o, at::clamp(a, from, to)); }, a, o);
}
OP(InplaceClampMinTensor, T a, T low) RUN((auto a, auto low), put(a, at::clamp_min(a, low)), a, low)
OP(Equal, T a, T b, T o) RUN((auto a, auto b, auto o), o.fill_(at::equal(a, b)), a, b, o)
UNARY(Neg, at::neg)
UNARY(Abs, at::abs)
UNARY(Exp, at::exp)
UNARY(Cos, at::cos)
UNARY(Sin, at::sin)
UNARY(Tanh, at::tanh)
UNARY(Sqrt, at::sqrt)
UNARY(Rsqrt, at::rsqrt)
UNARY(Reciprocal, at::reciprocal)
UNARY(Erf, at::erf)
UNARY(Sigmoid, at::sigmoid)
UNARY(Relu, at::relu)
UNARY(Silu, at::silu)
UNARY(Floor, at::floor)
UNARY(Ceil, at::ceil)
UNARY(Round, at::round)
UNARY(LogicalNot, at::logical_not)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(IsFinite, at::isfinite)
UNARY(IsNegInf, at::isneginf)
INPLACE_UNARY(Exp, at::exp)
INPLACE_UNARY(Sqrt, at::sqrt)
OP(Gelu, T a, T o) RUN((auto a, auto o), put(o, at::gelu(a)), a, o)
OP(FastGelu, T a, T o) RUN((auto a, auto o), put(o, a * at::sigmoid(a * 1.702)), a, o)
OP(Softmax, T a, int64_t dim, T o) RUN((auto a, auto dim, auto o), put(o, at::softmax(a, dim)), a, dim, o)

OP(SwiGlu, T a, int64_t dim, T o) RUN((auto a, auto dim, auto o), auto halves = a.chunk(2, dim); put(o, at::silu(halves[0]) * halves[1]), a, dim, o)

// Rotary embedding, mode 0: the second half of the last dimension turns with the first.
OP(RotaryPositionEmbeddingV2, T a, T cos, T sin, int64_t mode, T rotation, T o) {
  *ws = 0, *ex = nullptr;
  if (mode != 0 || rotation) return 0;  // no kernel: the launch names the operator
  OnlyKernels guard;
  auto run = [](auto a, auto cos, auto sin, auto o) {
    auto halves = a.chunk(2, -1);
    put(o, a * cos + at::cat({-halves[1], halves[0]}, -1) * sin);
  };
  return prepare(ws, ex, run, a, cos, sin, o);
}

// ---- comparison and selection
BINARY(EqTensor, at::eq)
WITH_SCALAR(EqScalar, at::eq)
BINARY(NeTensor, at::ne)
WITH_SCALAR(NeScalar, at::ne)
BINARY(LtTensor, at::lt)
WITH_SCALAR(LtScalar, at::lt)
BINARY(LeTensor, at::le)
WITH_SCALAR(LeScalar, at::le)
BINARY(GtTensor, at::gt)
WITH_SCALAR(GtScalar, at::gt)
BINARY(GeTensor, at::ge)
WITH_SCALAR(GeScalar, at::ge)
BINARY(LogicalAnd, at::logical_and)
BINARY(LogicalOr, at::logical_or)
BINARY(BitwiseAndTensor, at::bitwise_and)
BINARY(BitwiseOrTensor, at::bitwise_or)
OP(SWhere, T c, T a, T b, T o) RUN((auto c, auto a, auto b, auto o), put(o, at::where(c.to(at::kBool), a, b)), c, a, b, o)
OP(InplaceMaskedFillScalar, T a, T mask, N v) RUN((auto a, auto mask, auto v), a.masked_fill_(mask.to(at::kBool), v), a, mask, v)
OP(IndexSelect, T a, int64_t dim, T index, T o) RUN((auto a, auto dim, auto index, auto o), put(o, at::index_select(a, dim, index)), a, dim, index, o)
OP(Embedding, T weight, T index, T o) RUN((auto weight, auto index, auto o), put(o, at::embedding(weight, index)), weight, index, o)
OP(EmbeddingBag, T weight, T index, T offsets, bool by_frequency, int64_t mode, bool sparse, T factors, bool last, int64_t padding, T o, T bags, T sizes, T places)
RUN((auto weight, auto index, auto offsets, auto by_frequency, auto mode, auto sparse, auto factors, auto last, auto padding, auto o, auto, auto, auto),
    put(o, std::get<0>(at::embedding_bag(weight.to(at::kFloat), index.to(at::kLong), offsets.to(at::kLong), by_frequency, mode, sparse, factors.defined() ? std::optional(factors.to(at::kFloat)) : std::nullopt, last, padding < 0 ? std::nullopt : std::optional(padding)))),
    weight, index, offsets, by_frequency, mode, sparse, factors, last, padding, o, bags, sizes, places)
OP(Gather, T a, int64_t dim, T index, T o) RUN((auto a, auto dim, auto index, auto o), put(o, at::gather(a, dim, index.to(at::kLong))), a, dim, index, o)
static c10::List<std::optional<at::Tensor>> indices_of(const Tensors &tensors) {
  c10::List<std::optional<at::Tensor>> result;
  for (const at::Tensor &tensor : tensors)
    result.push_back(tensor.defined() && tensor.numel() ? std::optional(tensor.scalar_type() == at::kBool ? tensor : tensor.to(at::kLong)) : std::nullopt);
  return result;
}
OP(Index, T a, const aclTensorList *at_, T o) RUN((auto a, auto list, auto o), put(o, at::index(a, indices_of(list))), a, at_, o)
OP(IndexPutImpl, T a, const aclTensorList *at_, T v, bool accumulate, bool unsafe)
RUN((auto a, auto list, auto v, auto accumulate, auto), a.index_put_(indices_of(list), v, accumulate), a, at_, v, accumulate, unsafe)

OP(SearchSorted, T sorted, T a, bool narrow, bool right, T sorter, T o)
RUN((auto sorted, auto a, auto narrow, auto right, auto sorter, auto o),
    put(o, at::searchsorted(sorted, a, narrow, right, std::nullopt, sorter.defined() ? std::optional(sorter) : std::nullopt)), sorted, a, narrow, right, sorter, o)
// Sizes that depend on data: the kernel leaves them in the output, which has room for the most; the
// caller waits for the stream and asks for the shape.
static int positions(T a, T o, bool by_dimension, OUT) {
  auto *target = const_cast<aclTensor *>(o);
  auto run = [=](auto a, auto room) {
    at::Tensor found = at::nonzero(a);
    if (by_dimension) found = found.t();
    TORCH_CHECK(found.numel() <= room.numel(), "output of shape ", room.sizes(), " for ", found.numel(), " indices");
    target->view = at::from_blob(room.data_ptr(), found.sizes(), room.options());
    target->view.copy_(found);
  };
  return prepare(ws, ex, run, a, o);
}
OP(Nonzero, T a, T o) { return positions(a, o, false, ws, ex); }
OP(NonzeroV2, T a, T o) { return positions(a, o, true, ws, ex); }

// ---- reduction
OP(Mean, T a, I dims, bool keep, aclDataType type, T o) RUN((auto a, auto dims, auto keep, auto, auto o), put(o, at::mean(a, dims, keep)), a, dims, keep, type, o)
OP(ReduceSum, T a, I dims, bool keep, aclDataType type, T o) RUN((auto a, auto dims, auto keep, auto, auto o), put(o, at::sum(a, dims, keep)), a, dims, keep, type, o)
OP(Amax, T a, I dims, bool keep, T o) RUN((auto a, auto dims, auto keep, auto o), put(o, at::amax(a, dims, keep)), a, dims, keep, o)
OP(Amin, T a, I dims, bool keep, T o) RUN((auto a, auto dims, auto keep, auto o), put(o, at::amin(a, dims, keep)), a, dims, keep, o)
UNARY(Max, at::max)
UNARY(Min, at::min)
OP(All, T a, I dims, bool keep, T o) RUN((auto a, auto dims, auto keep, auto o), put(o, dims.empty() ? at::all(a) : at::all(a, dims, keep)), a, dims, keep, o)
OP(Any, T a, I dims, bool keep, T o) RUN((auto a, auto dims, auto keep, auto o), put(o, dims.empty() ? at::any(a) : at::any(a, dims, keep)), a, dims, keep, o)
OP(Cumsum, T a, int64_t dim, aclDataType type, T o) RUN((auto a, auto dim, auto, auto o), put(o, at::cumsum(a, dim)), a, dim, type, o)
OP(LinalgVectorNorm, T a, N order, I dims, bool keep, aclDataType type, T o)
RUN((auto a, auto order, auto dims, auto keep, auto, auto o), put(o, dims.empty() ? at::linalg_vector_norm(a, order) : at::linalg_vector_norm(a, order, at::OptionalIntArrayRef(dims), keep)), a, order, dims, keep, type, o)

// ---- matrices, normalisation, convolution
OP(Matmul, T a, T b, T o, int8_t cube) RUN((auto a, auto b, auto o, auto), put(o, at::matmul(a, b)), a, b, o, cube)
OP(Mm, T a, T b, T o, int8_t cube) RUN((auto a, auto b, auto o, auto), put(o, at::mm(a, b)), a, b, o, cube)
OP(BatchMatMul, T a, T b, T o, int8_t cube) RUN((auto a, auto b, auto o, auto), put(o, at::bmm(a, b)), a, b, o, cube)
OP(Addmm, T c, T a, T b, N beta, N alpha, T o, int8_t cube)
RUN((auto c, auto a, auto b, auto beta, auto alpha, auto o, auto), put(o, at::addmm(c, a, b, beta, alpha)), c, a, b, beta, alpha, o, cube)
OP(LayerNorm, T a, I shape, T weight, T bias, double eps, T o, T mean, T rstd)
RUN((auto a, auto shape, auto weight, auto bias, auto eps, auto o, auto, auto), put(o, at::layer_norm(a, shape, weight, bias, eps)), a, shape, weight, bias, eps, o, mean, rstd)
static at::Tensor rms_norm(const at::Tensor &a, const at::Tensor &weight, double eps) {
  at::Tensor wide = a.to(at::kFloat);
  return wide * at::rsqrt(wide.square().mean(-1, true) + eps) * weight;
}
OP(RmsNorm, T a, T weight, double eps, T o, T rstd)
RUN((auto a, auto weight, auto eps, auto o, auto), put(o, rms_norm(a, weight, eps)), a, weight, eps, o, rstd)
OP(AddRmsNorm, T a, T b, T weight, double eps, T o, T rstd, T sum)
RUN((auto a, auto b, auto weight, auto eps, auto o, auto, auto sum), put(sum, a + b); put(o, rms_norm(sum, weight, eps)), a, b, weight, eps, o, rstd, sum)
OP(Convolution, T a, T weight, T bias, I stride, I padding, I dilation, bool transposed, I output_padding, int64_t groups, T o, int8_t cube)
RUN((auto a, auto weight, auto bias, auto stride, auto padding, auto dilation, auto transposed, auto output_padding, auto groups, auto o, auto),
    put(o, at::convolution(a, weight, bias.defined() ? std::optional(bias) : std::nullopt, stride, padding, dilation, transposed, output_padding, groups)),
    a, weight, bias, stride, padding, dilation, transposed, output_padding, groups, o, cube)
OP(AvgPool2d, T a, I kernel, I stride, I padding, bool ceil, bool counts_padding, int64_t divisor, int8_t cube, T o)
RUN((auto a, auto kernel, auto stride, auto padding, auto ceil, auto counts_padding, auto divisor, auto, auto o),
    put(o, at::avg_pool2d(a, kernel, stride, padding, ceil, counts_padding, divisor ? std::optional(divisor) : std::nullopt)),
    a, kernel, stride, padding, ceil, counts_padding, divisor, cube, o)

OP(UpsampleBicubic2d, T a, I size, bool corners, double tall, double wide, T o)
RUN((auto a, auto size, auto corners, auto, auto, auto o), put(o, at::upsample_bicubic2d(a, size, corners)), a, size, corners, tall, wide, o)
OP(UpsampleBilinear2dAA, T a, I size, bool corners, double tall, double wide, T o)
RUN((auto a, auto size, auto corners, auto, auto, auto o), put(o, at::_upsample_bilinear2d_aa(a, size, corners)), a, size, corners, tall, wide, o)
OP(GridSampler2D, T a, T grid, int64_t mode, int64_t padding, bool corners, T o)
RUN((auto a, auto grid, auto mode, auto padding, auto corners, auto o), put(o, at::grid_sampler_2d(a, grid, mode, padding, corners)), a, grid, mode, padding, corners, o)

}  // extern "C"
