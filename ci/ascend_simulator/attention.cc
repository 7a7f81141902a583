// Fused inference attention, TND layout without mask: softmax(scale * Q K^T) V per sequence.
#include "operators.h"

using namespace sim;

namespace {

std::string shown(const Ints &values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

// Rows of a sequence as (heads, rows, head_dim) in float; key/value heads repeated to match.
at::Tensor heads_first(const at::Tensor &packed, int64_t from, int64_t to, int64_t heads) {
  at::Tensor part = packed.slice(0, from, to).transpose(0, 1).to(at::kFloat);
  return part.size(0) == heads ? part : part.repeat_interleave(heads / part.size(0), 0);
}

aclError attend(const aclTensor *q, const aclTensorList *k, const aclTensorList *v, const aclIntArray *q_ends,
                const aclIntArray *kv_ends, int64_t heads, double scale, const char *layout, int64_t kv_heads,
                const aclTensor *out, uint64_t *workspace, aclOpExecutor **executor) {
  *workspace = 1024;
  *executor = nullptr;
  if (std::string(layout) != "TND") return 0;  // no kernel: the launch names the operator
  if (!q_ends || !kv_ends || q_ends->values.empty() || q_ends->values.size() != kv_ends->values.size())
    return fail(ACL_ERROR_INVALID_PARAM, "TND attention needs actual_seq_lengths for q and kv");
  at::Tensor query = kept(q), key = kept(k->tensors[0]), value = kept(v->tensors[0]), target = kept(out);
  if (query.size(1) != heads || key.size(1) != (kv_heads ? kv_heads : heads))
    return fail(ACL_ERROR_INVALID_PARAM, "queries or keys have other heads than the numbers say");
  Ints q_rows = kept(q_ends), kv_rows = kept(kv_ends);
  int64_t before = 0;
  for (int64_t end : q_rows) {
    if (end < before) return fail(ACL_ERROR_INVALID_PARAM, "actual_seq_lengths must not fall: " + shown(q_rows));
    before = end;
  }
  if (q_rows.back() != query.size(0) || kv_rows.back() != key.size(0))
    return fail(ACL_ERROR_INVALID_PARAM, "the last of actual_seq_lengths must be the number of rows, got " + shown(q_rows));
  auto run = [=] {
    OnlyKernels guard;
    int64_t q_from = 0, kv_from = 0;
    for (size_t i = 0; i < q_rows.size(); q_from = q_rows[i], kv_from = kv_rows[i], i++) {
      if (q_rows[i] == q_from) continue;
      at::Tensor scores = at::matmul(heads_first(query, q_from, q_rows[i], heads),
                                     heads_first(key, kv_from, kv_rows[i], heads).transpose(1, 2));
      at::Tensor mixed = at::matmul(at::softmax(scores * scale, -1), heads_first(value, kv_from, kv_rows[i], heads));
      target.slice(0, q_from, q_rows[i]).copy_(mixed.transpose(0, 1));
    }
  };
  *executor = new aclOpExecutor{run, "[q=" + shown(q_rows) + " kv=" + shown(kv_rows) + "]"};
  return 0;
}

}  // namespace

#define T const aclTensor *
// Argument orders: as the public interfaces list them, confirmed by equal numbers. Version 1 of
// PyTorch's operator calls 3; its version 2 calls 4, and 5 on Ascend 950.
#define TENSORS                                                                                                \
  T q, const aclTensorList *k, const aclTensorList *v, T, T, const aclIntArray *q_ends,                        \
      const aclIntArray *kv_ends, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, const aclIntArray *, T, T, T
#define NUMBERS                                                                                                \
  int64_t heads, double scale, int64_t, int64_t, char *layout, int64_t kv_heads, int64_t, int64_t, int64_t, int64_t
#define RESULTS T out, T, uint64_t *workspace, aclOpExecutor **executor
#define ATTENTION(version, ...)                                                                                \
  __attribute__((used)) int aclnnFusedInferAttentionScore##version##GetWorkspaceSize(__VA_ARGS__) {            \
    return attend(q, k, v, q_ends, kv_ends, heads, scale, layout, kv_heads, out, workspace, executor);         \
  }                                                                                                            \
  __attribute__((used)) int aclnnFusedInferAttentionScore##version##GetMaxWorkspaceSize(__VA_ARGS__) {         \
    (void)q, (void)k, (void)v, (void)q_ends, (void)kv_ends, (void)heads, (void)scale, (void)layout;            \
    (void)kv_heads, (void)out;                                                                                 \
    *workspace = 4096;                                                                                         \
    *executor = nullptr;                                                                                       \
    return 0;                                                                                                  \
  }

extern "C" {

ATTENTION(V3, TENSORS, NUMBERS, bool, int64_t, int64_t, RESULTS)
ATTENTION(V4, TENSORS, T, T, NUMBERS, bool, int64_t, int64_t, int64_t, RESULTS)
ATTENTION(V5, TENSORS, T, T, const aclIntArray *, const aclIntArray *, NUMBERS, bool, int64_t, int64_t, int64_t, int64_t, RESULTS)

// What PyTorch's scaled_dot_product_attention becomes; the mask is true where nothing is attended.
__attribute__((used)) int aclnnFlashAttentionScoreGetWorkspaceSize(
    T q, T k, T v, T, T, T, T mask, const aclIntArray *, double scale, double, int64_t, int64_t, int64_t, char *layout,
    int64_t, int64_t, T maximum, T sum, T, T out, uint64_t *workspace, aclOpExecutor **executor) {
  *workspace = 0;
  *executor = nullptr;
  if (std::string(layout) != "BNSD") return 0;
  OnlyKernels guard;
  auto run = [=](auto query, auto key, auto value, auto masked, auto max_out, auto sum_out, auto target) {
    at::Tensor scores = at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(-2, -1)) * scale;
    if (masked.defined()) scores = scores.masked_fill(masked.to(at::kBool), -INFINITY);
    put(target, at::matmul(at::softmax(scores, -1), value.to(at::kFloat)));
    max_out.zero_();
    sum_out.fill_(1);
  };
  return prepare(workspace, executor, run, q, k, v, mask, maximum, sum, out);
}

}  // extern "C"
