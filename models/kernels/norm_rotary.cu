#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kVector = 4;
constexpr int kChannels = kLanes * kVector;
constexpr int kHeads = 4;  // of a block
constexpr unsigned kAllLanes = 0xffffffff;

// A warp norms and turns one head, with the roundings and the order of sums of rms_norm.cu and
// rotary.cu. A lane has four neighbours; those that turn with them are 16 lanes away.
template <typename T>
__global__ void norm_and_turn(const T* strided_heads,
                              const T* query_weight,
                              const T* key_weight,
                              const T* cos,
                              const T* sin,
                              T* queries,
                              T* keys,
                              RotaryShape shape,
                              float epsilon) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto at = blockIdx.x * kHeads + threadIdx.y;
  const auto heads = static_cast<std::uint32_t>(shape.heads);
  const auto of_group = static_cast<std::uint32_t>(shape.heads_of_group);
  release_dependents();
  wait_for_inputs();
  if (at >= static_cast<std::uint32_t>(shape.tokens) * heads) return;
  const std::int64_t token = at / heads;
  const std::uint32_t group = at % heads / of_group;
  const std::uint32_t place = at % of_group;
  const bool is_key = place == of_group - 1;
  const int channel = lane * kVector;
  const auto x = load<kVector>(strided_heads + token * shape.token_stride +
                               group * shape.group_stride + place * shape.head_stride + channel);
  const auto weight = load<kVector>((is_key ? key_weight : query_weight) + channel);
  const auto cosines = load<kVector>(cos + token * kChannels + channel);
  const auto sines = load<kVector>(sin + token * kChannels + channel);

  float squares[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) squares[i] = __fmul_rn(widen(x.at[i]), widen(x.at[i]));
  float sum = __fadd_rn(__fadd_rn(__fadd_rn(squares[0], squares[1]), squares[2]), squares[3]);
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, sum, distance));
  const float mean = __fmul_rn(sum, __fdiv_rn(1.0F, static_cast<float>(kChannels)));
  const float root = __shfl_sync(kAllLanes, ::rsqrt(__fadd_rn(mean, epsilon)), 0);

  Vector<T, kVector> y;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float normed =
        rounded<T>(__fmul_rn(widen(weight.at[i]), rounded<T>(__fmul_rn(widen(x.at[i]), root))));
    const float other = __shfl_xor_sync(kAllLanes, normed, kLanes / 2);
    const float turned = __fmul_rn(other, widen(sines.at[i]));
    y.at[i] = narrow<T>(__fadd_rn(rounded<T>(__fmul_rn(normed, widen(cosines.at[i]))),
                                  rounded<T>(lane < kLanes / 2 ? -turned : turned)));
  }
  const std::int64_t row = token * (heads / of_group) + group;
  store(is_key ? keys + row * kChannels + channel
               : queries + (row * (of_group - 1) + place) * kChannels + channel,
        y);
}

}  // namespace

cudaError_t norm_rotary(const void* strided,
                        const void* query_weight,
                        const void* key_weight,
                        const void* cos,
                        const void* sin,
                        void* queries,
                        void* keys,
                        RotaryShape shape,
                        float epsilon,
                        Element element,
                        cudaStream_t stream) {
  const auto all = shape.tokens * shape.heads;
  if (all > INT32_MAX || shape.dim != kChannels || shape.interleaved) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    (void)launch_dependent(norm_and_turn<T>, static_cast<unsigned>(ceil_div(all, kHeads)),
                           dim3(kLanes, kHeads), 0, stream, static_cast<const T*>(strided),
                           static_cast<const T*>(query_weight), static_cast<const T*>(key_weight),
                           static_cast<const T*>(cos), static_cast<const T*>(sin),
                           static_cast<T*>(queries), static_cast<T*>(keys), shape, epsilon);
  });
}

}  // namespace ferry::models::launch
