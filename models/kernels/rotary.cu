#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {
namespace {

constexpr std::int64_t kThreads = 256;

// The target: all heads one after another; or the heads of queries, and in a tensor of its own the
// last head of each group, a key.
template <typename T>
struct Heads {
  T* queries;
  T* keys;  // or null: all are queries

  __device__ T* at(std::int64_t token, std::uint32_t head, RotaryShape shape) const {
    if (keys == nullptr) return queries + (token * shape.heads + head) * shape.dim;
    const auto of_group = static_cast<std::uint32_t>(shape.heads_of_group);
    const std::int64_t group = token * (shape.heads / of_group) + head / of_group;
    const auto place = head % of_group;
    if (place == of_group - 1) return keys + group * shape.dim;
    return queries + (group * (of_group - 1) + place) * shape.dim;
  }
};

// Hugging Face's apply_rotary_pos_emb: q * cos + rotate_half(q) * sin, three roundings. N pairs of
// channels at once. Out of `strided` into `heads`, or, transposed, the other way.
template <int N, typename T>
__global__ void turn(T* strided_heads,
                     const T* cos,
                     const T* sin,
                     Heads<T> heads_apart,
                     RotaryShape shape,
                     bool transpose) {
  release_dependents();
  wait_for_inputs();
  const std::int64_t half = shape.dim / 2;
  const auto of_head = static_cast<std::uint32_t>(half / N);
  const auto heads = static_cast<std::uint32_t>(shape.heads);
  const auto of_group = static_cast<std::uint32_t>(shape.heads_of_group);
  const auto all = static_cast<std::uint32_t>(shape.tokens) * heads * of_head;
  for (std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x; at < all;
       at += gridDim.x * blockDim.x) {
    const std::int64_t i = static_cast<std::int64_t>(at % of_head) * N;
    const std::uint32_t head = at / of_head % heads;
    const std::int64_t token = at / of_head / heads;
    const std::int64_t strided = token * shape.token_stride + head / of_group * shape.group_stride +
                                 head % of_group * shape.head_stride;
    const std::int64_t strided_low = strided + (shape.interleaved ? 2 * i : i);
    const std::int64_t strided_high = strided + (shape.interleaved ? 2 * i + 1 : i + half);
    T* const low = heads_apart.at(token, head, shape) + i;
    T* const high = low + half;
    const auto cos_low = load<N>(cos + token * shape.dim + i);
    const auto cos_high = load<N>(cos + token * shape.dim + i + half);
    const auto sin_low = load<N>(sin + token * shape.dim + i);
    const auto sin_high = load<N>(sin + token * shape.dim + i + half);
    const auto a = load<N>(transpose ? low : strided_heads + strided_low);
    const auto b = load<N>(transpose ? high : strided_heads + strided_high);
    // One way b goes into the low half with minus sin_low, the other way with sin_high.
    Vector<T, N> y_low;
    Vector<T, N> y_high;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float u = widen(a.at[j]);
      const float v = widen(b.at[j]);
      const float v_low =
          transpose ? __fmul_rn(v, widen(sin_high.at[j])) : -__fmul_rn(v, widen(sin_low.at[j]));
      const float u_high =
          transpose ? -__fmul_rn(u, widen(sin_low.at[j])) : __fmul_rn(u, widen(sin_high.at[j]));
      y_low.at[j] =
          narrow<T>(__fadd_rn(rounded<T>(__fmul_rn(u, widen(cos_low.at[j]))), rounded<T>(v_low)));
      y_high.at[j] =
          narrow<T>(__fadd_rn(rounded<T>(__fmul_rn(v, widen(cos_high.at[j]))), rounded<T>(u_high)));
    }
    store(transpose ? strided_heads + strided_low : low, y_low);
    store(transpose ? strided_heads + strided_high : high, y_high);
  }
}

// Roundings are those of Hugging Face's tensors: of the angle, of its cosine, of the scaled cosine,
// and to T. Both halves of a row have the same values.
template <typename T>
__global__ void angles_of_tokens(const std::int64_t* positions,
                                 const float* inverse_frequencies,
                                 T* cos,
                                 T* sin,
                                 std::int64_t tokens,
                                 std::int64_t half,
                                 float scaling) {
  for (std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < tokens * half;
       at += std::int64_t{gridDim.x} * blockDim.x) {
    const auto token = at / half;
    const auto i = at % half;
    const float angle = __fmul_rn(static_cast<float>(positions[token]), inverse_frequencies[i]);
    const auto low = token * 2 * half + i;
    cos[low] = cos[low + half] = narrow<T>(__fmul_rn(::cosf(angle), scaling));
    sin[low] = sin[low + half] = narrow<T>(__fmul_rn(::sinf(angle), scaling));
  }
}

}  // namespace

cudaError_t rotary_angles(const std::int64_t* positions,
                          const float* inverse_frequencies,
                          void* cos,
                          void* sin,
                          std::int64_t tokens,
                          std::int64_t dim,
                          float scaling,
                          Element element,
                          cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    angles_of_tokens<<<blocks_of(tokens * dim / 2, kThreads), kThreads, 0, stream>>>(
        positions, inverse_frequencies, static_cast<T*>(cos), static_cast<T*>(sin), tokens, dim / 2,
        scaling);
  });
}

cudaError_t rotary(void* strided,
                   const void* cos,
                   const void* sin,
                   void* heads,
                   void* keys,
                   RotaryShape shape,
                   bool transpose,
                   Element element,
                   cudaStream_t stream) {
  if (shape.tokens * shape.heads * shape.dim > UINT32_MAX) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    constexpr int kWide = 16 / sizeof(T);
    auto* const in = static_cast<T*>(strided);
    const auto* cosines = static_cast<const T*>(cos);
    const auto* sines = static_cast<const T*>(sin);
    const Heads<T> out{static_cast<T*>(heads), static_cast<T*>(keys)};
    const auto launch = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto work = shape.tokens * shape.heads * (shape.dim / 2) / kWidth;
      (void)launch_dependent(turn<kWidth, T>, blocks_of(work, kThreads), kThreads, 0, stream, in,
                             cosines, sines, out, shape, transpose);
    };
    const bool together = !shape.interleaved && shape.dim / 2 % kWide == 0 &&
                          shape.token_stride % kWide == 0 && shape.group_stride % kWide == 0 &&
                          shape.head_stride % kWide == 0;
    if (together && is_aligned<T, kWide>(in) && is_aligned<T, kWide>(out.queries) &&
        is_aligned<T, kWide>(out.keys) && is_aligned<T, kWide>(cosines) &&
        is_aligned<T, kWide>(sines))
      launch(std::integral_constant<int, kWide>{});
    else
      launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace ferry::models::launch
