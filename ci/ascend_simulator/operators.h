// The operator API's objects, and how a two-phase aclnn call becomes a queued kernel.
//
// A kernel is PyTorch's own CPU kernel on the same memory: device memory is host memory here, so
// an aclTensor is viewed in place. What is simulated is the call, its order and its memory.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "runtime.h"

struct aclTensor { at::Tensor view; };
struct aclScalar { at::Scalar value; };
struct aclIntArray { std::vector<int64_t> values; };
struct aclFloatArray { std::vector<float> values; };
struct aclBoolArray { std::vector<bool> values; };
struct aclTensorList { std::vector<aclTensor *> tensors; };
struct aclScalarList { std::vector<aclScalar *> scalars; };
struct aclOpExecutor { std::function<void()> run; std::string note; };

namespace sim {

using Ints = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

// What a kernel keeps of its arguments: the API's objects are destroyed after the launch.
inline at::Tensor kept(const aclTensor *tensor) { return tensor ? tensor->view : at::Tensor(); }
inline at::Scalar kept(const aclScalar *scalar) {
  TORCH_CHECK(scalar, "a scalar is missing that the simulated operator needs");
  return scalar->value;
}
inline Ints kept(const aclIntArray *ints) { return ints ? ints->values : Ints(); }
inline Tensors kept(const aclTensorList *list) {
  Tensors result;
  for (aclTensor *tensor : list->tensors) result.push_back(kept(tensor));
  return result;
}
template <class Plain> std::enable_if_t<std::is_arithmetic_v<Plain> || std::is_enum_v<Plain>, Plain> kept(Plain value) { return value; }

// Neither autograd nor a Python dispatch mode of the calling thread may see the kernels.
struct OnlyKernels {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// Prepare phase: keep the arguments, remember what to run.
template <class Kernel, class... Arguments>
aclError prepare(uint64_t *workspace, aclOpExecutor **executor, Kernel kernel, Arguments... arguments) {
  *workspace = 0;
  OnlyKernels guard;
  *executor = new aclOpExecutor{[kernel, all = std::make_tuple(kept(arguments)...)] {
                                  OnlyKernels guard;
                                  std::apply(kernel, all);
                                },
                                ""};
  return 0;
}

// Store a result: a shape that differs in more than size-one dimensions is a wrong call.
inline void put(const at::Tensor &out, const at::Tensor &result) {
  TORCH_CHECK(out.numel() == result.numel(), "output of shape ", out.sizes(), " for a result of shape ", result.sizes());
  out.copy_(result.reshape(out.sizes()));
}

}  // namespace sim
